"""Kernels in Triton, for NVIDIA GPUs, and which of them are in use. The modules of this package need `triton`.

A kernel whose check fails at start is disabled for the whole process, and its callers take the reference in torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

_MODULES = {
    "attention": "attention",
    "write": "write",
    "norm": "ops",
    "gate": "ops",
    "sampler": "sampler",
    "moe": "moe",
    "matmul": "matmul",
    "quantize": "quantize",
}
"""Group of kernels → its module in this package."""
NAMES = tuple(_MODULES)
"""Groups of kernels that are enabled and disabled together."""

_disabled: dict[str, str] = {}


def enabled(name: str) -> bool:
    """Return whether a group of kernels may be used: Triton is installed, and the group is not disabled."""
    return name not in _disabled and _installed()


def disable(name: str, reason: str) -> None:
    """Use the reference in torch instead of a group of kernels from now on; the first reason is kept.

    Raises:
        ValueError: there is no group of this name.
    """
    if name not in NAMES:
        raise ValueError(f"no group of Triton kernels is named {name!r}; there are: {', '.join(NAMES)}")
    _disabled.setdefault(name, reason)


def load(group: str) -> Any | None:
    """Return the module of a group of kernels if the group is enabled; if it does not load, disable its groups."""
    if not enabled(group):
        return None
    module = _MODULES[group]
    try:
        return importlib.import_module(f"{__name__}.{module}")
    except (ImportError, OSError) as error:
        for name in (name for name in NAMES if _MODULES[name] == module):
            disable(name, f"{__name__}.{module} does not load: {error}")
        return None


def disabled() -> Mapping[str, str]:
    """Return the groups that were disabled, each with its reason."""
    return MappingProxyType(_disabled)


def enable_all() -> None:
    """Enable all groups again; for tests."""
    _disabled.clear()


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
