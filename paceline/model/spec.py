"""The specification of a model: its layers as values, and what all of them share. It has no tensors.

A spec is read from a config.json (`config_json.py`) or GGUF metadata (`gguf.py`), or taken from the table of named
shapes (`shapes.py`). An option that cannot be computed exactly is refused before any weight is read: a model that loads
and gives slightly wrong outputs is worse than one that does not load.

What belongs to a layer is in `layers.py`, and has no second place here: a number of the whole model is a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from paceline.model.errors import ModelError as ModelError
from paceline.model.errors import require_at_least, require_choice, require_positive
from paceline.model.layers import Cache, Dense, Experts, LayerSpec, Pool, Rotation

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same. A unit of the group has a part of each of them, one after the other."""

    cache: Cache
    layers: tuple[int, ...]

    def unit_bytes(self, dtype_bytes: int, page_size: int) -> int:
        """Bytes of a page, or of a request's state."""
        return len(self.layers) * self.cache.unit_bytes(dtype_bytes, page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model. Every option of every family is a field here or of a layer, so that one decoder runs all
    of them."""

    family: str
    hidden_size: int
    layers: tuple[LayerSpec, ...]  # equal ones are the same object
    vocab_size: int
    context_tokens: int
    rms_eps: float = 1e-5
    logit_cap: float | None = None  # soft cap of the final logits
    embedding_scale: float = 1.0  # factor of the embeddings (Gemma, Granite)
    logit_scale: float = 1.0  # factor of the logits (Granite), before their cap
    tied: bool = False  # the LM head is the embedding
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # of the stored weights

    def __post_init__(self) -> None:
        kinds: dict[LayerSpec, LayerSpec] = {}
        object.__setattr__(self, "layers", tuple(kinds.setdefault(layer, layer) for layer in self.layers))
        require_at_least(self, 1, "hidden_size", "num_layers", "vocab_size")
        require_at_least(self, 2, "context_tokens")
        require_choice(self, "dtype", DTYPES)
        require_positive(self, "logit_cap", "embedding_scale", "logit_scale")

    def refuse_differences(self, backend: str, remedy: str, *, allowed: Collection[str]) -> None:
        """Raises if layers of a kind differ in a field that is not `allowed`: `backend` has one value for all."""
        parts = [part for layer in self.layers for part in (layer, layer.mixer, layer.ffn)]
        for kind in dict.fromkeys(map(type, parts)):
            for name in (one.name for one in fields(kind) if one.name not in {"mixer", "ffn", *allowed}):
                values = list(dict.fromkeys(getattr(part, name) for part in parts if type(part) is kind))
                if len(values) > 1:
                    raise ModelError(
                        f"{kind.__name__}.{name} is {values[0]!r} in some layers and {values[1]!r} in others, which "
                        f"{backend} does not support: {remedy}."
                    )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def dense_layers(self) -> tuple[Dense, ...]:
        """The MLP of every layer that has one."""
        return tuple(layer.ffn for layer in self.layers if isinstance(layer.ffn, Dense))

    @property
    def expert_layers(self) -> tuple[Experts, ...]:
        """The experts of every layer that has some."""
        return tuple(layer.ffn for layer in self.layers if isinstance(layer.ffn, Experts))

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, Experts) for layer in self.layers)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The different ones, each of which needs a table."""
        found = (layer.mixer.rotation for layer in self.layers)
        return tuple(dict.fromkeys(one for one in found if one is not None))

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What the layers keep of a request, in the order of their first layers."""
        layers: dict[Cache, list[int]] = {}
        for index, layer in enumerate(self.layers):
            layers.setdefault(layer.mixer.cache.group, []).append(index)
        return tuple(CacheGroup(cache, tuple(indices)) for cache, indices in layers.items())

    @property
    def keeps_states(self) -> bool:
        """Whether a request can resume only where a state was saved, and not at every page."""
        return any(group.cache.pool is Pool.SLOTS for group in self.cache_groups)

    @property
    def layer_macs(self) -> int:
        """Multiply-accumulates of a token in the GEMMs of all layers."""
        return sum(layer.num_macs(self.hidden_size) for layer in self.layers)

    @property
    def position_macs(self) -> int:
        """Multiply-accumulates of a token for every position that it attends to, as if no layer had a window."""
        return sum(layer.mixer.position_macs for layer in self.layers)

    @property
    def linear_columns(self) -> tuple[int, ...]:
        """The different numbers of columns of linear layers, without those of experts."""
        mixers = (layer.mixer.q_size for layer in self.layers)
        return tuple(dict.fromkeys((self.hidden_size, *mixers, *(one.size for one in self.dense_layers))))

    @property
    def double_cost_context(self) -> int:
        """Context at which the attention of a token takes as long as its GEMMs, which run at twice the speed. It is
        never reached without attention."""
        return max(1, self.layer_macs // (2 * self.position_macs)) if self.position_macs else self.context_tokens

    @property
    def num_parameters(self) -> int:
        """Parameters as stored: a tied LM head counts once."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return sum(layer.num_parameters(self.hidden_size) for layer in self.layers) + tables + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: of a mixture of experts, only those of its experts."""
        hidden = self.hidden_size
        ffns = (layer.ffn for layer in self.layers)
        unused = sum(one.num_parameters(hidden) - one.num_active_parameters(hidden) for one in ffns)
        return self.num_parameters - unused

    @property
    def num_expert_parameters(self) -> int:
        """Those of the matrices of routed experts."""
        return sum(one.num_expert_parameters(self.hidden_size) for one in self.expert_layers)

    @property
    def size_name(self) -> str:
        """Family and size: the name of the model in recordings and in profiles fitted to them."""
        return f"{self.family}-{self.num_parameters / 1e9:.2f}b"

    def num_read_parameters(self, num_tokens: int) -> int:
        """Parameters that a forward pass of so many tokens reads, if the router chooses experts at random."""
        return self.num_parameters - int(self.num_expert_parameters * (1 - self.read_share_of_experts(num_tokens)))

    def read_share_of_experts(self, num_tokens: int) -> float:
        """The share of the experts' parameters that a forward pass of so many tokens reads, in the same sense."""
        shares = {one: one.read_share(num_tokens) for one in self.expert_layers}
        if len(shares) < 2:
            return next(iter(shares.values()), 1.0)
        read = sum(shares[one] * one.num_expert_parameters(self.hidden_size) for one in self.expert_layers)
        return read / self.num_expert_parameters

    def with_layers(self, layers: Sequence[int]) -> ModelSpec:
        """The same model with these of its layers."""
        return replace(self, layers=tuple(self.layers[index] for index in layers))

    def unit_bytes(self, pool: Pool, dtype_bytes: int, page_size: int) -> int:
        """Bytes that one unit of a pool takes in all cache groups: a page, or the states of a running request."""
        groups = (group for group in self.cache_groups if group.cache.pool is pool)
        return sum(group.unit_bytes(dtype_bytes, page_size) for group in groups)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of one position in the KV cache, over all layers."""
        return self.unit_bytes(Pool.PAGES, dtype_bytes, 1)
