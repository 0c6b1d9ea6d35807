"""Row 1: versions, capability, compiler, and the seconds that Triton takes to compile each variant."""

from __future__ import annotations

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
    """Compile one variant of each kernel for this GPU; yield the seconds of each, and failures."""
    os.environ["TRITON_CACHE_DIR"] = str(setup.folder / "compiled")  # empty, so that it compiles
    from bench import triton_resources as table

    major = 9 if setup.reduced else torch.cuda.get_device_capability()[0]
    target = {8: "sm_80", 9: "sm_90"}.get(major, "sm_100")
    chosen: dict[str, table.Source] = {}
    for source in table.sources(target):
        kernel = source.name.partition(" ")[0]
        if kernel not in chosen or ("bf16" in source.name and "bf16" not in chosen[kernel].name):
            chosen[kernel] = source
    seconds: dict[str, float] = {}
    begun = time.monotonic()
    for source in [*chosen.values()][: setup.pick(None, 2)]:
        if time.monotonic() - begun > setup.seconds - 15:
            yield Line("compile", f"{len(seconds)} of {len(chosen)} kernels were compiled in time", "")
            break
        start = time.monotonic()
        line = check(f"compile {source.name}", lambda source=source: str(table.entry(target, source)))  # type: ignore[misc]
        seconds[source.name] = time.monotonic() - start
        if line.result != "ok":
            yield line
    total = sum(seconds.values())
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    said = ", ".join(f"{name} {taken:.2f}" for name, taken in slowest)
    yield Line(f"compile {len(seconds)} kernels, {target}", f"{total:.1f} s in all: {said}", "", {"compile": total})
