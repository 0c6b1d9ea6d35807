"""Find data races between the programs of a Triton kernel, which Triton's interpreter runs one after the other.

On a GPU programs run in any order and at the same time, and the threads of a program see each other's stores only
behind a barrier. Here the programs of each launch run in a shuffled order, and every address that is loaded or stored
is noted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Race(AssertionError):
    """What a kernel stores depends on the order in which programs or threads run."""


class _Launch:
    """The addresses of one launch; that of a program is its position in the order of the run."""

    def __init__(self, name: str, chance: random.Random | None) -> None:
        self.name, self.chance = name, chance
        self.order: Iterator[tuple[int, ...]] = iter(())
        self.program = -1
        self.loads: list[tuple[int, Any]] = []
        self.stores: list[tuple[int, Any]] = []
        self.unseen: list[Any] = []
        """Stores of the running program since its last barrier."""

    def begin(self, sizes: tuple[int, ...]) -> None:
        programs = list(itertools.product(*map(range, sizes)))
        if self.chance is not None:
            self.chance.shuffle(programs)
        self.order = iter(programs)

    def next(self) -> tuple[int, ...]:
        self.program += 1
        self.unseen = []
        return next(self.order)

    def load(self, addresses: Any) -> None:
        for stored in self.unseen:
            if np.isin(addresses, stored).any():
                raise Race(f"{self.name}: a program loads what its threads stored, without a barrier between")
        self.loads.append((self.program, addresses))

    def store(self, addresses: Any) -> None:
        if len(np.unique(addresses)) < len(addresses):
            raise Race(f"{self.name}: one store writes twice to an address")
        for stored in self.unseen:
            if np.isin(addresses, stored).any():
                raise Race(f"{self.name}: a program stores twice to an address, without a barrier between")
        self.unseen.append(addresses)
        self.stores.append((self.program, addresses))

    def check(self) -> None:
        if not self.stores:
            return
        addresses = np.concatenate([a for _, a in self.stores])
        programs = np.concatenate([np.full(len(a), program) for program, a in self.stores])
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        if ((addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])).any():
            raise Race(f"{self.name}: two programs store to one address")
        for program, loaded in self.loads:
            at = np.minimum(np.searchsorted(addresses, loaded), len(addresses) - 1)
            if ((addresses[at] == loaded) & (programs[at] != program)).any():
                raise Race(f"{self.name}: a program loads what another one stores")


@contextmanager
def checked(seed: int | None) -> Iterator[None]:
    """Run the programs of each launch in an order drawn by `seed` (None: as they are numbered), and find races.

    Atomic operations are not looked at.

    Raises:
        Race: two programs touch an address and at least one stores to it, or threads of a program do without a barrier.
    """
    chance = None if seed is None else random.Random(seed)
    running: list[_Launch] = []
    real = {name: getattr(InterpreterBuilder, name) for name in ("set_grid_dim", "set_grid_idx", "create_barrier")}
    load, store, call = (
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
        GridExecutor.__call__,
    )

    def launch(self: Any, *args: Any, **options: Any) -> None:
        running.append(_Launch(self.fn.__name__, chance))
        try:
            call(self, *args, **options)
            running[-1].check()
        finally:
            running.pop()

    def set_grid_dim(self: Any, *sizes: int) -> None:
        real["set_grid_dim"](self, *sizes)
        running[-1].begin(sizes)

    def set_grid_idx(self: Any, *_: int) -> None:
        real["set_grid_idx"](self, *running[-1].next())

    def create_barrier(self: Any, *args: Any) -> Any:
        running[-1].unseen = []
        return real["create_barrier"](self, *args)

    def create_masked_load(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        running[-1].load(pointers.data[mask.data])
        return load(self, pointers, mask, *args)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        running[-1].store(pointers.data[mask.data])
        return store(self, pointers, value, mask, *args)

    hooks = {
        f.__name__: f for f in (set_grid_dim, set_grid_idx, create_barrier, create_masked_load, create_masked_store)
    }
    with (
        mock.patch.multiple(InterpreterBuilder, **hooks),
        mock.patch.object(GridExecutor, "__call__", launch),
    ):
        yield
