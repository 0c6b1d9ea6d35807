"""The generations of a request: a request that ended without success may be submitted again, under the next id.

for request in generation_ids("base", first="base.g1"):      # base.g1, base.g2, …
    if not is_over(mget(generation_keys(keys, request)), lambda result: not result.ok):
        …                                                     # submit it, or wait for it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result


def generation_ids(base: str, first: str) -> Iterator[str]:
    """Yield the ids of a request's generations: `first`, then `<base>.g2`, `<base>.g3`, …"""
    yield first
    for generation in itertools.count(2):
        yield f"{base}.g{generation}"


def generation_keys(keys: Keys, request: str) -> list[str]:
    """Return the keys whose values `is_over` needs."""
    return [keys.result(request), keys.cancel(request)]


def is_over(values: Sequence[Any], without_success: Callable[[Result], bool]) -> bool:
    """Return whether the next generation is to be used.

    A generation without a result is over if a cancel of it is set.

    Args:
        values: the values of `generation_keys`, in bytes.
        without_success: says of a result whether the request may be submitted again.
    """
    raw, cancel = values
    return cancel is not None if raw is None else without_success(Result.from_json(raw))
