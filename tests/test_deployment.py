"""The systemd unit and the container file start a server as they are written, as a user without privileges."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from paceline import __version__
from paceline.cli.environment import warnings
from paceline.config_file import read_file
from paceline.server import supervisor
from paceline.server.routes import ROUTES
from paceline.server.routing import Access
from tests.helpers import needs_compiler
from tests.ports import free_ports
from tests.test_install import package_files

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
NOBODY = 65534
START_S = 120  # generous: the machine may be busy


def unit() -> dict[str, list[str]]:
    """The settings of the unit by name, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "paceline.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def instructions() -> list[tuple[str, str]]:
    """The instructions of the container file, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", "")
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in text.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [value for instruction, value in instructions() if instruction == name]


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for value in values("ENV") for pair in shlex.split(value))


@pytest.fixture(scope="module")
def as_nobody() -> list[str]:
    """The beginning of a command that runs Python as a user without privileges, able to import Paceline."""
    path = f"PYTHONPATH={':'.join(one for one in sys.path if one)}"
    if os.geteuid() != 0:
        return ["env", path, sys.executable]
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs", "env", path]
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if shutil.which("setpriv") and shutil.which(python):
            if subprocess.run(
                [*drop, python, "-c", "import paceline.cli"], capture_output=True, check=False
            ).returncode:
                continue
            return [*drop, python]
    pytest.skip("no interpreter that another user may run")


@pytest.fixture
def owned() -> Iterator[Path]:
    """A folder of that user, in a path that it may enter."""
    folder = Path(f"/tmp/paceline-test-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir(mode=0o755)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], port: int, cwd: Path
) -> Iterator[subprocess.Popen[str]]:
    """The command, serving on `port` with nothing but `environment` around it."""
    bare = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
    with (cwd / "output").open("w+") as output:
        process = subprocess.Popen(command, env=bare, cwd=cwd, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            deadline = time.monotonic() + START_S
            while status(port, "/ready") != 200:
                said = (cwd / "output").read_text()
                assert process.poll() is None and time.monotonic() < deadline, f"{process.returncode}: {said}"
                time.sleep(0.05)
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def status(port: int, path: str, key: str = "") -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


# ------------------------------------------------------------------------------------------------------------- systemd


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    text = (DEPLOY / "paceline.service").read_text()
    program = re.search(r"^ExecStart=(\S+)", text, re.MULTILINE)
    assert program
    (tmp_path / "paceline.service").write_text(text.replace(program[1], sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "paceline.service"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_starts_and_stops_as_written(as_nobody: list[str], owned: Path) -> None:
    """Its ExecStart, with its environment and nothing else, on folders as systemd and the documented commands make."""
    settings, port = unit(), free_ports(1)
    config, secrets, cache = owned / "paceline.toml", owned / "environment", owned / "cache"
    config.write_text(f"[server]\nport = {port}\n[engine]\nexecutor = 'virtual'\n")
    config.chmod(0o640)
    secrets.write_text("PACELINE_ADMIN_KEY=secret\n")
    secrets.chmod(0o600)
    cache.mkdir(mode=int(settings["CacheDirectoryMode"][0], 8))
    if os.geteuid() == 0:
        os.chown(config, 0, NOBODY)
        os.chown(cache, NOBODY, NOBODY)  # the file of secrets stays root's
    moved = {"/etc/paceline/paceline.toml": str(config), "/var/cache/paceline": str(cache)}

    def here(text: str) -> str:
        for there, path in moved.items():
            text = text.replace(there, path)
        return text

    environment = dict(here(pair).split("=", 1) for pair in settings["Environment"])
    assert settings["EnvironmentFile"] == ["-/etc/paceline/environment"]
    environment |= dict(line.split("=", 1) for line in secrets.read_text().splitlines())
    program, *arguments = shlex.split(here(settings["ExecStart"][0]))
    assert program == "/opt/paceline/bin/paceline"
    with started([*as_nobody, "-m", "paceline.cli", *arguments], environment, port, owned) as process:
        assert (status(port, "/admin/drain", "secret"), status(port, "/admin/drain", "wrong")) == (200, 401)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, (owned / "output").read_text()


def test_the_unit_leaves_time_to_drain_and_keeps_secrets() -> None:
    settings = unit()
    shutdown = re.search(r"--shutdown-s (\d+)", settings["ExecStart"][0])
    assert shutdown
    assert float(settings["TimeoutStopSec"][0]) > int(shutdown[1]) + 2 * supervisor._EXIT_MARGIN_S
    assert settings["KillMode"] == ["mixed"]
    cache = f"/var/cache/{settings['CacheDirectory'][0]}"
    paths = dict(pair.split("=", 1) for pair in settings["Environment"])
    assert {"PACELINE_HOME", "HF_HOME", "TRITON_CACHE_DIR"} <= set(paths)
    assert all(path == cache or path.startswith(f"{cache}/") for path in paths.values()), "all else is read-only"
    assert not list(warnings(paths))
    assert "MemoryDenyWriteExecute" not in settings and "PrivateDevices" not in settings, "a GPU needs both"


def test_the_documented_commands_make_what_the_unit_needs() -> None:
    section = (ROOT / "docs" / "serving.md").read_text().split("\n## systemd\n")[1].split("\n## ")[0]
    commands = section.split("```")[1]
    user = unit()["User"][0]
    assert f"useradd --system --user-group --no-create-home {user}" in commands
    assert commands.index("useradd") < commands.index(f"-g {user}"), "the group exists before it gets the file"
    modes = {
        path: (mode, group) for mode, group, path in re.findall(r"-m (\d+)(?: -g (\w+))? \S+ (/etc/\S+)", commands)
    }
    assert modes == {"/etc/paceline/paceline.toml": ("640", user), "/etc/paceline/environment": ("600", "")}
    for source in re.findall(r"deploy/[\w.]+", section):
        assert (ROOT / source).is_file()
    assert unit()["ExecStart"][0].startswith("/opt/paceline/bin/") and "python3 -m venv /opt/paceline" in commands


def test_the_example_configuration_is_valid() -> None:
    assert read_file(DEPLOY / "paceline.toml").options["port"] == 8000


# ----------------------------------------------------------------------------------------------------------- container


def is_ignored(path: str) -> bool:
    """Whether Docker leaves a path out of the build context: the last matching line of .dockerignore decides."""
    ignored = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        below = any(fnmatch("/".join(parts[: count + 1]), pattern) for count in range(len(parts)))
        anywhere = line.startswith("**/") and any(fnmatch(part, pattern) for part in parts)
        if line and not line.startswith("#") and (below or anywhere):
            ignored = not line.startswith("!")
    return ignored


def test_the_copied_files_exist_and_build_the_whole_package(tmp_path: Path) -> None:
    """The build context has what COPY names, and that is enough for `pip install .`."""
    for value in values("COPY"):
        *sources, target = value.split()
        for source in sources:
            path = ROOT / source
            assert path.exists() and not is_ignored(source), source
            if path.is_dir():
                shutil.copytree(path, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, tmp_path)
    assert not [name for name in package_files() if is_ignored(name)]
    assert all(is_ignored(name) for name in (".venv/bin/python", ".git/HEAD", "tests/conftest.py", "dist/x.whl"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert package_files() <= set(zipfile.ZipFile(wheel).namelist())


# Commands of the container file that would change this machine: they only report what they were called with.
STUB = '#!/bin/sh\necho "$(basename "$0") $*" >> "$CALLS"\n'
# Offline, and into an environment that borrows this one's packages, as the dependencies would be installed.
PIP = """#!/bin/sh
echo "pip $*" >> "$CALLS"
test "$1" = install && shift && exec "{python}" -m pip --python "{env}/bin/python" install --quiet --no-deps \\
  --no-index --no-build-isolation --disable-pip-version-check --no-compile "$@"
"""


def test_the_steps_of_the_image_install_a_command_that_needs_no_source(tmp_path: Path) -> None:
    """Every COPY and RUN in order, on an empty folder in place of the image's root."""
    programs, env, source = tmp_path / "bin", tmp_path / "env", tmp_path / "src"
    programs.mkdir()
    for name in ("apt-get", "useradd", "install"):
        (programs / name).write_text(STUB)
    (programs / "pip").write_text(PIP.format(python=sys.executable, env=env))
    for path in programs.iterdir():
        path.chmod(0o755)
    venv.create(env, symlinks=True)
    site = next((env / "lib").glob("python*/site-packages"))
    borrowed = [path for path in sys.path if path and not (Path(path) / "paceline").is_dir()]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    around = {**clean, "CALLS": str(tmp_path / "calls"), "PATH": f"{programs}:{os.environ['PATH']}"}
    folder = tmp_path
    for name, value in instructions():
        if name == "WORKDIR":
            folder = Path(f"{tmp_path}{value}")
            folder.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = value.split()
            for one in sources:
                command = ["cp", "-R", str(ROOT / one), str(folder / target)]
                subprocess.run(command, check=True)
        elif name == "RUN":
            here = value.replace("/src", str(source)).replace("/var/lib/apt", str(tmp_path / "apt"))
            done = subprocess.run(
                ["sh", "-ec", here], cwd=folder, env=around, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
    assert not source.exists(), "the image has no second copy of the source"
    version = subprocess.run(
        [env / "bin" / "paceline", "--version"], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert version.stdout == f"paceline {__version__}\n", version.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["apt-get", "apt-get", "pip", "useradd", "install"]
    assert "-c constraints.txt" in calls[2], "the versions that were tested"
    if shutil.which("useradd"):
        known = subprocess.run(["useradd", "--help"], capture_output=True, text=True, check=False).stdout
        assert all(option in known for option in calls[3].split() if option.startswith("--"))


def test_every_instruction_of_the_image_is_tested() -> None:
    """A new one needs a test here."""
    tested = {"RUN", "COPY", "WORKDIR", "USER", "ENV", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "FROM"}
    assert {name for name, _ in instructions()} == tested
    ((image, version),) = (re.fullmatch(r"(\w+):([\d.]+)-slim", value).groups() for value in values("FROM"))  # type: ignore[union-attr]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert image == "python" and SpecifierSet(project["requires-python"]).contains(version)


def test_the_image_serves_as_an_unprivileged_user(as_nobody: list[str], owned: Path) -> None:
    port = free_ports(1)
    moved = {name: value.replace("/models", str(owned / "models")) for name, value in image_environment().items()}
    environment = {**moved, "PACELINE_PORT": str(port)}
    (owned / "models").mkdir()
    if os.geteuid() == 0:
        os.chown(owned / "models", NOBODY, NOBODY)
    (entry,), (health,) = values("ENTRYPOINT"), values("HEALTHCHECK")
    program, *arguments = json.loads(entry)  # exec form: paceline is PID 1 and gets the signals
    assert program == "paceline"
    command = [*as_nobody, "-m", "paceline.cli", *arguments, "--executor", "virtual"]
    python, *code = json.loads(health.partition("CMD ")[2])
    assert python == "python"
    probe = [sys.executable, *code]
    around = {"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:9", **environment}  # a proxy is not used
    assert subprocess.run(probe, env=around, capture_output=True, check=False).returncode != 0, "nothing serves yet"
    with started(command, environment, port, owned) as process:
        assert subprocess.run(probe, env=around, capture_output=True, check=False).returncode == 0
        with socket.socket() as listening:
            assert listening.connect_ex(("127.0.0.2", port)) == 0, "it listens on all interfaces"
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0, (owned / "output").read_text()


# A compiler whose results exist: compiling takes seconds.
COMPILER = """#!/bin/sh
test "$1" = --version && exec gcc --version
for last; do :; done
cp {folder}/*.so "$last"
"""
# Loads the kernels with each home. On stderr, a line with its name comes before what is logged for it.
LOAD_KERNELS = """
import os, sys
from paceline.engine.cpu.native import native_library
for home, compiler in zip(*(iter(sys.argv[1:]),) * 2):
    os.environ |= {"PACELINE_HOME": home, "CC": compiler}
    native_library.cache_clear()
    print(home, file=sys.stderr, flush=True)
    print(native_library().isa)
"""


@needs_compiler
def test_the_user_of_the_image_compiles_the_kernels_of_the_cpu(as_nobody: list[str], owned: Path) -> None:
    """Into a volume of its own, and next to a read-only one at every start."""
    volume, read_only, temporary = owned / "models", owned / "read-only", owned / "tmp"
    for folder, mode, user in ((volume, 0o755, NOBODY), (read_only, 0o555, 0), (temporary, 0o700, NOBODY)):
        folder.mkdir()
        folder.chmod(mode)
        if os.geteuid() == 0:
            os.chown(folder, user, user)
    compiler = owned / "compiler"
    compiler.write_text(COMPILER.format(folder=volume / "cpu-kernels"))
    compiler.chmod(0o755)
    moved = {name: value.replace("/models", str(volume)) for name, value in image_environment().items()}
    assert moved["PACELINE_HOME"] == str(volume)
    bare = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "TMPDIR": str(temporary), **moved}
    command = [*as_nobody, "-c", LOAD_KERNELS, str(volume), "gcc", str(read_only), str(compiler)]
    done = subprocess.run(command, env=bare, cwd=owned, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2, done.stderr
    assert len(list(volume.glob("cpu-kernels/*.so"))) == 1 and not list(read_only.iterdir())
    first, second = done.stderr.split(f"{read_only}\n", 1)
    assert "kernels are compiled at every start" in second and "compiled at every start" not in first
    assert not list(temporary.iterdir()), "something was left behind"


def test_the_image_has_a_user_a_volume_for_caches_and_a_compiler() -> None:
    environment = image_environment()
    (volume,) = values("VOLUME")
    for name in ("PACELINE_HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert environment[name] == volume or environment[name].startswith(f"{volume}/")
    assert not list(warnings(environment))
    assert values("EXPOSE") == [environment["PACELINE_PORT"]]
    (user,), steps = values("USER"), " ".join(values("RUN"))
    assert user.isdecimal() and int(user) > 0 and f"--uid {user}" in steps
    assert f"install -d -o paceline -g paceline {volume}" in steps
    assert " gcc libc6-dev " in steps, "Triton compiles launchers, and the kernels of a CPU are compiled"
    assert [name for name, _ in instructions()].index("USER") > max(
        index for index, (name, _) in enumerate(instructions()) if name == "RUN"
    )


# ----------------------------------------------------------------------------------------------------------------- Ray


def test_the_documented_wait_for_ray_asks_a_route() -> None:
    """`serve run` with a file prints no line when the application is ready."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    section = text[text.index("## Ray Serve") : text.index("## Kubernetes")]
    address = yaml.safe_load((DEPLOY / "ray" / "paceline.yaml").read_text())["http_options"]
    (waited,) = re.findall(r"^until curl -fs http://([^:]+):(\d+)(/\w+); do", section, re.MULTILINE)
    assert waited[:2] == (address["host"], str(address["port"]))
    assert waited[2] in {route.path for route in ROUTES if route.access is Access.PUBLIC}
    assert "is ready at" not in section
