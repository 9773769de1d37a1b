"""GPU operations, one file each: the Triton kernel and the torch reference implementation it is tested against.

Every launcher can be captured in a CUDA graph: it allocates nothing, waits for nothing, and reads counts that change
between forward passes from device memory. What the host packs for the kernels is computed in engine/cuda/; layouts that
both sides agree on are in layouts.py. Shapes in docstrings use these letters everywhere:

    T tokens of the pass      R rows (requests) of the pass      H hidden size         V vocabulary
    Q query heads             K key/value heads                  G = Q / K             D head size
    P page size               S slots                            N, M columns and rows of a GEMM
"""
