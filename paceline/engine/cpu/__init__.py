"""The CPU executor."""
