"""The small Triton kernels against the torch code that defines where they round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import ops_reference as reference
from kernels.attention.base import AttentionBatch, CacheSpec
from kernels.attention.reference import ReferenceBackend
from kernels.triton import ops
from kernels.triton.write import write_rotated

DTYPES = [torch.float32, torch.float16]
NAN_BYTE = 0xFF


def close(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors differ by at most 8 units of the last place of the highest value."""
    unit = torch.finfo(want.dtype).eps * float(want.float().abs().max())
    return got.dtype == want.dtype and float((got.float() - want.float()).abs().max()) <= 8 * unit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 96, 576, 2048])
@pytest.mark.parametrize("narrow", [True, False])
def test_norms_equal_torch(dtype: torch.dtype, cols: int, narrow: bool) -> None:
    x, residual = torch.randn(2, 5, cols).to(dtype).unbind(0)
    weight = torch.randn(cols).to(dtype if narrow else torch.float32)
    assert close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    want, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    got, place = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert close(got, want)
    assert place is residual
    assert torch.equal(place, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [8, 96, 1500])
def test_gates_and_softcap_equal_torch(dtype: torch.dtype, cols: int) -> None:
    gate_up = 3 * torch.randn(3, 2 * cols).to(dtype)
    assert close(ops.silu_mul(gate_up), reference.silu_mul(gate_up))
    assert close(ops.gelu_mul(gate_up), reference.gelu_mul(gate_up))
    assert close(ops.softcap(gate_up.clone(), 3.0), reference.softcap(gate_up.clone(), 3.0))


def test_large_inputs_of_a_gate_overflow_to_no_nan() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 88.0, 1.0, 1.0, 1.0, 1.0]])
    for ours, theirs in ((ops.silu_mul, reference.silu_mul), (ops.gelu_mul, reference.gelu_mul)):
        assert close(ours(gate_up), theirs(gate_up))


def test_a_row_has_the_same_bits_beside_any_other_rows() -> None:
    x, weight = torch.randn(9, 576), torch.randn(576)
    for at in (0, 4, 8):
        assert torch.equal(ops.rms_norm(x[at : at + 1], weight, 1e-6)[0], ops.rms_norm(x, weight, 1e-6)[at])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 80), (7, 1, 128), (2, 2, 8)])
@pytest.mark.parametrize("norm", [None, "narrow", "wide"])
@pytest.mark.parametrize("rotate", [False, True])
def test_the_rotated_store_equals_torch_and_leaves_other_slots_alone(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, norm: str | None, rotate: bool
) -> None:
    spec = CacheSpec(2, kv_heads, dim, 4, dtype, torch.device("cpu"))
    slots = torch.tensor([3, 17, 8, 9, -1])
    batch = AttentionBatch(slots, torch.zeros(5, dtype=torch.int64), (0, 4), (4,), ((0, 1),))
    qkv = torch.randn(5, heads + 2 * kv_heads, dim).to(dtype)
    norms = rotation = None
    if norm is not None:
        weights = torch.randn(2, dim).to(dtype if norm == "narrow" else torch.float32)
        norms = (weights[0], weights[1], 1e-6)
    if rotate:
        angles = torch.randn(5, dim // 2)
        rotation = (angles.cos(), angles.sin())
    backends = [ReferenceBackend(spec), ReferenceBackend(spec)]
    pools = [torch.full((6, backends[0].block_bytes), NAN_BYTE, dtype=torch.uint8) for _ in backends]
    for backend, pool in zip(backends, pools, strict=True):
        backend.bind(pool)
    want = backends[0].write_rotated(1, qkv.clone(), batch, norms=norms, rotation=rotation)
    kv = backends[1]._kv[:, 1]
    got = write_rotated(qkv, kv[:, 0], kv[:, 1], slots, norms=norms, rotation=rotation)
    assert close(got[:4], want[:4])
    ours, theirs = pools[1].view(dtype), pools[0].view(dtype)
    assert torch.equal(ours.isnan(), theirs.isnan())  # padding and other slots are not written
    assert close(ours.nan_to_num(0), theirs.nan_to_num(0))
