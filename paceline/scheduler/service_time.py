"""Service time: how much device time each request has taken, and how much one is expected to take.

The device time of a pass is divided among its tokens; an output token counts as `output_weight` prompt tokens. A prompt
is charged for its tokens. A decode row is charged as one of `max_running` rows, however many there are: that is how
much later a request behind it gets a slot. So what is charged never adds up to more than the time that has passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.scheduler.plan import Plan
from paceline.scheduler.tracked_request import TrackedRequest

_DECAY = 0.98  # weight of a pass relative to the next one: predictions follow the last fifty


class ServiceTime:
    def __init__(self, max_running: int, output_weight: float) -> None:
        self._max_running = max_running
        self._output_weight = output_weight
        self._decode_clock = 0.0  # device time charged to a row that has decoded from the beginning
        self._prefill_s = self._prefill_tokens = 0.0  # decayed sums
        self._decode_s = self._decode_passes = 0.0

    def observe(self, plan: Plan, requests: Sequence[TrackedRequest], device_s: float) -> None:
        """Charges a pass to the requests of its rows."""
        num_decodes, num_prompt_tokens = plan.num_decodes, plan.num_prefill_tokens
        weight = num_prompt_tokens + self._output_weight * num_decodes
        per_token = device_s / weight if weight else 0.0
        if num_decodes:
            row_s = self._output_weight * num_decodes * per_token / self._max_running
            self._decode_clock += row_s
            self._decode_s = _DECAY * self._decode_s + row_s
            self._decode_passes = _DECAY * self._decode_passes + 1
        if num_prompt_tokens:
            self._prefill_s = _DECAY * self._prefill_s + per_token * num_prompt_tokens
            self._prefill_tokens = _DECAY * self._prefill_tokens + num_prompt_tokens
            for request, length in zip(requests[num_decodes:], plan.lengths[num_decodes:].tolist(), strict=True):
                request.served_s += per_token * length
                request.decoding_from = self._decode_clock

    def predict(self, request: TrackedRequest, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Sets the device time that a request is expected to take from now on; 0 as long as nothing was observed."""
        prefill_s = self._prefill_s / self._prefill_tokens * num_prompt_tokens if self._prefill_tokens else 0.0
        decode_s = self._decode_s / self._decode_passes * num_output_tokens if self._decode_passes else 0.0
        request.predicted_s = prefill_s + decode_s
        request.served_s, request.decoding_from = 0.0, self._decode_clock

    def served(self, request: TrackedRequest) -> float:
        """The device time that a request has taken since its last admission."""
        return request.served_s + self._decode_clock - request.decoding_from
