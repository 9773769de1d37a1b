"""Paceline as an application of Ray Serve: its options, and what works without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from paceline.codec import encode
from paceline.config import ConfigError
from paceline.engine.output import EngineFailed, OutputDelta
from paceline.request import FinishReason
from paceline.server.messages import ErrorReply, OutputBatch, QueryResult
from paceline.server.ray import build_app, engine_options, engine_setup, read_args
from paceline.server.ray_engine import ended_jobs
from paceline.server.ray_scaling import scale_by_queue_time

ROOT = Path(__file__).parent.parent.parent


def test_options_of_a_command_line_are_text_and_get_their_types() -> None:
    found = read_args(
        {"replicas": "2", "device": "cpu", "kv_tokens": "8192", "live_page": "false", "max_replicas": "3"}
    )
    assert (found.config.replicas, found.ray.max_replicas, found.config.live_page) == (2, 3, False)
    assert found.source.options == {"device": "cpu", "kv_tokens": 8192}
    assert found.name == "smollm2-135m-instruct" and found.num_gpus == 0


def test_the_example_is_valid() -> None:
    (app,) = yaml.safe_load((ROOT / "deploy" / "ray" / "paceline.yaml").read_text())["applications"]
    assert app["import_path"] == "paceline.server.ray:build_app" and app["route_prefix"] == "/"
    found = read_args(app["args"])
    assert found.config.replicas == 2 and found.name == app["args"]["model"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"port": 80}, "port is 80, which Ray Serve does not use (set http_options of Ray Serve): remove it."),
        ({"shutdown_s": 3}, "shutdown_s is 3, which Ray Serve does not use (set drain_s): remove it."),
        (
            {"batch_folder": "/x"},
            "batch_folder is '/x', which Ray Serve does not use (batches need `paceline serve`): remove it.",
        ),
        ({"max_replica": 2}, "unknown option 'max_replica': did you mean max_replicas or replicas or max_loras?"),
        ({"replicas": "two"}, "replicas is 'two'"),
        ({"replicas": 3, "max_replicas": 2}, "max_replicas is 2 and replicas is 3: raise max_replicas."),
        ({"load": "random"}, "load is 'random': give a shape, such as smollm2-135m, and no model."),
        ({"shape": "smollm2-135m"}, "shape is 'smollm2-135m', which needs load='random': remove it."),
        ({"executor": "virtual", "model": "x"}, "executor is 'virtual', which runs no model"),
    ],
)
def test_what_cannot_work_is_refused_with_a_remedy(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_args(args)
    assert message in str(caught.value)


def test_an_engine_gets_the_gpus_that_it_uses() -> None:
    assert read_args({}, cluster_gpus=8).num_gpus == 1
    assert read_args({"pp": 2}, cluster_gpus=8).num_gpus == 2
    assert read_args({}, cluster_gpus=8).source.options == {}
    assert read_args({}, cluster_gpus=0).source.options == {"device": "cpu"}, "the cluster has no GPU"
    assert read_args({"device": "cpu"}, cluster_gpus=8).num_gpus == 0
    assert read_args({"executor": "virtual"}, cluster_gpus=8).num_gpus == 0
    options = engine_options(read_args({"num_gpus": 2, "num_cpus": 4}))
    assert options["placement_group_bundles"] == [{"CPU": 4.0, "GPU": 2}], "both on one node"
    assert "placement_group_bundles" not in engine_options(read_args({"num_gpus": 1}))


def test_engines_are_scaled_only_if_max_replicas_is_given() -> None:
    assert engine_options(read_args({"replicas": 3}))["num_replicas"] == 3
    options = engine_options(read_args({"replicas": 3, "max_replicas": 5}))
    scaling = options["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (3, 5) and "num_replicas" not in options


def test_api_keys_and_limits_stay_in_the_ingress(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text('model = "m"\n[[tenants]]\nname = "a"\nkeys = ["secret-key"]\nmax_requests = 3\nweight = 2.0\n')
    setup = read_args({"config": str(config), "replicas": 2})
    with pytest.raises(ConfigError, match="workers is 2 and tenant 'a' has max_requests or tokens_per_minute"):
        read_args({"config": str(config), "workers": 2})
    assert setup.name == "m" and setup.tenants[0].max_requests == 3
    (tenant,) = engine_setup(setup).tenants
    assert (tenant.keys, tenant.max_requests, tenant.weight) == ((), None, 2.0)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[ray\]'"):
        build_app({})


def test_the_server_imports_no_ray() -> None:
    code = "import sys, paceline.server.ray, paceline.server.ray_ingress, paceline.server.front_end\n"
    code += "print([name for name in ('ray', 'torch') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_replica_sees_which_jobs_a_message_ends() -> None:
    delta, last = OutputDelta("", (1, 2)), OutputDelta("", (), FinishReason.LENGTH)
    assert ended_jobs(encode(OutputBatch([(4, delta), (5, last), (6, delta), (7, last)]))) == [5, 7]
    assert ended_jobs(encode(ErrorReply.of(8, EngineFailed("x")))) == [8]
    assert ended_jobs(encode(QueryResult(9, b"\x01"))) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("current", "queue_time", "busy", "expected"),
    [
        (2, [1.5, 1.5], [1.0, 1.0], 3),
        (2, [50.0, 50.0], [1.0, 1.0], 4),  # at most twice as many at once
        (2, [0.8, 0.8], [0.1, 0.1], 2),
        (3, [0.0, 0.0, 0.0], [0.2, 0.2, 0.2], 2),
        (3, [0.0, 0.0, 0.0], [0.5, 0.5, 0.5], 3),  # two would be three quarters full
        (1, [0.0], [0.0], 1),
        (1, [], [], 1),
    ],
)
def test_the_number_of_engines_follows_from_their_queue_time(
    current: int, queue_time: list[float], busy: list[float], expected: int
) -> None:
    metrics = {"queue_time": dict(enumerate(queue_time)), "busy": dict(enumerate(busy))}
    context = SimpleNamespace(
        current_num_replicas=current, target_num_replicas=current, aggregated_metrics=metrics if queue_time else None
    )
    assert scale_by_queue_time(context)[0] == expected
