"""Our own products: equal to their formulas for odd shapes, gated and in int8, whatever runs them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as linear_module
from kernels import native, ops_reference
from kernels.linear import Linear, Precision
from kernels.ops import quantize, silu_mul
from tests.kernels.test_linear import rows_are_independent

INT8 = Precision(torch.int8)
SHAPES = [(48, 40), (33, 6), (64, 4), (960, 576), (100, 1536)]


def close(got: Tensor, want: Tensor, weight: Tensor, x: Tensor) -> bool:
    """Within what rounding to bf16 (2^-9) and fp32 sums of exact products allow (2^-24 a term, of the sum of sizes)."""
    sizes = x.double().abs() @ weight.double().abs().t()
    bound = want.abs() * 2**-8 + sizes * weight.shape[1] * 2**-23 + 1e-30
    return bool(((got.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_bf16_are_right_for_any_rows(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator).bfloat16()
    offset = torch.randn(shape[0], generator=generator).bfloat16() if bias else None
    layer = Linear(weight, offset)
    for rows in (1, 2, 3, 5, 6, 7, 13, 97, 200):
        x = torch.randn(rows, shape[1], generator=generator).bfloat16()
        want = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        assert close(layer(x), want, weight, x), rows
    assert layer(torch.empty(0, shape[1], dtype=torch.bfloat16)).shape == (0, shape[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inner", [32, 40, 96])
def test_gated_is_silu_times_up_of_the_same_product(inner: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(2 * inner, 64).to(dtype), torch.randn(2 * inner).to(dtype)
    gated, plain = Linear(weight, bias, gated=True), Linear(weight, bias)
    for rows in (1, 6, 50):
        x = torch.randn(rows, 64).to(dtype)
        assert torch.equal(gated(x), silu_mul(plain(x)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(64, 40), (192, 576), (128, 42)])
def test_int8_has_the_same_bits_with_and_without_the_kernels(
    shape: tuple[int, int], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    ours = Linear(weight, bias, gated=gated, precision=INT8)
    with monkeypatch.context() as patch:
        patch.setattr(linear_module, "_native", lambda dtype: None)
        other = Linear(weight, bias, gated=gated, precision=INT8)
    for rows in (1, 5, 40):
        x = torch.randn(rows, shape[1]).bfloat16() * 3
        x[0, 0] = 100
        assert torch.equal(ours(x), other(x))


@pytest.mark.parametrize("inputs", [1, 2, 3, 5, 576])
def test_int8_is_within_half_a_step_of_each_factor(inputs: int) -> None:
    weight, x = torch.randn(96, inputs), torch.randn(20, inputs)
    got = Linear(weight.bfloat16(), precision=INT8)(x.bfloat16()).double()
    w, y = weight.bfloat16().double(), x.bfloat16().double()
    w_step, x_step = w.abs().amax(1) / 127, y.abs().amax(1) / 127
    # |ab - a'b'| <= |a - a'| |b'| + |a| |b - b'|, summed over the inputs
    bound = w_step / 2 * (y.abs() + x_step[:, None] / 2).sum(1)[:, None] + x_step[:, None] / 2 * w.abs().sum(1)
    want = y @ w.t()
    assert bool(((got - want).abs() <= bound + want.abs() * 2**-8).all())


@pytest.mark.parametrize("int8", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(int8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(200, 128, generator=generator) * 4).bfloat16()
    weight = torch.randn(96, 128, generator=generator).bfloat16()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        rows_are_independent(Linear(weight, precision=Precision(torch.int8 if int8 else None)), x)
        rows_are_independent(Linear(weight, gated=True, precision=Precision(torch.int8 if int8 else None)), x)


def test_a_column_has_the_same_bits_beside_any_other_columns() -> None:
    weight, x = torch.randn(960, 128).bfloat16(), torch.randn(40, 128).bfloat16()
    whole = Linear(weight)(x)
    for outputs in (1, 31, 33, 64, 500):
        assert torch.equal(Linear(weight[:outputs].clone())(x), whole[:, :outputs])


def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    weight = torch.randn(64, 64).bfloat16()
    for int8 in (False, True):
        layer = Linear(weight, precision=Precision(torch.int8 if int8 else None))
        x = torch.randn(9, 64).bfloat16()
        clean = layer(x)
        for value in (float("nan"), float("inf"), float("-inf")):
            y = x.clone()
            y[4, 7] = value
            got = layer(y)
            assert not torch.isfinite(got[4]).any()
            rest = [0, 1, 2, 3, 5, 6, 7, 8]
            assert torch.equal(got[rest], clean[rest])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cols", [4, 16, 40, 576])
def test_quantize_equals_its_reference(cols: int, dtype: torch.dtype) -> None:
    x = (torch.randn(33, cols) * torch.logspace(-6, 6, 33)[:, None]).to(dtype)
    x[3] = 0
    x[5, 1], x[6, 2] = float("nan"), float("inf")
    values, steps = quantize(x)
    want_values, want_steps = ops_reference.quantize(x)
    finite = torch.isfinite(want_steps)
    assert torch.equal(torch.isnan(steps), ~finite)
    assert torch.equal(values[finite], want_values[finite])
    assert torch.equal(steps[finite], want_steps[finite])


def test_the_kernels_multiply_where_the_cpu_can() -> None:
    library = native.library()
    if library is None or native.INSTRUCTION_SETS[library.tm_choose(len(native.INSTRUCTION_SETS))] != "avx512_bf16":
        pytest.skip("no dot products of bf16 here")
    assert library.tm_has_matmul()
