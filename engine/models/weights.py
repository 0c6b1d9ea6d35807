"""Checkpoints: where tensors come from, and the account of which were taken."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class LoadError(Exception):
    """The model can't be loaded; the message says why, for whoever chose it."""


class Checkpoint(Protocol):
    """Named tensors on disk, under their Hugging Face names."""

    def names(self) -> set[str]: ...

    def load(self, name: str) -> Tensor:
        """The tensor as it is stored (dequantised where it was quantised)."""
        ...


class SafetensorsCheckpoint:
    """The `*.safetensors` of a directory: one file, or shards with an index.

    Raises:
        LoadError: no such files, a shard is missing, or a file is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._files = _index(directory)
        self._open: dict[Path, safe_open] = {}

    def names(self) -> set[str]:
        return set(self._files)

    def load(self, name: str) -> Tensor:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open(path)
        tensor: Tensor = self._open[path].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor


def _index(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = {name: directory / file for name, file in json.loads(index.read_bytes())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{index} is not a safetensors index: {error}") from error
        missing = sorted({path.name for path in files.values() if not path.exists()})
        if missing:
            raise LoadError(f"{directory} lacks the shards {', '.join(missing)}")
        return files
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise LoadError(f"{directory} has no *.safetensors file")
    return {name: path for path in paths for name in _keys(path)}


def _keys(path: Path) -> list[str]:
    names: list[str] = _open(path).keys()  # type: ignore[no-untyped-call]
    return names


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} can't be read: {error}") from error


_IGNORABLE = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$")
"""Buffers that old checkpoints carry and that are computed here."""


class ParameterStore:
    """Hands out a checkpoint's tensors in the model's dtype and knows at the end which were never asked for."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._names = checkpoint.names()
        self._taken: set[str] = set()
        self.num_parameters = 0
        """Numbers handed out so far."""

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor.

        Raises:
            LoadError: it is missing or has another shape.
        """
        if name not in self._names:
            raise LoadError(f"the checkpoint has no tensor {name!r}")
        tensor = self._checkpoint.load(name)
        if tuple(tensor.shape) != shape:
            raise LoadError(f"tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
        if not tensor.is_floating_point():
            raise LoadError(f"tensor {name!r} is stored as {tensor.dtype}, a quantisation that is not read here")
        self._taken.add(name)
        self.num_parameters += tensor.numel()
        return tensor.to(device=self._device, dtype=self._dtype)

    def finish(self) -> None:
        """
        Raises:
            LoadError: the checkpoint holds tensors that the model has no place for.
        """
        left = sorted(name for name in self._names - self._taken if not _IGNORABLE.search(name))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise LoadError(f"the checkpoint holds tensors that the model has no place for: {shown}")
