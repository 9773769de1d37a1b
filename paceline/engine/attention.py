"""The interface between a model and the attention of its executor."""

from __future__ import annotations

from typing import Protocol, TypeVar

InputsT = TypeVar("InputsT", contravariant=True)
AttendT = TypeVar("AttendT", covariant=True)


class AttentionBackend(Protocol[InputsT, AttendT]):
    """Attention over one executor's KV cache.

    It is built once per executor, from the cache and the `ModelSpec`, and takes the window, scale and score cap of each
    layer from the spec. It raises ModelError for a field that it cannot compute. `InputsT` is what the executor makes
    of a plan, `AttendT` the function that the model calls in each layer.
    """

    def begin(self, inputs: InputsT) -> AttendT:
        """Prepares one forward pass: everything that does not depend on the layer is computed here, once."""
