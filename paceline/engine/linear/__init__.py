"""Matrices on a GPU: one `CudaLinear` per weight format, and the residual stream that they read and write."""
