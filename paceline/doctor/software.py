"""Checks of Python, the packages, torch, the NVIDIA driver, the GPU, Triton and the kernels of the CPU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

from paceline.doctor.finding import Check, Finding, Status, ok, problem, warning

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_MIN_CAPABILITY = (8, 0)  # bfloat16 in hardware


def software_checks() -> list[tuple[str, Check]]:
    return [
        ("python", check_python),
        ("packages", check_packages),
        ("llguidance", check_llguidance),
        ("driver", check_driver),
        ("torch", check_torch),
        ("gpu", check_gpu),
        ("triton", check_triton),
        ("cpu kernels", check_cpu_kernels),
    ]


def check_python() -> Iterator[Finding]:
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}, {sys.prefix}"
    if sys.platform not in ("linux", "darwin"):
        yield problem("python", text, "use Linux: other systems are not supported")
    else:
        yield ok("python", text)


def check_packages(distribution: str = "paceline") -> Iterator[Finding]:
    """Every dependency is installed, in a version that the package allows."""
    try:
        needed = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        yield warning("packages", f"{distribution} is not installed, but runs from source files", "pip install .")
        return
    from packaging.requirements import Requirement

    requirements = [one for one in map(Requirement, needed) if not one.marker or one.marker.evaluate({"extra": ""})]
    wrong = []
    for one in requirements:
        try:
            found = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong.append((one, "is missing"))
            continue
        if not one.specifier.contains(found, prereleases=True):
            wrong.append((one, f"has version {found}"))
    for one, what in wrong:
        yield problem("packages", f"{one.name} {what}", f"pip install '{one.name}{one.specifier}'")
    if not wrong:
        yield ok("packages", f"all {len(requirements)} dependencies are installed")


def check_llguidance() -> Iterator[Finding]:
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        yield problem("llguidance", f"structured output does not work ({error})", "pip install llguidance")
    else:
        yield ok("llguidance", f"{metadata.version('llguidance')}, structured output works")


def has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or _DRIVER_FILE.exists()


def check_driver() -> Iterator[Finding]:
    if not has_driver():
        yield ok("driver", "none: no NVIDIA GPU, the model runs on the CPU")
        return
    if shutil.which("nvidia-smi") is None:
        found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER_FILE.read_text())
        yield ok("driver", found[1] if found else "loaded")
        return
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        yield problem("driver", f"nvidia-smi fails: {said[:200]}", "load or reinstall the NVIDIA driver, then reboot")
    else:
        gpus = [line.partition(", ") for line in done.stdout.strip().splitlines()]
        names = ", ".join(name for _, _, name in gpus)
        yield ok("driver", f"{gpus[0][0]}, {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {names}")


def _import_torch() -> ModuleType:
    import torch

    return torch


def check_torch() -> Iterator[Finding]:
    try:
        torch = _import_torch()
    except ModuleNotFoundError:
        yield problem("torch", "not installed", "pip install torch")
        return
    except (ImportError, OSError) as error:  # a library of it does not load
        yield problem("torch", f"cannot be imported: {error}", "reinstall it: pip install --force-reinstall torch")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    text = f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"
    if has_driver() and not torch.version.cuda:
        yield warning("torch", f"{text}: the GPU is not used", "install a CUDA build of torch, see pytorch.org")
    else:
        yield ok("torch", text)


def _is_available(torch: ModuleType) -> tuple[bool, str]:
    """Whether torch can use a GPU, and what it says if not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = bool(torch.cuda.is_available())
    return available, "; ".join(str(one.message).splitlines()[0] for one in caught)


def check_gpu() -> Iterator[Finding]:
    torch = _import_torch()
    available, said = _is_available(torch)
    if not available:
        if not has_driver() or not torch.version.cuda:
            yield ok("gpu", "none")
            return
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        yield problem(
            "gpu",
            f"torch finds none, though there is a driver{hidden}{': ' if said else ''}{said}",
            f"update the driver to one for CUDA {torch.version.cuda}, or install a torch build for an older CUDA",
        )
        return
    capability = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    text = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
    text += f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if capability < _MIN_CAPABILITY:
        yield warning("gpu", text, "expect low speed: GPUs before Ampere have no bfloat16; use --dtype float16")
    elif free < total / 2:
        yield warning("gpu", text, "end the processes that hold its memory: nvidia-smi lists them")
    else:
        yield ok("gpu", text)


def check_triton() -> Iterator[Finding]:
    torch = _import_torch()
    available, _ = _is_available(torch)
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        if available:
            yield problem("triton", "not installed, so the GPU is not used", "pip install triton")
        else:
            yield ok("triton", "not installed; only a GPU needs it")
        return
    if not available:
        yield ok("triton", f"{version}, not tried: there is no GPU")
        return
    from paceline.engine.cuda.self_test import launch_kernel

    try:
        seconds = launch_kernel()
    except Exception as error:  # compilers, linkers and drivers have many ways to fail
        said = " ".join(str(error).split())
        remedy = "install a C compiler and the headers of Python (gcc, python3-dev), or set CC"
        yield problem("triton", f"{version}: a kernel does not run ({type(error).__name__}: {said[:200]})", remedy)
    else:
        yield ok("triton", f"{version}, a kernel was compiled and run in {seconds:.1f} s")


def check_cpu_kernels() -> Iterator[Finding]:
    """The kernels for weights in 4 and 8 bits on a CPU, which are compiled if they are not in the cache."""
    torch = _import_torch()
    if _is_available(torch)[0]:
        yield ok("cpu kernels", "not tried: the model runs on the GPU")
        return
    from paceline.engine.cpu.native import NativeError, native_library

    try:
        library = native_library()
    except NativeError as error:  # contains the remedy
        text = f"quantized weights are expanded to float32, which is slower: {error}"
        yield Finding("cpu kernels", Status.WARNING, text)
    else:
        isa = f"{library.isa}, amx for prompts" if library.has_tiles else library.isa
        yield ok("cpu kernels", f"compiled for this CPU and checked ({isa}): weights can stay in 4 or 8 bits")
