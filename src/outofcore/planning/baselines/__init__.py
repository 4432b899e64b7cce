"""The published systems, as policies beside ``auto``, which does without them. Each module cites its paper."""
