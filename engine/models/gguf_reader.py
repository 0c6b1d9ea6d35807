"""Reads the container format GGUF: metadata and tensors of a file, or of all parts of a split file.

The format is described in ggml's `docs/gguf.md`. Tensor types and the sizes of their blocks come from the library
`gguf`; its reader is not used, since it makes several numpy arrays for each string of a vocabulary.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from engine.models.weights import LoadError, check_not_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number of a metadata value → its `struct` code."""
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_COUNT = 1 << 22
"""Maximum number of tensors, keys or elements of an array; more is damage: vocabularies have some 100,000."""
_PART = re.compile(r"-(\d{5})(-of-(\d{5})\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape in the order of numpy: the fastest dimension is last."""
    type: GGMLQuantizationType
    data: NDArray[np.uint8]
    """The stored bytes, `[..., bytes of a row]`; a view of the mapped file."""


@dataclass(frozen=True, slots=True)
class GgufContents:
    """Metadata and tensors of all parts of a model."""

    metadata: dict[str, Any]
    """Numbers, strings, booleans and lists of them; those of the first part."""
    tensors: list[GgufTensor]


def gguf_parts(path: Path) -> list[Path]:
    """Return all parts of the model that `path` is a part of, in order; only `path` if the file is not split.

    Raises:
        LoadError: a part is missing.
    """
    found = _PART.search(path.name)
    if found is None:
        return [path]
    total = int(found[3])
    stem = path.name[: found.start()]
    parts = [path.with_name(f"{stem}-{number:05d}{found[2]}") for number in range(1, total + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or path not in parts:
        raise LoadError(f"{path} is one of {total} parts; missing: {', '.join(missing) or 'the other parts'}")
    return parts


def part_stem(path: Path) -> str:
    """Return the name of the file without `.gguf` and without the number of the part."""
    return _PART.sub("", path.name) if _PART.search(path.name) else path.stem


def read_gguf(path: Path) -> GgufContents:
    """Read a model's metadata and find its tensors; any part of a split file may be named.

    Raises:
        LoadError: a part is missing, is no GGUF, is cut off, or does not belong to the other parts; the message names
            the part.
    """
    parts = [_read_part(part) for part in gguf_parts(path)]
    names = gguf_parts(path)
    stated = int(parts[0].metadata.get("split.count") or 1)
    if stated != len(parts):
        raise LoadError(f"{path} says that it is one of {stated} parts; found {len(parts)} by the files' names")
    tensors: dict[str, GgufTensor] = {}
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        if part.metadata.get("split.no", number) != number:
            raise LoadError(f"{name} says that it is part {part.metadata['split.no'] + 1}, its name says {number + 1}")
        for tensor in part.tensors:
            if tensor.name in tensors:
                raise LoadError(f"{name}: tensor {tensor.name!r} is there twice")
            tensors[tensor.name] = tensor
    expected = parts[0].metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise LoadError(f"{path} and its other parts hold {len(tensors)} tensors; the first part says {expected}")
    return GgufContents(parts[0].metadata, list(tensors.values()))


def read_metadata(path: Path) -> dict[str, Any]:
    """Read the metadata of one file.

    Raises:
        LoadError: as `read_gguf`.
    """
    return _read_part(path).metadata


def _read_part(path: Path) -> GgufContents:
    try:
        with path.open("rb") as file:
            head = file.read(4)
            if head != _MAGIC:
                check_not_pointer(path)
                raise LoadError(f"{path} is not a GGUF file: it begins with {head!r}")
            # Private and writable, since torch warns of read-only memory; nothing is written to it.
            data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return _Parser(data).contents()
    except struct.error as error:
        raise LoadError(f"{path} can't be read as GGUF: it is cut off") from error
    except (OSError, _Broken, UnicodeDecodeError) as error:
        raise LoadError(f"{path} can't be read as GGUF: {error}") from error


class _Broken(ValueError):
    """The bytes are not in GGUF; the message says why."""


class _Parser:
    """Parses the header of one file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def contents(self) -> GgufContents:
        version = self._number("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            raise _Broken(
                "its numbers are big-endian"
                if swapped in _VERSIONS
                else f"version {version} of the format is not known"
            )
        tensors, keys = self._count("tensors"), self._count("keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise _Broken(f"key {key!r} is there twice")
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Broken(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return GgufContents(metadata, [self._tensor(start, *info) for info in infos])

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _count(self, what: str) -> int:
        count: int = self._number("Q")
        if count > _MAX_COUNT:
            raise _Broken(f"it says that it has {count} {what}")
        return count

    def _string(self) -> str:
        return next(self._strings(1))

    def _strings(self, count: int) -> Iterator[str]:
        data, unpack, at, size = self._data, struct.Struct("<Q").unpack_from, self._at, len(self._data)
        for _ in range(count):
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > size:
                raise _Broken("it is cut off within a string")
            self._at = at
            yield data[start:at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._count("elements in an array"))
        if kind not in _SCALARS:
            raise _Broken(f"metadata of type {kind} is not known")
        return self._number(_SCALARS[kind])

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return list(self._strings(count))
        if kind not in _SCALARS:
            raise _Broken(f"an array of type {kind} is not known")
        values = struct.Struct(f"<{self._fits(count, struct.calcsize(_SCALARS[kind]))}{_SCALARS[kind]}")
        self._at += values.size
        return list(values.unpack_from(self._data, self._at - values.size))

    def _fits(self, count: int, size: int) -> int:
        """Return `count` if the file is long enough for as many elements of `size` bytes; raise otherwise."""
        if count * size > len(self._data) - self._at:
            raise _Broken("it is cut off within an array")
        return count

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        dims = self._number("I")
        if dims > _MAX_DIMS:
            raise _Broken(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._number("Q") for _ in range(dims))
        kind = self._number("I")
        try:
            return name, shape[::-1], GGMLQuantizationType(kind), self._number("Q")
        except ValueError:
            raise _Broken(f"tensor {name!r} is of type {kind}, which is not known") from None

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> GgufTensor:
        block, size = GGML_QUANT_SIZES[kind]
        *outer, row = shape or (1,)
        if row % block:
            raise _Broken(f"tensor {name!r} has rows of {row} numbers; {kind.name} stores blocks of {block}")
        stored = (*outer, row // block * size)
        count = 1
        for length in stored:
            count *= length
        if start + offset + count > len(self._data):
            raise _Broken(f"it is cut off: tensor {name!r} ends {start + offset + count - len(self._data)} bytes later")
        data = np.frombuffer(self._data, np.uint8, count, start + offset)
        return GgufTensor(name, shape, kind, data.reshape(stored))
