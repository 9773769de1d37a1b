"""The format of every matrix of a model, decided before any of them is read (`engine/build/resolution.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from paceline.model.layout import Shard
from paceline.model.spec import ModelSpec
from paceline.weight_formats import WEIGHT_FORMATS, MatrixKind, WeightFormat, title_of


class Origin(StrEnum):
    """How a matrix gets its format."""

    STORED = "as stored"
    ROUNDED = "rounded"  # from 16 or 32 bits
    EXPANDED = "expanded"  # from fewer
    CONVERTED = "converted"  # between dtypes, or none of it


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A fused tensor of `layout.target_shapes` that is multiplied."""

    name: str
    shape: tuple[int, ...]
    kind: MatrixKind
    format: str  # a name of the table of weight formats, or a dtype
    origin: Origin
    num_bytes: int
    group: int = 0  # columns with one scale; 0: all
    block_rows: int = 1  # rows with one scale

    @property
    def packed(self) -> WeightFormat | None:
        return WEIGHT_FORMATS.get(self.format)


@dataclass(frozen=True)
class WeightsPlan:
    quantization: str  # the value of the option that gives the same: none, a format, or as in a GGUF file
    dtype: str  # of activations, and of all that is not packed
    matrices: tuple[MatrixPlan, ...]
    vector_bytes: int  # of norms and biases
    loading_bytes: int  # the most memory that loading needs
    is_stored: bool = False  # packed matrices are read as they are stored

    @property
    def num_bytes(self) -> int:
        return self.vector_bytes + sum(one.num_bytes for one in self.matrices)

    @property
    def title(self) -> str:
        return self.dtype if self.quantization == "none" else f"{self.dtype}, weights in {title_of(self.quantization)}"

    @cached_property
    def by_name(self) -> dict[str, MatrixPlan]:
        return {one.name: one for one in self.matrices}

    def of_stage(self, spec: ModelSpec, shard: Shard) -> WeightsPlan:
        """With the layers of a stage, by the names that they have there. spec: of the whole model."""
        if shard.num_stages == 1:
            return self
        layers = {str(layer): str(index) for index, layer in enumerate(shard.layers(spec))}

        def renamed(matrices: Iterable[MatrixPlan]) -> Iterable[MatrixPlan]:
            for one in matrices:
                layer, _, name = one.name.rpartition(".")
                if not layer or layer in layers:
                    yield replace(one, name=f"{layers[layer]}.{name}" if layer else name)

        return replace(self, matrices=tuple(renamed(self.matrices)))
