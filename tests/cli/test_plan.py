"""What `paceline models --plan` says about memory."""

from __future__ import annotations

import pytest

from paceline.cli.plan import _memory
from paceline.config import EngineConfig
from paceline.engine.build.facts import CPU, DeviceFacts
from paceline.engine.build.resolution import resolve
from paceline.model.files import UnloadedModel
from paceline.model.shapes import shape
from tests.moving_average import recurrent_spec


@pytest.mark.parametrize(
    ("layers", "per_token", "state", "room"),
    [((), 0, 4, "32,000"), ((1, 3), 512, 2, "641")],
    ids=["all layers", "some layers"],
)
def test_memory_of_a_model_with_states_is_that_of_its_requests_and_its_pages(
    layers: tuple[int, ...], per_token: int, state: int, room: str
) -> None:
    device = DeviceFacts(CPU, free_bytes=2 << 20, num_threads=8)
    options = {"max_running": 64, "context_tokens": 500}
    found = resolve(UnloadedModel(recurrent_spec("tiny-llama", *layers)), EngineConfig(), options, device)
    _, kv, states, fits = _memory(found)
    assert kv == f"KV cache: {per_token} bytes per token in float32"
    assert states == f"states: {state} kB per running request"
    assert f"room for about {room} tokens of KV (" in fits


def test_a_model_without_states_says_nothing_of_them() -> None:
    device = DeviceFacts(CPU, free_bytes=2 << 30, num_threads=8)
    found = resolve(UnloadedModel(shape("tiny-llama")), EngineConfig(), {}, device)
    assert len(list(_memory(found))) == 3
