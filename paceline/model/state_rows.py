"""What a mixer with a state reads and writes in a forward pass: one value for every kind of state and every device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class StateRows(NamedTuple):
    """The states of one layer, and which of them are those of the rows of a pass. A state is the bytes that the mixer
    named (`layers.State`): zero in a row's first pass, and from then on what the mixer wrote. Views of other types are
    aligned, and rows are strided."""

    states: Tensor  # [slots, bytes]
    slots: Tensor  # [rows]
    offsets: Tensor  # [rows + 1]: the first token of each row, and the number of tokens
