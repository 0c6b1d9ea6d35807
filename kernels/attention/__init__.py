"""Paged attention backends behind one interface. A new backend is one file and one line in `_BACKENDS`."""

from __future__ import annotations

import logging

from kernels.attention.base import AttentionBackend, AttentionBatch, CacheSpec
from kernels.attention.cpu import CpuBackend
from kernels.attention.flash import FlashBackend
from kernels.attention.reference import ReferenceBackend

__all__ = ["AttentionBackend", "AttentionBatch", "CacheSpec", "backend_names", "get_backend"]

log = logging.getLogger(__name__)

_BACKENDS: dict[str, type[AttentionBackend]] = {
    "flash": FlashBackend,
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}
"""Best first: `auto` takes the first one that runs on the device and accepts the spec."""


def backend_names() -> tuple[str, ...]:
    """The names that `get_backend` knows, best first."""
    return tuple(_BACKENDS)


def get_backend(name: str, spec: CacheSpec) -> AttentionBackend:
    """Make the backend called `name`; `auto` takes the best that runs this spec.

    Raises:
        ValueError: no such backend, or it can't run this spec (block size, dtype, device).
    """
    if name == "auto":
        return _best(spec)
    if name not in _BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; there are: auto, {', '.join(_BACKENDS)}")
    return _BACKENDS[name](spec)


def _best(spec: CacheSpec) -> AttentionBackend:
    reasons = []
    for name, make in _BACKENDS.items():
        if not make.runs_on(spec.device):
            continue
        try:
            backend = make(spec)
        except ValueError as refused:
            reasons.append(str(refused))
            continue
        if reasons:
            log.warning("attention runs on the %s backend: %s", name, "; ".join(reasons))
        return backend
    raise ValueError(f"no attention backend runs {spec}: {'; '.join(reasons)}")
