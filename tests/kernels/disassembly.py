"""Finds uniform registers of a compiled kernel that are read before anything has written them.

ptxas 12.8 does this to some kernels: it computes a descriptor, which tells a GEMM of a warp group (wgmma) where its
operand is in shared memory, before the base that it is computed from. Such a kernel gives wrong results or ends in an
illegal memory access, or nothing happens: it depends on what ran before. No test of the source finds it.

`python -m tests.kernels.disassembly qwen3-14b kv_dtype=fp8_e4m3` checks all kernels of a shape.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from triton import knobs

from paceline.kernels.binaries import KernelBinary, compile_for, compile_variant
from tests.kernels.resources import variants_of

_UNIFORM = re.compile(r"\bUR(\d+)\b")
_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(@!?U?P\w+ )?\s*(\S+)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_WRITES_UNIFORM = ("U", "R2UR", "S2UR", "VOTEU", "REDUX", "LDCU")


@dataclass(frozen=True, slots=True)
class _Instruction:
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    target: str | None
    ends: bool  # the next instruction does not follow it


def undefined_reads(disassembly: str) -> list[str]:
    """The instructions that read a uniform register which no instruction on any way to them has written."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, disassembly.splitlines()):
        if label := _LABEL.fullmatch(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.match(line):
            code.append(_instruction(found[1] is not None, found[2], found[3]))
    written: list[frozenset[int] | None] = [None] * len(code)  # before each instruction, on some way to it
    ways: list[tuple[int, frozenset[int]]] = [(0, frozenset())]
    while ways:
        at, known = ways.pop()
        while at < len(code):
            before = written[at]
            if before is not None and known <= before:
                break
            known = known if before is None else known | before
            written[at] = known
            one = code[at]
            known |= one.writes
            if one.target in labels:
                ways.append((labels[one.target], known))
            if one.ends:
                break
            at += 1
    return [one.text for one, before in zip(code, written, strict=True) if before is not None and one.reads - before]


def _instruction(is_conditional: bool, name: str, operands: str) -> _Instruction:
    first, *rest = operands.split(", ")
    written = _UNIFORM.fullmatch(first) if name.startswith(_WRITES_UNIFORM) else None
    writes: frozenset[int] = frozenset()
    if written is not None:
        size = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        writes = frozenset(range(int(written[1]), int(written[1]) + size))
    reads = set()
    for operand in rest if written is not None else [first, *rest]:
        for number in map(int, _UNIFORM.findall(operand)):
            # The descriptor of the second operand is the second half of four registers.
            reads |= {number + 2, number + 3} if "gdesc" in operand else {number}
    target = _TARGET.search(operands)
    return _Instruction(
        f"{name} {operands}",
        frozenset(reads),
        writes,
        None if target is None else target[1],
        name.startswith(("EXIT", "BRA")) and not is_conditional,
    )


def disassembled(binary: KernelBinary) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        command = [str(knobs.nvidia.nvdisasm.path), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(shape: str, *options: str) -> None:
    compile_for(90)
    variants = variants_of(shape, *options)
    for variant in variants:
        for text in undefined_reads(disassembled(compile_variant(variant))):
            print(f"{variant.name} {dict(variant.constants)} reads what nothing has written: {text}")
    print(f"{len(variants)} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
