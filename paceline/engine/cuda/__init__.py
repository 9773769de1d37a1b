"""The CUDA executor."""
