"""Dequantised numbers are those of the library `gguf`, bit for bit, whatever the type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits

from engine.models.dequantize import dequantize
from engine.models.gguf_reader import GgufTensor
from engine.models.weights import LoadError

QUANTISED = sorted(_type_traits, key=lambda kind: kind.name)


def stored(kind: GGMLQuantizationType, *shape: int) -> GgufTensor:
    block, size = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (*shape[:-1], shape[-1] // block * size), dtype=np.uint8)
    return GgufTensor("x", shape, kind, data)


def same(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return np.array_equal(ours.numpy(), theirs, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of random scales that are no numbers
@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_every_type_of_the_library(kind: GGMLQuantizationType) -> None:
    tensor = stored(kind, 3, 50, 768)  # more than is computed at once, and no multiple of it
    try:
        want = gguf.dequantize(tensor.data, kind)
    except NotImplementedError:
        with pytest.raises(LoadError, match=kind.name):
            dequantize(tensor, None, torch.float32)
        return
    assert same(dequantize(tensor, None, torch.float32), want)
    assert same(dequantize(tensor, 1, torch.float32), want[1])
    narrow = torch.from_numpy(np.array(want)).bfloat16()
    assert torch.equal(dequantize(tensor, None, torch.bfloat16).nan_to_num(), narrow.nan_to_num())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types(kind: str) -> None:
    tensor = stored(GGMLQuantizationType[kind], 5, 8)
    want = gguf.dequantize(tensor.data, tensor.type)
    assert same(dequantize(tensor, None, torch.float32), np.array(want))


def test_unsupported_types_are_named() -> None:
    with pytest.raises(LoadError, match="'x' is quantised as I32"):
        dequantize(stored(GGMLQuantizationType.I32, 4, 4), None, torch.float32)
