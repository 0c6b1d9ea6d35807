"""Tests on the device, at the start, whether products give a row the same bits for every number of rows."""

from __future__ import annotations

from functools import partial

from engine.batch import Model
from engine.models.decoder import Decoder
from kernels import triton as gpu
from kernels.linear import rows_are_equal
from kernels.ops import rms_norm


def shows_invariance(model: Model) -> bool:
    """Compute random rows by each kind of product and norm of a model, alone and beside other rows, and compare bits.

    If bits on a GPU depend on the tile of a product, all products use one tile from now on, and the test is repeated.
    Attention is not tested here.

    Args:
        model: bound to its attention backend. For a model in transformers' code the result is always False.

    Returns:
        Whether all bits were equal.
    """
    if not isinstance(model, Decoder):
        return False
    if _equal(model):
        return True
    matmul = gpu.load("matmul") if model.parameters.embedding.device.type == "cuda" else None
    if matmul is None or not matmul.Choice.varies:
        return False
    matmul.Choice.varies = False
    return _equal(model)


def _equal(model: Decoder) -> bool:
    """Compare the bits of rows once."""
    parameters = model.parameters
    norm = partial(rms_norm, weight=parameters.norm, eps=model.config.eps)
    embedding = parameters.embedding
    return rows_are_equal(norm, embedding.shape[1], embedding.dtype, embedding.device) and all(
        product.invariant for product in parameters.products()
    )
