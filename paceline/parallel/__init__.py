"""Tensor parallelism: collectives between ranks, the processes of ranks, and how plans reach them."""
