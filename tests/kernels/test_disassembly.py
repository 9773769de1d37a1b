"""Compiled kernels read no uniform register that nothing has written: a fault of ptxas."""

from __future__ import annotations

import pytest

from tests.kernels.disassembly import undefined_reads
from tests.kernels.test_variants import run


def listing(*lines: str) -> str:
    """As nvdisasm prints it: labels end in a colon, instructions have an address."""
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * at:04x}*/    {line} ;" for at, line in enumerate(lines)
    )


DESCRIPTOR = ("R2UR UR6, R7", "UIADD3 UR4, UP0, UR6, 0x2, URZ", "UMOV UR5, 0x40000040")


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ((*DESCRIPTOR, "EXIT"), []),
        ((*DESCRIPTOR[1:], *DESCRIPTOR[:1], "EXIT"), ["UIADD3 UR4, UP0, UR6, 0x2, URZ"]),
        # Of four registers of a GEMM, the last two are the descriptor of its second operand.
        (("UMOV UR6, UR3", "EXIT"), ["UMOV UR6, UR3"]),
        (("ULDC.64 UR6, c[0x0][0x208]", "HGMMA.64x8x16.F32 R24, R32, gdesc[UR4], RZ, !UPT, gsb0", "EXIT"), []),
        (
            ("ULDC.64 UR4, c[0x0][0x208]", "HGMMA.64x8x16.F32 R24, R32, gdesc[UR4], RZ", "EXIT"),
            ["HGMMA.64x8x16.F32 R24, R32, gdesc[UR4], RZ"],
        ),
        # Written on one of two ways: the condition of both may be the same.
        (("@P0 BRA `(.L_x_0)", "UMOV UR4, 0x1", ".L_x_0:", "UMOV UR5, UR4", "EXIT"), []),
        (("@P0 BRA `(.L_x_0)", "EXIT", "UMOV UR4, 0x1", ".L_x_0:", "UMOV UR5, UR4", "EXIT"), ["UMOV UR5, UR4"]),
        # Written behind the read, in a loop.
        ((".L_x_1:", "UMOV UR5, UR4", "UMOV UR4, 0x1", "@P0 BRA `(.L_x_1)", "EXIT"), []),
        # No way leads there.
        (("EXIT", "UMOV UR5, UR4"), []),
    ],
)
def test_a_register_that_nothing_has_written(lines: tuple[str, ...], found: list[str]) -> None:
    assert undefined_reads(listing(*lines)) == found


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-14b", "llama3.1-8b", "gemma3-4b", "gpt-oss-20b"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_no_kernel_of_a_model_reads_what_nothing_has_written(shape: str, kv_dtype: str) -> None:
    (line,) = run("-m", "tests.kernels.disassembly", shape, f"kv_dtype={kv_dtype}").splitlines()
    assert int(line.removesuffix(" kernels")) > 50
