"""Linears and small operations: right, and bit for bit the same whatever the rows beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as linear_module
from kernels.linear import Linear, bucket, pad_rows
from kernels.ops import add_rms_norm, rms_norm, rotary, silu_mul

DTYPES = [torch.float32, torch.bfloat16]


def test_buckets_are_2_4_8_16_then_multiples_of_16() -> None:
    assert [bucket(n) for n in (0, 1, 2, 3, 5, 8, 9, 16, 17, 33, 2048)] == [2, 2, 2, 4, 8, 8, 16, 16, 32, 48, 2048]
    assert pad_rows(torch.ones(3, 2), 4).tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torch(dtype: torch.dtype, bias: bool) -> None:
    weight, offset = torch.randn(48, 40).to(dtype), torch.randn(48).to(dtype) if bias else None
    for rows in (1, 2, 3, 17):
        x = torch.randn(rows, 40).to(dtype)
        want = F.linear(x.float(), weight.float(), None if offset is None else offset.float())
        got = Linear(weight, offset)(x)
        assert got.dtype == dtype
        assert torch.allclose(got.float(), want, atol=1e-4 if dtype == torch.float32 else 0.15)


def test_linear_falls_back_where_oneDNN_can_not_prepack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "can_prepack", lambda dtype: False)
    weight, x = torch.randn(48, 40), torch.randn(3, 40)
    layer = Linear(weight)
    assert torch.allclose(layer(x), F.linear(x, weight), atol=1e-5)
    assert layer.invariant


def rows_are_independent(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    whole = function(x)
    for rows in (1, 2, 3, 5, 8, 16, 31, 100):
        for start in (0, 7):
            assert torch.equal(function(x[start : start + rows].clone()), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 64, 576])
def test_a_row_has_the_same_bits_in_every_batch(threads: int, dtype: torch.dtype, width: int) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(200, 2 * width, generator=generator) * 4).to(dtype)
    weight = torch.randn(96, 2 * width, generator=generator).to(dtype)
    norm = torch.randn(2 * width, generator=generator).to(dtype)
    rows_are_independent(Linear(weight), x)
    rows_are_independent(silu_mul, x)
    rows_are_independent(lambda y: rms_norm(y, norm, 1e-5), x)
    assert Linear(weight).invariant


def test_small_operations_equal_their_formulas() -> None:
    x, y, weight = torch.randn(5, 3, 16), torch.randn(5, 3, 16), torch.randn(16)
    norm = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert torch.allclose(rms_norm(x, weight, 1e-5), norm, atol=1e-6)
    got, total = add_rms_norm(x, y.clone(), weight, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(got, rms_norm(x + y, weight, 1e-5))
    gate_up = torch.randn(5, 32) * 30
    assert torch.allclose(silu_mul(gate_up), F.silu(gate_up[:, :16]) * gate_up[:, 16:], atol=1e-5)
    angle = torch.randn(5, 8)
    pair = torch.view_as_complex(torch.stack([x[..., :8], x[..., 8:]], -1).contiguous())
    turned = torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle)[:, None])
    want = torch.cat([turned[..., 0], turned[..., 1]], -1)
    assert torch.allclose(rotary(x, angle.cos(), angle.sin()), want, atol=1e-6)
