"""GPU operations, one file each: the Triton kernel and the plain torch function it is tested against.

Every launcher may be captured in a CUDA graph: it allocates nothing, waits for nothing, and reads counts that change
from pass to pass on the device. Shapes in docstrings use these letters everywhere:

    T tokens of the pass      R rows (requests) of the pass      H hidden size         V vocabulary
    Q query heads             K key/value heads                  G = Q / K             D head size
    P page size               S slots                            N, M columns and rows of a matrix product
"""
