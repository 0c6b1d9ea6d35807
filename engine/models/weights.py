"""Reads checkpoints in safetensors, and records which tensors were used."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class LoadError(Exception):
    """The model cannot be loaded; the message says why, in one line, for the operator."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Checkpoint(Protocol):
    """Tensors on disk, by their Hugging Face names."""

    def names(self) -> set[str]: ...

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor as it is stored; a quantised tensor in `dtype`."""
        ...


class SafetensorsCheckpoint:
    """The safetensors files of a directory: one file, or shards.

    Raises:
        LoadError: no such files, a shard is missing, or a file is broken.
    """

    def __init__(self, directory: Path) -> None:
        self._files = safetensors_files(directory)
        self._open: dict[Path, safe_open] = {}

    @property
    def files(self) -> set[Path]:
        """The files that hold tensors."""
        return set(self._files.values())

    def names(self) -> set[str]:
        return set(self._files)

    def has_copies(self) -> bool:
        """Return whether a tensor is in more than one file."""
        return sum(len(_keys(path)) for path in self.files) > len(self._files)

    def check_plain(self) -> None:
        """Refuse weights that are only right with a scale, which the checkpoint has in another tensor.

        Raises:
            LoadError: a weight is stored as integers.
        """
        for name in sorted(self._files):
            kind: str = self._opened(self._files[name]).get_slice(name).get_dtype()  # type: ignore[no-untyped-call]
            if name.endswith(".weight") and not kind.startswith(("F", "BF")):  # buffers may be integers
                raise quantised(name, kind)

    def _opened(self, path: Path) -> safe_open:
        if path not in self._open:
            self._open[path] = _open(path)
        return self._open[path]

    def load(self, name: str, dtype: torch.dtype) -> Tensor:
        path = self._files[name]
        try:
            tensor: Tensor = self._opened(path).get_tensor(name)  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError, RuntimeError) as error:
            raise LoadError(f"{path}: tensor {name!r} can't be read: {error}") from error
        return tensor


SAFETENSORS_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_OTHER_WEIGHTS = {
    "adapter_model.safetensors": "an adapter (LoRA), which is not applied here",
    "consolidated.safetensors": "weights in Mistral's own format",
}
"""Files beside the weights of a model that are not part of them → what they are."""


def safetensors_files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor in a directory: `model.safetensors`, else the shards, as transformers does.

    Raises:
        LoadError: there is no such file, a shard is missing, or a file is broken; the message names the file.
    """
    single, index = directory / "model.safetensors", directory / SAFETENSORS_INDEX
    if single.exists():
        return _names_in([single])
    if index.exists():
        return _indexed(index)
    paths = model_safetensors(directory)
    if not paths:
        raise LoadError(f"{directory} has no *.safetensors file{_what_else(directory)}")
    shards = [_SHARD.fullmatch(path.name) for path in paths]
    if len({shard and (shard[1], shard[3]) for shard in shards}) > 1 or (len(paths) > 1 and shards[0] is None):
        raise LoadError(f"{directory} holds several models: {', '.join(path.name for path in paths)}")
    if (shard := shards[0]) is not None:
        wanted = {f"{shard[1]}-{n:05d}-of-{shard[3]}.safetensors" for n in range(1, int(shard[3]) + 1)}
        _refuse_missing(directory, wanted - {path.name for path in paths})
    return _names_in(paths)


def model_safetensors(directory: Path) -> list[Path]:
    """Return the safetensors files of a directory that may hold a model's weights: no adapters, no hidden files."""
    found = directory.glob("*.safetensors")
    return sorted(path for path in found if path.name not in _OTHER_WEIGHTS and not path.name.startswith("."))


def _indexed(index: Path) -> dict[str, Path]:
    check_not_pointer(index)
    directory = index.parent
    try:
        listed = json.loads(index.read_bytes())["weight_map"]
        files = {str(name): directory / file for name, file in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise LoadError(f"{index} is not a safetensors index: {error}") from error
    if not files:
        raise LoadError(f"{index} lists no tensors")
    _refuse_missing(directory, {path.name for path in files.values() if not path.exists()})
    held = {path: set(_keys(path)) for path in sorted(set(files.values()))}
    for name, path in files.items():
        if name not in held[path]:
            raise LoadError(f"{path} lacks tensor {name!r}, which {index.name} says is there")
    return {name: path for path, names in held.items() for name in names} | files


def _refuse_missing(directory: Path, names: set[str]) -> None:
    if names:
        raise LoadError(f"{directory} lacks the shards {', '.join(sorted(names))}")


def _what_else(directory: Path) -> str:
    """Return, for a message, what a directory without weights contains."""
    for name, what in _OTHER_WEIGHTS.items():
        if (directory / name).exists():
            return f" of a model; {name} holds {what}"
    pickles = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    return f", only {pickles[0].name}: convert it to safetensors" if pickles else ""


def _names_in(paths: list[Path]) -> dict[str, Path]:
    """Return the file of each tensor in these files.

    Raises:
        LoadError: a file is broken, or two hold the same tensor.
    """
    found: dict[str, Path] = {}
    for path in paths:
        for name in _keys(path):
            if name in found:
                raise LoadError(f"{path} holds tensor {name!r}, and so does {found[name].name}")
            found[name] = path
    return found


def _keys(path: Path) -> list[str]:
    names: list[str] = _open(path).keys()  # type: ignore[no-untyped-call]
    return names


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        check_not_pointer(path)
        raise LoadError(f"{path} can't be read: {error}") from error


def quantised(name: str, kind: str) -> LoadError:
    """Return the error for a tensor that is stored as integers."""
    return LoadError(f"tensor {name!r} is stored as {kind}, a quantisation that is not read here")


def check_not_pointer(path: Path) -> None:
    """
    Raises:
        LoadError: the file is not what its name says, but what Git LFS leaves in its place.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise LoadError(f"{path} is only a pointer of Git LFS to the file: run `git lfs pull` in its directory")


_POINTER = b"version https://git-lfs.github.com/spec/"
_IGNORABLE = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$")
"""Buffers in old checkpoints, which are computed here instead."""


class ParameterStore:
    """Returns the tensors of a checkpoint in the model's dtype and device, and records which were never taken."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._names = checkpoint.names()
        self._taken: set[str] = set()
        self.num_parameters = 0
        """Number of elements of all tensors taken so far."""

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor in the model's dtype or in `dtype`.

        Raises:
            LoadError: the tensor is missing or has another shape.
        """
        if name not in self._names:
            raise LoadError(f"the checkpoint has no tensor {name!r}")
        dtype = dtype or self._dtype
        tensor = self._checkpoint.load(name, dtype)
        if tuple(tensor.shape) != shape:
            raise LoadError(f"tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(shape)}")
        if not tensor.is_floating_point():
            raise quantised(name, str(tensor.dtype).removeprefix("torch."))
        self._taken.add(name)
        self.num_parameters += tensor.numel()
        return tensor.to(device=self._device, dtype=dtype)

    def finish(self) -> None:
        """
        Raises:
            LoadError: the checkpoint holds tensors that the model has no place for.
        """
        left = sorted(name for name in self._names - self._taken if not _IGNORABLE.search(name))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise LoadError(f"the checkpoint holds tensors that the model has no place for: {shown}")
