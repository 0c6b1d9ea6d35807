"""Paged attention backends behind one interface, and the registry of them.

A new backend is the file `kernels/attention/<name>.py` and one line in `_BACKENDS`. Importing this package imports
neither torch nor a backend, so that a command line can offer the names.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernels.attention.base import AttentionBackend, CacheSpec

__all__ = ["AUTO", "backend_class", "backend_names", "get_backend"]

log = logging.getLogger(__name__)

AUTO = "auto"
"""Stands for the first backend that runs on the device and accepts the spec."""
_BACKENDS: dict[str, str] = {
    "triton": "TritonBackend",
    "flash": "FlashBackend",
    "cpu": "CpuBackend",
    "reference": "ReferenceBackend",
}
"""Name, which is also that of the module, and class of each backend; fastest first."""


def backend_names() -> tuple[str, ...]:
    """Return the names that `get_backend` accepts beside `AUTO`, fastest first."""
    return tuple(_BACKENDS)


def get_backend(name: str, spec: CacheSpec) -> AttentionBackend:
    """Create the backend with this name; for `AUTO`, the first backend in `_BACKENDS` that runs the spec.

    Raises:
        ValueError: no backend has this name, or the backend cannot run the spec (block size, dtype, device).
    """
    if name == AUTO:
        return _first(spec)
    if name not in _BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; available: {AUTO}, {', '.join(_BACKENDS)}")
    return backend_class(name)(spec)


def backend_class(name: str) -> type[AttentionBackend]:
    """Import the backend with this name, one of `backend_names()`."""
    found: Any = getattr(importlib.import_module(f"{__name__}.{name}"), _BACKENDS[name])
    return found  # type: ignore[no-any-return]


def _first(spec: CacheSpec) -> AttentionBackend:
    """Create the first backend that runs the spec; log why those before it, which run on the device, refused it."""
    reasons = []
    for name in _BACKENDS:
        backend = backend_class(name)
        if not backend.runs_on(spec.device):
            continue
        try:
            created = backend(spec)
        except ValueError as refused:
            reasons.append(str(refused))
            continue
        if reasons:
            log.warning("attention runs on the %s backend: %s", name, "; ".join(reasons))
        return created
    raise ValueError(f"no attention backend runs {spec}: {'; '.join(reasons)}")
