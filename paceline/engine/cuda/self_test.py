"""Compiles and runs one small kernel, to find out whether Triton works on this machine."""

from __future__ import annotations

import time

import torch

from paceline.kernels.rms_norm import rms_norm, rms_norm_reference


def launch_kernel(device: str = "cuda") -> float:
    """Runs RMSNorm and compares it with its reference. Returns the seconds it took; raises if anything fails."""
    began = time.perf_counter()
    x = torch.linspace(-1, 1, 4 * 96, device=device).reshape(4, 96)
    weight, out = torch.ones(96, device=device), torch.empty_like(x)
    rms_norm(x, weight, 1e-5, out)
    expected, _ = rms_norm_reference(x, weight, 1e-5)
    if not torch.allclose(out, expected, atol=1e-4):
        raise RuntimeError("the kernel computes wrong values")
    return time.perf_counter() - began
