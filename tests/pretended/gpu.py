"""The pretended GPU itself: a dispatch mode that launches every operation of torch into a queue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pretended import copies
from tests.pretended.graphs import FORBIDDEN, CudaGraph
from tests.pretended.host import Pinned, poison
from tests.pretended.memory import Memory
from tests.pretended.streams import Queue, Stream
from tests.pretended.tensor import GpuTensor

_ROOT = Path(__file__).parents[2]
_OURS = tuple(str(_ROOT / name) + "/" for name in ("engine", "kernels", "worker"))
_WAITS = {
    "item", "is_nonzero", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "bincount", "masked_select",
    "equal", "allclose", "unique_dim", "unique_consecutive", "_unique", "_unique2", "histogram",
}  # fmt: skip
"""Operations whose result, or its shape, the host must know."""
_FILLS = ("fill_", "zero_")
_INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")


class Wait(NamedTuple):
    """A wait of the host for the device."""

    what: str
    """`event`, `synchronize`, `stream`, `upload`, `download`, or the name of an operation."""
    where: str
    """The line of engine, kernels or worker that waited; empty: the test itself."""


class Gpu(TorchDispatchMode):
    """Runs every operation of torch while it is entered."""

    def __init__(self, total: int, others: int) -> None:
        super().__init__()
        self.waited: list[Wait] = []
        """Every wait of the host, in order."""
        self.queue = Queue()
        self.memory = Memory(total, others)
        self.pinned = Pinned()
        self.default_stream = self.stream = Stream(self)
        self.capture_stream = Stream(self)
        self.capturing: CudaGraph | None = None
        self.replays = 0
        """Number of graphs that were replayed."""
        self.uploads: list[tuple[int, tuple[int, int]]] = []
        """Ticket and addresses of uploads that have not read their source yet."""
        self.loaded: set[object] = set()
        """Triton kernels, with their specialisation, that were launched outside of a capture."""

    # ── waits ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def waits(self) -> int:
        """How often the host had to wait for the device."""
        return len(self.waited)

    @contextmanager
    def watch(self) -> Iterator[list[Wait]]:
        """Return a list that holds the waits within the block at its end."""
        found: list[Wait] = []
        before = len(self.waited)
        yield found
        found += self.waited[before:]

    def wait(self, what: str, ticket: int | None = None) -> None:
        """Let the host wait, for everything or up to a ticket."""
        self.forbid_in_capture(f"the host waits ({what})")
        self.waited.append(Wait(what, _caller()))
        self.queue.drain(ticket)

    def forbid_in_capture(self, what: str) -> None:
        """Refuse what no graph can hold.

        Raises:
            torch.AcceleratorError: a capture is under way, which cannot be used any more.
        """
        if self.capturing is not None:
            self.capturing.refused = f"{what} at {_caller() or 'the test'}"
            raise torch.AcceleratorError(f"{FORBIDDEN}: {self.capturing.refused}")

    # ── launches ──────────────────────────────────────────────────────────────────────────────────────────────────

    def wrap(self, raw: Tensor, number: bool = False) -> GpuTensor:
        """Return a new tensor of the device.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """
        shape = tuple(raw.shape)
        share = self.capturing if self.capturing is not None else self.memory.general
        return GpuTensor(raw, self, share.allocate(raw.untyped_storage().nbytes(), shape), number)

    def launch(
        self,
        name: str,
        run: Callable[[], object],
        reads: list[GpuTensor],
        writes: list[GpuTensor],
        *,
        fills: bool = False,
    ) -> None:
        """Launch an operation, or record it.

        Args:
            name: for messages.
            run: computes, on `raw` tensors.
            reads, writes: what it uses.
            fills: `writes` are overwritten, whatever they hold.
        """
        seen = [x.block for x in (reads if fills else [*reads, *writes])]
        if self.capturing is not None:
            self.capturing.record(name, run, [x.block for x in (*reads, *writes)])
            return
        if not all(block.computed for block in seen):
            raise RuntimeError(f"{name} uses a tensor that was made in a capture, before the first replay of the graph")
        for tensor in writes:
            tensor.block.computed = True
        self.stream.check([x.block for x in reads], writes=False)
        self.stream.check([x.block for x in writes], writes=True)
        self.queue.add(name, run)

    # ── operations of torch ───────────────────────────────────────────────────────────────────────────────────────

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        if name == "_has_compatible_shallow_copy_type":
            return not isinstance(args[0], GpuTensor) and not isinstance(args[1], GpuTensor)
        if name == "is_pinned":
            return self.pinned.holds(args[0])
        if name in copies.NAMES:
            return copies.copy(self, func, args, kwargs)
        tensors = _tensors((args, kwargs))
        device = kwargs.get("device") or next((x for x in args if isinstance(x, torch.device)), None)
        if device is not None and torch.device(device).type == "meta" and name != "scalar_tensor":
            return func(*args, **kwargs)  # models are laid out there first; a number that is assigned is for the GPU
        there = [x for x in tensors if isinstance(x, GpuTensor)]
        if not there and (device is None or torch.device(device).type == "cpu"):
            return self._on_host(func, args, kwargs)
        if device is not None and torch.device(device).type == "cpu":
            pin = {"pin_memory": True} if kwargs.get("pin_memory") else {}
            return self._on_host(func, _raw(args), _raw(kwargs) | pin)  # empty_like and its kin, made on the host
        self._refuse_mix(name, args, tensors)
        self._index_waits(name, args)
        return self._on_device(func, name, _raw(args), _raw(kwargs), there, (args, kwargs))

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        pin = kwargs.get("pin_memory")
        if pin is not None:
            kwargs["pin_memory"] = False
        out = func(*args, **kwargs)
        return self.pinned.copy(out) if pin else out

    def _on_device(
        self, func: Any, name: str, args: Any, kwargs: Any, there: list[GpuTensor], given: tuple[Any, Any]
    ) -> Any:
        if name in _WAITS:
            self.wait(name)
            return self._wrapped(func(*args, **kwargs), there)
        written = _written(func, *given)
        if written:
            reads = [x for x in there if not any(x is y for y in written)]
            fills = name in _FILLS
            self.launch(name, lambda: func(*args, **kwargs), reads, written, fills=fills)
            return _returned(func, written)
        out = self._shaped(func, name, args, kwargs)
        fresh: list[GpuTensor] = []
        wrapped = self._wrapped(out, there, fresh)
        if not fresh:
            return wrapped
        if name in ("scalar_tensor",):
            fresh[0].number = True
        if name.startswith(("empty", "new_empty")):
            self.launch(name, lambda: poison(out), [], fresh, fills=True)
        else:
            self.launch(name, lambda: _renew(func(*args, **kwargs), out), there, fresh, fills=True)
        return wrapped

    def _shaped(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return results of the right shape, whose values are not those of the operation yet: its inputs are not."""
        try:
            return func(*args, **kwargs)
        except Exception:  # noqa: BLE001 - indices are garbage as yet
            with torch.inference_mode():
                try:
                    out = func(*_meta(args), **_meta(kwargs))
                except Exception as error:  # noqa: BLE001 - of many types
                    self.wait(f"{name}: {error}")  # or the operation is wrong, and raises now
                    return func(*args, **kwargs)
            return _mapped(out, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype))

    def _wrapped(self, out: Any, there: list[GpuTensor], fresh: list[GpuTensor] | None = None) -> Any:
        """Return results as tensors of the device: views share the block of an input."""
        owners = {x.raw.untyped_storage().data_ptr(): x for x in there if x.numel()}

        def wrap(x: Tensor) -> Tensor:
            for given in there:
                if x is given.raw:
                    return given
            owner = owners.get(x.untyped_storage().data_ptr()) if x.numel() else None
            if owner is not None:
                return GpuTensor(x, self, owner.block)
            made = self.wrap(x)
            if fresh is None:
                made.block.computed = True
            else:
                fresh.append(made)
            return made

        return _mapped(out, wrap)

    def _refuse_mix(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        if name in _INDEXED:
            if not isinstance(args[0], GpuTensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            tensors = [x for x in (args[0], *args[2:]) if isinstance(x, Tensor)]
        sides = {isinstance(x, GpuTensor) for x in tensors if x.dim() or isinstance(x, GpuTensor)}
        if len(sides) > 1:
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found cuda:0 and cpu")

    def _index_waits(self, name: str, args: Any) -> None:
        """Count the wait of an index that is on the host, or a mask: how many elements does it choose?"""
        if name == "repeat_interleave" and isinstance(args[-1], GpuTensor):
            self.wait(name)
        if name == "where" and len(args) == 1:
            self.wait(name)
        if name in _INDEXED:
            indices = [x for x in args[1] if x is not None]
            host_value = (
                len(args) > 2 and args[2].numel() == 1 and (args[2].number if isinstance(args[2], GpuTensor) else True)
            )
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            if any(not isinstance(x, GpuTensor) for x in indices):
                self.wait("index on the host")
            elif masks and not host_value:
                self.wait("index by a mask")


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, list | tuple):
        return []
    return [found for part in x for found in _tensors(part)]


def _mapped(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, list | tuple):
        parts = [_mapped(part, change) for part in x]
        return parts if isinstance(x, list) else type(x)(parts) if type(x) is tuple else type(x)(*parts)
    return {key: _mapped(value, change) for key, value in x.items()} if isinstance(x, dict) else x


def _raw(x: Any) -> Any:
    """Return arguments as the CPU needs them. Values of the host are those at the launch."""
    if isinstance(x, GpuTensor):
        return x.raw
    if isinstance(x, Tensor):
        return x.clone()
    if isinstance(x, torch.device):
        return torch.device("cpu")
    if isinstance(x, list | tuple):
        return type(x)([_raw(part) for part in x])
    if isinstance(x, dict):
        return {k: ("cpu" if k == "device" else False if k == "pin_memory" else _raw(v)) for k, v in x.items()}
    return x


def _meta(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("meta")
    if isinstance(x, dict):
        return {key: "meta" if key == "device" else _meta(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)([_meta(part) for part in x])
    if isinstance(x, Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return x


def _written(func: Any, args: Any, kwargs: Any) -> list[GpuTensor]:
    """Return the arguments that an operation writes."""
    found: list[GpuTensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [x for x in _tensors(value) if isinstance(x, GpuTensor)]
    return found


def _returned(func: Any, written: list[GpuTensor]) -> Any:
    count = len(func._schema.returns)
    return None if not count else written[0] if count == 1 else tuple(written[:count])


def _renew(new: Any, out: Any) -> None:
    """Write the values of an operation into the results that were returned at its launch."""
    for x, y in zip(_tensors(out), _tensors(new), strict=True):
        if x.shape != y.shape:
            raise RuntimeError(f"the shape depends on data, {[*x.shape]} became {[*y.shape]}: a GPU would wait")
        x.copy_(y)


def _caller() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OURS):
            return f"{file[len(str(_ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
