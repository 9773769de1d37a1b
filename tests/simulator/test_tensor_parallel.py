"""Profiles of several GPUs: predicted from that of one."""

from __future__ import annotations

import msgspec
import pytest

from paceline.config import ConfigError, WorkloadConfig
from paceline.engine.pass_features import PassFeatures
from paceline.simulator.compare import scheduler_config
from paceline.simulator.profile import DECODE_TERMS, PROMPT_TERMS, LinearCost, Profile, load_profile, profile_names
from paceline.simulator.run import simulate
from paceline.simulator.scenarios import LARGE, SMALL, tensor_parallel
from paceline.simulator.tensor_parallel import ShardedProfile, shard_profile
from paceline.simulator.workloads import make_workload

COUNTS = (1, 2, 4, 8)


def decodes(rows: int, context: int = 0, bucket: int = 0) -> PassFeatures:
    return PassFeatures(rows, 0, 0, rows, bucket or rows, rows * context, 0, context, 0, 0, 0, 0, 0)


def prompts(tokens: int, rows: int = 1) -> PassFeatures:
    each = tokens // rows
    return PassFeatures(0, rows, tokens, rows, 0, 0, 0, 0, 0, rows * each * (each + 1) // 2, rows, tokens, tokens // 16)


def sharded(gpu: str, count: int) -> ShardedProfile:
    profile = shard_profile(load_profile(gpu), count)
    assert isinstance(profile, ShardedProfile)
    return profile


@pytest.mark.parametrize("gpu", profile_names())
def test_one_gpu_is_the_profile_itself(gpu: str) -> None:
    profile = load_profile(gpu)
    assert shard_profile(profile, 1) is profile


@pytest.mark.parametrize("gpu", profile_names())
def test_the_work_of_a_rank_falls_with_their_number_and_never_below_its_part(gpu: str) -> None:
    profile = load_profile(gpu)
    for features in (decodes(1, 500), decodes(32, 2000), decodes(256, 300), prompts(256), prompts(8192, 4)):
        times = [Profile.device_s(shard_profile(profile, count), features) for count in COUNTS]
        assert times == sorted(times, reverse=True) and times[0] > times[-1], "without collectives"
        for count, seconds in zip(COUNTS, times, strict=True):
            assert seconds >= times[0] / count
    for name in ("host", "ended", "launch_s", "buckets", "device", "model"):
        assert getattr(sharded(gpu, 4), name) == getattr(profile, name), "the host's work is not divided"


@pytest.mark.parametrize("gpu", profile_names())
def test_more_work_never_takes_less_time(gpu: str) -> None:
    for count in (2, 3, 8):
        profile = sharded(gpu, count)
        assert profile.device_s(decodes(1, 100)) < profile.device_s(decodes(1, 5000))
        assert profile.device_s(prompts(256)) < profile.device_s(prompts(1024)) < profile.device_s(prompts(8192))
        coefficients = [*profile.bucket_s, *profile.decode.per.values(), *profile.prompt.per.values()]
        assert min(coefficients) >= 0
        assert profile.exchange_s(decodes(3, 100, bucket=4)) == profile.exchange_s(decodes(4, 100)), "padding"


def test_every_term_that_a_fit_may_have_is_divided_by_a_rule() -> None:
    given = {name: dict.fromkeys(terms, 2e-8) for name, terms in (("decode", DECODE_TERMS), ("prompt", PROMPT_TERMS))}
    given["prompt"]["num_prompt_tokens"] = 2e-6
    linears = {name: LinearCost(0.0, per) for name, per in given.items()}
    profile = shard_profile(msgspec.structs.replace(load_profile(SMALL), **linears), 2)
    for name, per in given.items():
        found = getattr(profile, name).per
        assert found.keys() == per.keys()
        assert {one for one in per if found[one] == per[one]} <= {"longest_context", "has_repeated", "has_decodes"}


def test_a_small_model_alone_gets_slower_with_eight_gpus_and_a_large_one_faster() -> None:
    small, large = ([tensor_parallel(1, count, gpu).itl for count in (1, 8)] for gpu in (SMALL, LARGE))
    assert small[1] > 1.3 * small[0], "collectives take longer than the weights did"
    assert 1.5 < large[0] / large[1] < 4


def test_throughput_of_a_large_batch_grows_less_than_the_number_of_gpus() -> None:
    runs = [tensor_parallel(64, count) for count in (1, 2, 4)]
    speeds = [run.result.summary()["tokens_per_s"] for run in runs]
    assert 1.4 < speeds[1] / speeds[0] < 2 and 2 < speeds[2] / speeds[0] < 4
    assert [run.exchange_s > 0 for run in runs] == [False, True, True]
    assert all(run.exchange_s < run.itl for run in runs)


def test_a_run_on_two_gpus_takes_its_decisions_with_a_larger_cache() -> None:
    arrivals = make_workload("prefixes", WorkloadConfig(requests=40, rate=200, prompt_tokens=200, output_tokens=10))
    found = []
    for count in (1, 2):
        profile = shard_profile(load_profile(LARGE), count)
        config = scheduler_config(arrivals, profile, {"num_host_pages": 100})
        found.append((config, simulate(arrivals, config, profile)))
    (alone, one), (both, two) = found
    assert both.num_pages > 2 * alone.num_pages
    assert two.seconds < one.seconds
    assert two.summary()["finished"] == one.summary()["finished"] == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama-7.00b"}, "the profile's model 'llama-7.00b' is no known shape"),
        ({"decode": msgspec.structs.replace(load_profile(SMALL).decode, per={})}, "has no own_tokens"),
    ],
)
def test_a_profile_that_cannot_be_divided_is_refused(changes: dict[str, object], message: str) -> None:
    profile = msgspec.structs.replace(load_profile(SMALL), **changes)
    with pytest.raises(ConfigError, match=message):
        shard_profile(profile, 2)
