"""Prompts whose keys are not their tokens, in whole engines on the CPU: keys decide what is shared, tokens what is
computed. No API sets keys yet, so the tests submit jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.cluster.block_hash import block_hashes, root_hash
from paceline.codec import TypedDecoder, encode
from paceline.engine.engine import Engine
from paceline.engine.job import Job
from paceline.engine.output import OutputDelta
from paceline.engine.recent_outputs import RecentOutputs
from paceline.engine.recording import RecordedRequest, Recorder, read_recording
from paceline.llm import LLM
from paceline.request import InvalidRequest, Request, SamplingParams
from paceline.scheduler.invariants import check
from paceline.scheduler.tracked_request import TrackedRequest
from tests.cluster.disaggregated import Answer
from tests.helpers import harness, retract_often

OPTIONS: dict[str, Any] = {
    "load": "random", "shape": "tiny-llama", "threads": 1, "dtype": "float32", "page_size": 4, "max_running": 6,
    "max_batch_tokens": 64, "max_prefill_tokens": 64, "chunk_tokens": 16,
}  # fmt: skip
IMAGE = 7
PROMPT = np.array([*range(20, 28), *[IMAGE] * 16, *range(40, 45)], np.int32)
PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.2, bad_words=("a",),
    logprobs=2, prompt_logprobs=1, prompt_logprobs_start=25,
)  # fmt: skip


def keys(image: int) -> np.ndarray:
    """With an image in place of the placeholders."""
    return np.where(IMAGE == PROMPT, 1_000_000 + image, PROMPT).astype(np.int32)


def ask(engine: Engine, params: SamplingParams = PARAMS, **fields: Any) -> tuple[OutputDelta, list[int]]:
    answer = Answer()
    engine.submit(Job(PROMPT, params, stream=False, **fields), answer)
    return answer.result(), answer.token_ids


def cached(output: OutputDelta) -> int:
    assert output.usage is not None
    return output.usage.cached_tokens


@pytest.fixture(
    scope="module", params=[{}, {"speculate": "ngram"}, {"overlap": "off"}], ids=["plain", "drafts", "serial"]
)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with LLM(**OPTIONS, num_pages=200, **request.param) as llm:
        yield llm.engine


def test_keys_decide_what_is_shared_and_tokens_what_is_computed(engine: Engine) -> None:
    engine.call(engine.flush_cache).result()
    plain, tokens = ask(engine)
    first, same_tokens = ask(engine, keys=keys(1))
    assert (cached(plain), cached(first)) == (0, 8), "the text before the image"
    for image, expected in ((1, 24), (2, 8)):
        output, found = ask(engine, keys=keys(image))
        assert found == tokens == same_tokens, "drafts, penalties and bad words see tokens"
        assert cached(output) == expected
        ours, theirs = (
            [(one.token_id, pytest.approx(one.logprob, abs=1e-4)) for one in each.prompt_logprobs + each.logprobs]
            for each in (output, plain)
        )
        assert ours == theirs
    assert cached(ask(engine)[0]) == 24
    engine.call(check).result()


def test_retraction_and_host_memory_keep_images_apart() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(**OPTIONS, num_pages=400) as llm:
        expected = ask(llm.engine, params)[1]
    with LLM(**OPTIONS, num_pages=34, num_host_pages=200) as llm:
        retract_often(llm.engine.scheduler, 7)
        for _ in range(3):
            answers = [Answer() for _ in range(6)]
            jobs = [Job(PROMPT, params, keys=keys(image % 4), stream=False) for image in range(6)]
            llm.engine.submit_all(jobs, answers)
            for answer in answers:
                answer.result()
                assert answer.token_ids == expected
            llm.engine.call(check).result()
        counters = llm.engine.scheduler.counters
        assert counters.retractions and counters.fetched_tokens


def test_a_job_carries_keys_only_if_they_are_not_its_tokens() -> None:
    text, image = Job(PROMPT), Job(PROMPT, keys=keys(1))
    assert len(encode(image)) >= len(encode(text)) + 4 * len(PROMPT)
    decoder = TypedDecoder(Job)
    assert decoder.decode(encode(text)).prefix_keys.tolist() == PROMPT.tolist()
    assert decoder.decode(encode(image)).prefix_keys.tolist() == keys(1).tolist()
    assert text.prefix_keys is text.prompt
    with pytest.raises(InvalidRequest, match="keys has 3 integers for a prompt of 29 tokens"):
        Job(PROMPT, keys=np.arange(3))


def test_block_hashes_of_a_job_follow_its_keys() -> None:
    """What the router compares with the pages of the replicas."""
    pages = [
        block_hashes(Job(PROMPT, **more).prefix_keys, 4, root_hash(("a", "", ""))).tolist()
        for more in ({}, {"keys": keys(1)}, {"keys": keys(1)}, {"keys": keys(2)})
    ]
    assert pages[1] == pages[2]
    assert pages[0][:2] == pages[1][:2] == pages[3][:2]
    assert len({pages[0][2], pages[1][2], pages[3][2]}) == 3


def test_recent_outputs_are_found_by_keys() -> None:
    outputs = RecentOutputs(100)
    ended = TrackedRequest(Request("r", PROMPT, keys=keys(1)))
    ended.output.extend([1, 2, 3])
    outputs.add(ended)
    assert outputs.find(Request("same", PROMPT, keys=keys(1))).tolist() == [1, 2, 3]
    assert not len(outputs.find(Request("other", PROMPT, keys=keys(2))))


def test_recordings_tell_images_apart(tmp_path: Path) -> None:
    run, path = harness(num_pages=200), tmp_path / "run.jsonl"
    recorder = Recorder(path, run.scheduler, run.clock, device="cpu", model="toy", overlap="off", buckets=[])
    run.add_all(*(Request(f"{n}", PROMPT, SamplingParams(max_tokens=1), keys=keys(n % 2)) for n in range(4)))
    run.run()
    recorder.close()
    blocks = {line.id: line.blocks for line in read_recording(path) if isinstance(line, RecordedRequest)}
    assert blocks["0"] == blocks["2"] and blocks["1"] == blocks["3"]
    assert blocks["0"][:2] == blocks["1"][:2] and not set(blocks["0"][2:]) & set(blocks["1"][2:])
