"""The engine: executes plans, runs the loop and produces outputs."""
