"""The Triton product of fixed order: right, and bit for bit the same for every number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.quantize import FP8, quantize_rows, reference
from kernels.triton import matmul as module
from kernels.triton.matmul import matmul

DTYPES = [torch.float32, torch.float16]
ROWS = [1, 2, 3, 17, 128]
UNITS = {torch.float32: 2**-23, torch.float16: 2**-10}


@pytest.fixture(params=[(8, 0), (9, 0)], ids=["sm_80", "sm_90"], autouse=True)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "capability", lambda device: request.param)


def bounded(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, unit: float) -> bool:
    """Return whether a product is within the rounding of its result and of an fp32 sum of its terms."""
    wide, factors = x.double(), weight.double()
    want = wide @ factors.T + (0 if bias is None else bias.double())
    terms = wide.abs() @ factors.abs().T + (0 if bias is None else bias.double().abs())
    return bool(((got.double() - want).abs() <= unit * want.abs() + x.shape[1] * 2**-24 * terms).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(8, 5, True), (64, 96, False), (100, 130, True)])
def test_products_equal_fp64(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    offset = torch.randn(outputs).to(dtype) if bias else None
    for rows in (1, 3, 17, 70):
        x = torch.randn(rows, inputs).to(dtype)
        got = matmul(x, weight, offset)
        assert got.dtype == dtype
        assert bounded(got, x, weight, offset, UNITS[dtype])


@pytest.mark.parametrize("dtype", [*DTYPES, FP8, torch.int8])
def test_a_row_has_the_same_bits_for_every_number_of_rows(dtype: torch.dtype) -> None:
    wide, weight = torch.randn(128, 200), torch.randn(70, 200)
    scales: tuple[Tensor, Tensor] | None = None
    if dtype in DTYPES:
        x, weight = wide.to(dtype), weight.to(dtype)
    else:
        x, of_rows = quantize_rows(wide, dtype)
        weight, of_outputs = reference(weight, dtype)
        scales = of_rows, of_outputs
    whole = matmul(x, weight, scales=scales, dtype=torch.float32)
    for rows in ROWS:
        for start in (0, 5, 128 - rows):
            part = slice(start, min(128, start + rows))
            few = None if scales is None else (scales[0][part].clone(), scales[1])
            assert torch.equal(matmul(x[part].clone(), weight, scales=few, dtype=torch.float32), whole[part])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_beside_the_factors_is_not_read(dtype: torch.dtype) -> None:
    x = torch.full((24, 80), float("nan"), dtype=dtype)
    x[:20, :72] = torch.randn(20, 72).to(dtype)
    weight = torch.full((50, 72), float("nan"), dtype=dtype)
    weight[:40] = torch.randn(40, 72).to(dtype)
    assert bounded(matmul(x[:20, :72], weight[:40]), x[:20, :72], weight[:40], None, UNITS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    x, weight = torch.randn(20, 72).to(dtype), torch.randn(40, 72).to(dtype)
    x[3, 5] = float("nan")
    got = matmul(x, weight)
    assert got[3].isnan().all()
    assert got[[*range(3), *range(4, 20)]].isfinite().all()


def test_products_of_integers_are_exact() -> None:
    x = torch.randint(-127, 128, (19, 300), dtype=torch.int8)
    weight = torch.randint(-127, 128, (40, 300), dtype=torch.int8)
    ones = torch.ones(19), torch.ones(40)
    got = matmul(x, weight, scales=ones, dtype=torch.float32)
    assert torch.equal(got, (x.long() @ weight.long().T).float())


def test_products_of_fp8_with_scales_and_bias_equal_fp64() -> None:
    x, x_scales = quantize_rows(torch.randn(19, 300), FP8)
    weight, scales = reference(torch.randn(40, 300), FP8)
    bias = torch.randn(40)
    got = matmul(x, weight, bias, scales=(x_scales, scales), dtype=torch.float32)
    assert bounded(got, x.double() * x_scales[:, None], weight.double() * scales[:, None], bias, 2**-22)


def test_no_rows_give_no_rows() -> None:
    assert matmul(torch.empty(0, 8), torch.randn(5, 8)).shape == (0, 5)
