"""Copies between the host and the pretended GPU, and which of them the host waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.pretended.host import poison, span
from tests.pretended.tensor import GpuTensor

if TYPE_CHECKING:
    from tests.pretended.gpu import Gpu

NAMES = ("to", "_to_copy", "copy_")


def copy(gpu: Gpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Play `copy_`, `to` and `_to_copy`."""
    bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
    if "src" in bound:
        return _copy_into(gpu, bound["self"], bound["src"], bool(bound.get("non_blocking")))
    source, asked = bound["self"], bound.get("device")
    other = bound.get("other")
    on_device = isinstance(source, GpuTensor)
    goes = on_device if asked is None else torch.device(asked).type != "cpu"
    if other is not None:
        goes = isinstance(other, GpuTensor)
    if asked is not None and torch.device(asked).type == "meta":
        return func(*args, **kwargs)
    dtype = bound.get("dtype") or (None if other is None else other.dtype) or source.dtype
    wait = not bound.get("non_blocking")
    if on_device and goes:
        return _cast(gpu, func, source, dtype, bound)
    if goes:
        made = gpu.wrap(torch.empty_strided(source.shape, _strides(source), dtype=dtype).copy_(source))
        _upload(gpu, made, source, wait)
        return made
    if on_device:
        made_here = torch.empty_strided(source.shape, _strides(source), dtype=dtype)
        if not wait:  # torch pins what it makes for such a copy
            made_here = gpu.pinned.empty(tuple(source.shape), dtype)
        _download(gpu, made_here, source, wait)
        return made_here
    return func(*args, **kwargs)


def _cast(gpu: Gpu, func: Any, source: GpuTensor, dtype: torch.dtype, bound: dict[str, Any]) -> GpuTensor:
    layout = bound.get("memory_format") or torch.preserve_format
    wanted = layout is torch.preserve_format or source.raw.is_contiguous(memory_format=layout)
    same = dtype == source.dtype and not bound.get("copy") and "_to_copy" not in func._schema.name and wanted
    if same:
        return source
    read, out = source.raw, source.raw.to(dtype, copy=True, memory_format=layout)
    made = gpu.wrap(out)
    gpu.launch("to", lambda: out.copy_(read), [source], [made], fills=True)
    return made


def _copy_into(gpu: Gpu, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    if isinstance(target, GpuTensor) and isinstance(source, GpuTensor):
        if source.number and not target.dim():
            gpu.wait("upload")  # a number that is assigned to a single element is copied, not filled in
        write, read = target.raw, source.raw
        gpu.launch("copy_", lambda: write.copy_(read), [source], [target], fills=True)
    elif isinstance(target, GpuTensor):
        _upload(gpu, target, source, not non_blocking)
    elif isinstance(source, GpuTensor):
        _download(gpu, target, source, not non_blocking)
    else:
        target.copy_(source)
    return target


def _upload(gpu: Gpu, target: GpuTensor, source: Tensor, wait: bool) -> None:
    """Copy to the device. Only a plain copy from pinned memory is not waited for, and it reads its source late."""
    gpu.forbid_in_capture("memory of the host is uploaded")
    late = not wait and gpu.pinned.holds(source) and source.is_contiguous() and source.dtype == target.dtype
    write, kept = target.raw, source if late else source.clone()
    gpu.launch("upload", lambda: write.copy_(kept), [], [target], fills=True)
    if late:
        gpu.uploads = [(ticket, at) for ticket, at in gpu.uploads if ticket > gpu.queue.done]
        gpu.uploads.append((gpu.queue.launched, span(source)))
    else:
        gpu.wait("upload")


def _download(gpu: Gpu, target: Tensor, source: GpuTensor, wait: bool) -> None:
    """Copy to the host. Without a wait, the target holds poison until the copy was waited for."""
    gpu.forbid_in_capture("a tensor is downloaded")
    late = not wait and gpu.pinned.holds(target) and target.is_contiguous()
    if late:
        start, stop = span(target)
        awaited = any(ticket > gpu.queue.done and a < stop and start < b for ticket, (a, b) in gpu.uploads)
        if not awaited:
            poison(target)
    read = source.raw
    gpu.launch("download", lambda: target.copy_(read), [source], [])
    if not late:
        gpu.wait("download")


def _strides(x: Tensor) -> tuple[int, ...]:
    return torch.empty_like(x if not isinstance(x, GpuTensor) else x.raw, device="meta").stride()
