"""Sizes of all containers inside an object, so that a test sees each of them grow."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

_PACKAGES = ("tokenmill.", "producer.", "worker.", "engine.", "kernels.", "queue.", "tests.worker.")
_CONTAINERS = (dict, list, set, deque, tuple)


def of(root: object) -> Counter[str]:
    """Return path of attributes → size of the dicts, lists, sets, deques and tuples that `root` reaches through our
    own objects; the sizes of equal paths, such as `held._jobs[].outgoing.chunks`, are added up."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            found[path] += len(one)
            values: Iterable[Any] = one.values() if isinstance(one, dict) else one
            todo += ((f"{path}[]", value) for value in list(values))
        elif isinstance(one, queue.SimpleQueue):
            found[path] += one.qsize()
        elif type(one).__module__.startswith(_PACKAGES) or isinstance(one, queue.Queue):
            todo += ((f"{path}.{name}", value) for name, value in _attributes(one))
    return found


def _attributes(one: object) -> list[tuple[str, Any]]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    kept = [(name, getattr(one, name)) for name in slots if hasattr(one, name)]
    return kept + list(getattr(one, "__dict__", {}).items())
