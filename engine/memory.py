"""How much memory this process may still take, and how large KV pool and host tier are by default."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from engine.config import EngineConfig

TOKENS_PER_SEQUENCE = 384
"""Tokens that the KV pool has room for by default, for each sequence that may run."""
_MIN_SEQUENCES = 32
"""With fewer sequences the pool is not made smaller: what it has left holds prefixes."""
_POOL_SHARE = 4
"""The pool takes at most one part in so many of the memory that is available."""
_HOST_SHARE = 4
"""The host tier takes one part in so many of the pool's size; in a file, all of it."""
_UNKNOWN = 2 << 30
"""Bytes of the pool, at most, where the system does not say what is available."""
MAX_HOST_TIER = 1 << 30
"""Bytes of the host tier, at most, where no size is asked for."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that this process may still take: what the system has available, and what each control group
    (version 2 or 1) above the process allows. None where the system does not say, as outside Linux.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    found = [*_system(root), *_control_groups(root)]
    return max(0, min(found)) if found else None


def resident_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this process has taken; None where the system does not say."""
    return _field(root / "proc/self/status", "VmRSS:", 1024)


def default_pool_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, available: int | None) -> int:
    """Return how many KV blocks the pool has on a CPU where nothing is asked for.

    It holds `TOKENS_PER_SEQUENCE` for each sequence, or one sequence of full length where that is more, as far as a
    part of the `available` bytes allows, but not more than all sequences at full length could fill.
    """
    full = math.ceil(max_model_len / config.block_size)
    usual = math.ceil(TOKENS_PER_SEQUENCE * max(config.max_num_seqs, _MIN_SEQUENCES) / config.block_size)
    wanted = min(max(usual, full), max(config.max_num_seqs, 2) * full)
    budget = _UNKNOWN if available is None else available // _POOL_SHARE
    return min(math.ceil(wanted / (1 - config.watermark)), budget // block_bytes)


def default_host_bytes(pool_bytes: int, in_file: bool) -> int:
    """Return the size of the host tier where nothing is asked for."""
    return min(MAX_HOST_TIER, pool_bytes if in_file else pool_bytes // _HOST_SHARE)


def _system(root: Path) -> Iterator[int]:
    found = _field(root / "proc/meminfo", "MemAvailable:", 1024)
    if found is not None:
        yield found


def _control_groups(root: Path) -> Iterator[int]:
    """What each control group leaves, from the process's own up to the root. Its file cache can be dropped, so it is
    not counted as used."""
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
    """The number behind a name that begins a line."""
    for line in _lines(path):
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1]) * unit
    return None
