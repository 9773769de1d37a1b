"""A local Ray cluster in a process of its own: small, without a dashboard, and gone with everything it started.

Run as a module it is that process: it reads commands, one JSON object per line, and answers each with one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_ports

APP = "paceline"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # On a busy host everything takes longer: Ray kills a proxy that is not ready after 5 seconds.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_memory_monitor_refresh_ms": "0",
}


@dataclass
class RayCluster:
    process: subprocess.Popen[str]
    log: Path
    address: str
    port: int
    deployed: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, command: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the cluster exited: {self.log.read_text()[-5000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def deploy(self, **args: Any) -> None:
        """Deploys the app, or updates it, and waits until it runs; nothing if it has these arguments."""
        if args != self.deployed:
            self.call("deploy", args=args)
            self.deployed = args

    @property
    def engines(self) -> list[psutil.Process]:
        """The engine processes of all replicas."""
        return self._processes("paceline.server.engine_process")

    @property
    def replicas(self) -> list[psutil.Process]:
        return self._processes(f"ray::ServeReplica:{APP}:engines")

    def _processes(self, text: str) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if text in " ".join(process.cmdline()):
                    found.append(process)
        return found


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: paths of sockets are at most 107 bytes
    port, log = free_ports(1), folder / "driver.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.ray_cluster", str(folder), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **_ENVIRONMENT, "TMPDIR": str(folder)},  # killed replicas leave folders
        )
    cluster = RayCluster(process, log, "", port)
    try:
        cluster.address = cluster.call("start")
        yield cluster
    finally:
        # All of them, since a killed raylet leaves its workers; only what this process has started.
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in [*children, psutil.Process(process.pid)] if process.poll() is None else []:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(children, timeout=30)
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def main(folder: str, port: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is not an answer
    import ray
    from ray import serve

    from paceline.server.ray import build_app

    def start() -> str:
        context = ray.init(
            num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=80_000_000, _temp_dir=folder,
            log_to_driver=False, namespace="serve",
        )  # fmt: skip
        with contextlib.suppress(TimeoutError):  # Ray does not wait for the proxy longer than a minute
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        while not is_listening(port):
            time.sleep(0.5)
        address: str = context.address_info["gcs_address"]
        return address

    for line in sys.stdin:
        call = json.loads(line)
        result: Any = None
        try:
            match call["command"]:
                case "start":
                    result = start()
                case "deploy":
                    serve.run(build_app(call["args"]), name=APP, route_prefix="/")
                case "status":
                    status = serve.status().applications[APP].deployments["engines"]
                    result = {str(state): count for state, count in status.replica_states.items()}
            answer = {"result": result}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
