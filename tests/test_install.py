"""The wheel, installed into an empty environment, does what a clone does, and the sdist builds the same wheel.

The fast tests borrow the dependencies of this environment; the slow one downloads them, for both.
"""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paceline"
KINDS = ("wheel", "sdist")

# What a library user does first, and what reads files of the package: pages, their scripts, profiles of GPUs.
FIRST_STEPS = """
import sys
from pathlib import Path
import paceline
from paceline import LLM, SamplingParams
from paceline.web import web_file

assert Path(paceline.__file__).is_relative_to(sys.prefix), paceline.__file__
assert web_file("live.html") and web_file("sim.html") and web_file("theme.css") and web_file("vendor/uplot.js")
with LLM(executor="virtual") as llm:
    (output,) = llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True))
assert len(output.token_ids) == 4
"""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Runs a command without the variables that would lead Python back to the clone, and returns its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=clean, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def package_files() -> set[str]:
    """Every file of the package in the clone, but for what Python and tools leave behind."""
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_wheel_and_sdist_have_every_file_of_the_package(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel, tarfile.open(built["sdist"]) as sdist:
        in_wheel = {name for name in wheel.namelist() if name.startswith("paceline/")}
        in_sdist = {member.name.split("/", 1)[1] for member in sdist.getmembers()}
    assert in_wheel == package_files()
    assert in_sdist >= package_files() | {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "Makefile"}
    assert not [name for name in in_sdist if name.startswith((".venv", ".ci", "dist", ".git/"))]


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of every file."""
    with zipfile.ZipFile(wheel) as opened:
        return {member.filename: member.CRC for member in opened.infolist()}


def test_the_sdist_builds_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "again", cwd=source)
    (wheel,) = (tmp_path / "again").glob("*.whl")
    assert wheel.name == built["wheel"].name and contents(wheel) == contents(built["wheel"])


def test_structured_output_is_part_of_a_plain_installation(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(name))
    needed = {item.name for item in map(Requirement, metadata.get_all("Requires-Dist")) if item.marker is None}
    assert {"llguidance", "torch", "uvicorn"} <= needed
    assert not {"matplotlib", "transformers", "pytest", "hatchling"} & needed
    assert "grammar" in metadata.get_all("Provides-Extra"), "pip install 'paceline[grammar]' still works"


def test_the_constraints_leave_triton_to_torch() -> None:
    """A CUDA build of torch needs one exact version of Triton: with another one pinned, pip finds no solution."""
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert "torch" in pinned and "triton" not in pinned


@pytest.fixture(scope="session")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with Paceline, and with this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "env", symlinks=True)
    # Reached through a link, as /opt/paceline often is.
    (folder / "link").symlink_to("env")
    programs = folder / "link" / "bin"
    site = Path(run(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    borrowed = [path for path in sys.path if path and not (Path(path) / "paceline").is_dir()]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    options = (
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "--quiet",
        "--no-compile",
    )
    run(sys.executable, "-m", "pip", "--python", programs / "python", "install", *options, built["wheel"])
    return programs


def test_the_command_works(installed: Path, tmp_path: Path) -> None:
    from paceline import __version__

    assert run(installed / "paceline", "--version", cwd=tmp_path) == f"paceline {__version__}\n"
    assert "serve" in run(installed / "paceline", "--help", cwd=tmp_path)
    assert "qwen3-0.6b" in run(installed / "paceline", "sim", "run", "--requests", "4", cwd=tmp_path)


def test_the_library_generates_and_finds_its_files(installed: Path, tmp_path: Path) -> None:
    run(installed / "python", "-W", "error", "-c", FIRST_STEPS, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_environment_downloads_what_is_needed(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "env", symlinks=True, with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{built[kind]}[grammar]")
    run(python, "-m", "pip", "check")
    run(python, "-W", "error", "-c", FIRST_STEPS, cwd=tmp_path)
    answer = run(
        python.with_name("paceline"), "generate", "Hi", "--load", "random", "--shape", "tiny-qwen3",
        "--kv-tokens", "1024", "--regex", "[0-9]{3}", cwd=tmp_path,
    )  # fmt: skip
    assert answer.strip().isdecimal(), "structured output works in a plain installation"
