"""The Triton kernel that quantises rows, against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import quantize as product
from kernels.triton.quantize import quantize

DTYPES = [torch.int8, product.FP8]
INPUTS = [torch.float32, torch.float16]


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.empty(x.shape, dtype=dtype)
    scales = torch.empty(x.shape[0])
    quantize(x, values, scales)
    return values, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("cols", [8, 100, 1500])
def test_the_kernel_gives_the_values_and_scales_of_torch(dtype: torch.dtype, given: torch.dtype, cols: int) -> None:
    x = (torch.randn(9, cols) * torch.logspace(-6, 3, 9)[:, None]).to(given)
    x[3] = 0
    values, scales = quantized(x, dtype)
    want, want_scales = product.reference(x, dtype)
    assert torch.equal(values.float(), want.float())
    assert torch.equal(scales, want_scales)


def test_fp8_rounds_every_size_of_number_as_torch_does() -> None:
    x = (torch.randn(4, 4096) * torch.logspace(-14, 4, 4096, base=2)).clamp(-448, 448)
    x[:, 0] = 448.0  # so that the scale is 1
    values, scales = quantized(x, product.FP8)
    assert torch.equal(scales, torch.ones(4))
    assert torch.equal(values.float(), x.to(product.FP8).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_of_nan_and_no_other_row_has(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 40)
    x[1, 7] = bad
    for values, scales in (quantized(x, dtype), product.reference(x, dtype)):
        assert scales.isnan().tolist() == [False, True, False]
        assert values.float().isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_between_rows_is_not_read_and_further_rows_are_not_written(dtype: torch.dtype) -> None:
    x = torch.full((3, 48), float("nan"))
    x[:, :40] = torch.randn(3, 40)
    values = torch.full((5, 40), 7.0).to(dtype)
    scales = torch.full((5,), 7.0)
    quantize(x[:, :40], values, scales)
    want, want_scales = product.reference(x[:, :40], dtype)
    assert torch.equal(values[:3].float(), want.float())
    assert torch.equal(scales[:3], want_scales)
    assert (values[3:].float() == 7).all()
    assert (scales[3:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1.2e-36, 1e-31, 1e-29, 1e38])
def test_rows_of_tiny_or_huge_numbers_keep_their_zeros(dtype: torch.dtype, size: float) -> None:
    x = torch.zeros(3, 48)
    x[0, 5] = size
    x[1] = size * torch.randn(48).clamp(-3, 3)
    for values, scales in (quantized(x, dtype), product.reference(x, dtype)):
        close = values.float() * scales[:, None]
        assert (close - x).abs().max() <= max(size * 3 / 16, product.LEAST)
        assert not values[0, :5].float().any()
