"""The runtime of eager loops and compiled steps: memory, homes, copies, checks, and the native code."""
