"""What both ways to run a step share: memory, homes, copies, checks, and the native code."""
