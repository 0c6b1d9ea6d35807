"""Where compiled Triton kernels are kept, and a warning for a kernel that is compiled while jobs run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

_VARIABLE = "TRITON_CACHE_DIR"


def set_folder() -> str:
    """Set `TRITON_CACHE_DIR` to a folder of tokenmill, unless it is set. Must be called before Triton is imported.

    Returns:
        The folder: `tokenmill/triton` in `XDG_CACHE_HOME`, or in `~/.cache`.
    """
    if not os.environ.get(_VARIABLE):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ[_VARIABLE] = str(Path(base) / "tokenmill" / "triton")
    return os.environ[_VARIABLE]


def warn_of_late_compiles() -> None:
    """Log a warning for each kernel that Triton compiles or loads from now on, since all jobs wait for it."""
    try:
        from triton import knobs
    except ImportError:
        return
    knobs.runtime.jit_post_compile_hook = _late


def _late(*_: Any, fn: Any = None, repr: str = "", **__: Any) -> None:
    name = getattr(fn, "name", "") or repr.partition("[")[0]
    log.warning(
        "kernel_compiled_late",
        kernel=name,
        hint="jobs waited for the compiler; report it, unless TRITON_… variables are set",
    )
