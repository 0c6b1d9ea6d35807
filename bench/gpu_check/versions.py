"""Row 1: versions, capability, compiler, and the seconds that Triton takes to compile each variant."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.gpu_check.table import Line, Setup, check


def versions(setup: Setup) -> Iterator[Line]:
    """Yield the versions of packages, GPU and compiler, then the compile time of each variant."""
    names = ("torch", "triton", "transformers", "numpy", "flash_attn")
    found = [f"{name} {_version(name)}" for name in names]
    yield Line("versions", f"Python {platform.python_version()}, {', '.join(found)}", "")
    yield check("GPU", lambda: _gpu(setup))
    yield check("compiler", _compiler)
    yield from _compiled(setup)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpu(setup: Setup) -> str:
    if setup.reduced:
        return "pretended"
    properties = torch.cuda.get_device_properties(0)
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    return (
        f"{properties.name}, capability {major}.{minor}, {properties.multi_processor_count} multiprocessors, "
        f"{total / 2**30:.1f} GiB ({free / 2**30:.1f} free), CUDA {torch.version.cuda}, "
        f"bf16 {torch.cuda.is_bf16_supported(including_emulation=False)}"
    )


def _compiler() -> str:
    """Find what Triton needs to build its launcher: a C compiler and Python's header."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None:
        raise ValueError("no C compiler: Triton builds no launcher without gcc or clang (or CC)")
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.partition("\n")[0]
    if not header.exists():
        raise ValueError(f"{said}; {header} is missing: install Python's development files")
    return f"{said}; {header}"


def _compiled(setup: Setup) -> Iterator[Line]:
    """Compile variants for this GPU, a line each for the slowest, and one for all of them."""
    try:
        table = importlib.import_module("bench.triton_resources")
    except ImportError as error:
        yield Line("compile", str(error), "skipped")
        return
    capability = (
        90 if setup.reduced else 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    )
    seconds: dict[str, float] = {}
    begun = time.monotonic()
    chosen = list(table.variants())
    for variant in setup.pick(chosen, chosen[-1:]):
        if time.monotonic() - begun > setup.seconds - 15:
            yield Line("compile", f"{len(seconds)} of {len(chosen)} variants were compiled in time", "")
            break
        start = time.monotonic()
        line = check(f"compile {variant.name}", lambda variant=variant: str(table.compiled(variant, capability)))  # type: ignore[misc]
        seconds[variant.name] = time.monotonic() - start
        if line.result != "ok":
            yield line
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {taken:.2f}" for name, taken in slowest)
    yield Line(
        f"compile {len(seconds)} variants",
        f"{sum(seconds.values()):.1f} s in all; {said}",
        "",
        {"compile": sum(seconds.values())},
    )
