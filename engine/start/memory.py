"""Reads how much memory this process may still take, and derives the default sizes of KV pool and host tier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig

TOKENS_PER_SEQUENCE = 384
"""Default size of the KV pool: tokens for each of `max_num_seqs` sequences."""
_MIN_SEQUENCES = 32
"""The pool is never sized for fewer sequences than this; its other blocks hold prefixes."""
_POOL_SHARE = 4
"""The pool takes at most 1/4 of the available memory."""
_HOST_SHARE = 4
"""The host tier takes 1/4 of the size of the pool; in a file, the whole size."""
_UNKNOWN = 2 << 30
"""Maximum bytes of the pool if the system does not report the available memory."""
MAX_HOST_TIER = 1 << 30
"""Maximum bytes of the host tier by default."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take: the minimum of what the system has available and what each
    control group (version 2 or 1) of the process allows.

    Args:
        root: where `proc` and `sys` are mounted.

    Returns:
        Bytes; None if the system does not report them, as outside Linux.
    """
    found = [*_system(root), *_control_groups(root)]
    return max(0, min(found)) if found else None


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the resident memory of this process in bytes; None if the system does not report it."""
    return _field(root / "proc/self/status", "VmRSS:", 1024)


def default_pool_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, available: int | None) -> int:
    """Return the default number of KV blocks on a CPU.

    The pool holds `TOKENS_PER_SEQUENCE` tokens for each sequence, or one sequence of full length if that is more; at
    most a share of the available memory, and at most what all sequences at full length fill.

    Args:
        config: `max_num_seqs`, `block_size` and `watermark` are read.
        max_model_len: full length of a sequence, in tokens.
        block_bytes: bytes of a block.
        available: bytes that this process may still take; None: unknown.
    """
    full = math.ceil(max_model_len / config.block_size)
    usual = math.ceil(TOKENS_PER_SEQUENCE * max(config.max_num_seqs, _MIN_SEQUENCES) / config.block_size)
    wanted = min(max(usual, full), max(config.max_num_seqs, 2) * full)
    budget = _UNKNOWN if available is None else available // _POOL_SHARE
    return min(math.ceil(wanted / (1 - config.watermark)), budget // block_bytes)


def default_host_bytes(pool_bytes: int, in_file: bool) -> int:
    """Return the default size of the host tier in bytes, in a file or in memory, beside a pool of `pool_bytes`."""
    return min(MAX_HOST_TIER, pool_bytes if in_file else pool_bytes // _HOST_SHARE)


def _system(root: Path) -> Iterator[int]:
    """Yield the bytes that the system has available, if it reports them."""
    found = _field(root / "proc/meminfo", "MemAvailable:", 1024)
    if found is not None:
        yield found


def _control_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group leaves, from that of the process up to the root.

    Inactive file cache does not count as used: the kernel drops it when memory is short.
    """
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names, cache = root / "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            mount, cache = root / "sys/fs/cgroup/memory", "total_inactive_file"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            group = mount.joinpath(*parts[:depth])
            limit, used = (_number(group / name) for name in names)
            if limit is not None and used is not None:
                yield limit - used + (_field(group / "memory.stat", cache, 1) or 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _field(path: Path, name: str, unit: int) -> int | None:
    """Return the number, times `unit`, of the line that begins with `name`; None if there is none."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1]) * unit
    return None
