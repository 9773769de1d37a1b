"""Matrices in 4 and 8 bits on a CPU, one by one: for the parts of a model that ranks and stages have.

A whole model is faster in one call (`quantized_model.py`). Here the reference decoder computes everything else, such as
sums over ranks, with KV in float32.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from paceline.engine.cpu.native import LOADING_THREADS, NativeLibrary, PackedMatrix, title_of_bits
from paceline.model.decoder import Decoder
from paceline.model.linear import Linear, Matrix
from paceline.model.rank_group import RankGroup, StageLink
from paceline.model.spec import ModelSpec
from paceline.model.weights import QuantizedWeights


class NativeLinear(Linear):
    """x W' + b, with x rounded to 15 bits."""

    __slots__ = ("_packed",)

    def __init__(self, linear: Linear, packed: PackedMatrix) -> None:
        super().__init__(packed, linear.bias, linear.name)
        self._packed = packed

    def _multiply(self, x: Tensor) -> Tensor:
        y = self._packed.multiply(x)
        return y if self.bias is None else y.add_(self.bias)


def load_part(
    library: NativeLibrary,
    spec: ModelSpec,
    weights: QuantizedWeights,
    *,
    max_positions: int | None,
    group: RankGroup | None,
    stages: StageLink | None,
) -> Decoder:
    """The part of a model that `weights` are of."""

    def packed(name: str) -> PackedMatrix:
        return PackedMatrix(library, weights.matrix(name))

    names = [name for name in weights.matrices if name != "embedding"]
    with ThreadPoolExecutor(LOADING_THREADS) as pool:
        matrices = dict(zip(names, pool.map(packed, names), strict=True))
    table = weights.matrix("embedding") if "embedding" in weights.matrices else None
    if table is not None and spec.tied:
        matrices["head"] = PackedMatrix(library, table)
    tensors: dict[str, Matrix] = {**weights.vectors, **matrices}
    decoder = Decoder(spec, tensors, max_positions=max_positions, group=group, stages=stages, table=table)
    for index, layer in enumerate(decoder.layers):
        layer.qkv, layer.out = (NativeLinear(one, matrices[f"{index}.{one.name}"]) for one in (layer.qkv, layer.out))
        mlp = layer.dense
        assert mlp is not None, "a plan keeps no experts in 4 or 8 bits on a CPU"
        mlp.gate_up, mlp.down = (NativeLinear(one, matrices[f"{index}.{one.name}"]) for one in (mlp.gate_up, mlp.down))
    if decoder.shard.is_last:
        decoder.head = NativeLinear(decoder.head, matrices["head"])
    decoder.precision = title_of_bits(matrices.values())
    return decoder
