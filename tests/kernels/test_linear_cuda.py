"""Products of 8-bit factors as a GPU computes them, with operations of torch on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import linear_cuda, ops_reference
from kernels import triton as gpu
from kernels.linear_cuda import CudaProduct, can_quantize
from kernels.quantize import FP8, quantize_rows, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EIGHT_BITS = [torch.int8, FP8]


@pytest.fixture(autouse=True)
def _no_triton() -> Iterator[None]:
    for group in ("matmul", "quantize"):
        gpu.disable(group, "tensors of this test are on the CPU")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
    gpu.enable_all()


@pytest.fixture(params=[True, False], ids=["scales-rows", "scales-tensors"], autouse=True)
def scales_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose fp8 products have a scale for each row, and one that has none."""
    monkeypatch.setattr(linear_cuda, "_scales_rows", lambda device, dtype: request.param)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the product of the quantised factors in fp64, and the sum of the sizes of its terms."""
    values, scales = reference(x, dtype)
    of_weight, of_outputs = reference(weight, dtype)
    factors = values.double() * scales.double()[:, None], of_weight.double() * of_outputs.double()[:, None]
    want = factors[0] @ factors[1].T + (0 if bias is None else bias.double())
    return want, factors[0].abs() @ factors[1].abs().T + (0 if bias is None else bias.double().abs())


@pytest.mark.parametrize("eight", EIGHT_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "bias"), [(64, True), (70, False)])
def test_8_bit_products_equal_those_of_the_quantised_factors(
    eight: torch.dtype, dtype: torch.dtype, outputs: int, bias: bool
) -> None:
    weight, offset = torch.randn(outputs, 96).to(dtype), torch.randn(outputs).to(dtype) if bias else None
    product = CudaProduct(weight, offset, eight, batch_invariant=False)
    for rows in (1, 2, 16, 17, 33, 100):
        x = torch.randn(rows, 96).to(dtype)
        got = product(x)
        want, sizes = exact(x, weight, offset, eight)
        assert (got.dtype, got.shape) == (dtype, (rows, outputs))
        bound = torch.finfo(dtype).eps * want.abs() + 2**-21 * sizes
        assert ((got.double() - want).abs() <= bound).all(), rows


@pytest.mark.parametrize(
    ("eight", "error"),
    # Of a term, relative to the highest factors of its row and output: half a step of each of two factors. In fp8 a
    # step is at most 1/8 of the factor itself; smaller factors than 2^-6 have steps of 2^-9 of 448.
    [(torch.int8, 2 * 0.5 / 127 + (0.5 / 127) ** 2), (FP8, 2 / 16 + 1 / 256)],
)
def test_the_error_of_quantised_factors_stays_below_its_bound(eight: torch.dtype, error: float) -> None:
    weight, x = torch.randn(64, 256), torch.randn(50, 256)
    got = CudaProduct(weight, None, eight, batch_invariant=False)(x).double()
    if eight == torch.int8:
        bound = error * 256 * x.abs().amax(1).double()[:, None] * weight.abs().amax(1).double()
    else:
        tiny = 2.0**-10 / 448 * x.abs().amax(1).double()[:, None], 2.0**-10 / 448 * weight.abs().amax(1).double()
        sizes = x.double().abs() @ weight.double().abs().T
        spread = tiny[0] * weight.double().abs().sum(1) + x.double().abs().sum(1)[:, None] * tiny[1]
        bound = error * sizes + 1.1 * spread
    want = x.double() @ weight.double().T
    assert ((got - want).abs() <= bound).all()
    typical = (got - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert typical < (0.02 if eight == torch.int8 else 0.05)


@pytest.mark.parametrize("eight", EIGHT_BITS)
def test_a_row_that_is_not_finite_has_no_finite_output_and_leaves_other_rows_alone(eight: torch.dtype) -> None:
    x, weight = torch.randn(20, 32), torch.randn(48, 32)
    x[3, 5], x[7, 1] = float("nan"), float("inf")
    finite = CudaProduct(weight, None, eight, batch_invariant=False)(x).isfinite()
    assert not finite[[3, 7]].any()
    assert finite[[i for i in range(20) if i not in (3, 7)]].all()


def test_int8_products_have_the_bits_of_the_cpu() -> None:
    from kernels.linear import Linear, Precision

    weight, bias, x = torch.randn(64, 96), torch.randn(64), torch.randn(9, 96)
    on_cpu = Linear(weight, bias, precision=Precision(torch.int8))
    assert torch.equal(CudaProduct(weight, bias, torch.int8, batch_invariant=False)(x), on_cpu(x))


@pytest.mark.parametrize("eight", EIGHT_BITS)
def test_weights_whose_inputs_are_not_aligned_stay_in_their_dtype(eight: torch.dtype) -> None:
    weight, x = torch.randn(30, 24), torch.randn(5, 24)
    assert not can_quantize(eight, 24)
    assert torch.equal(CudaProduct(weight, None, eight, batch_invariant=False)(x), x @ weight.T)


def test_rows_of_zeros_have_products_of_zero() -> None:
    for eight in EIGHT_BITS:
        product = CudaProduct(torch.randn(32, 32), None, eight, batch_invariant=False)
        assert (product(torch.zeros(3, 32)) == 0).all()
        assert product(torch.empty(0, 32)).shape == (0, 32)
        assert quantize_rows(torch.zeros(2, 32), eight)[1].tolist() == [0, 0]


def test_a_scaled_product_is_probed_and_a_refusing_device_gives_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    linear_cuda._scales_rows.cache_clear()
    assert linear_cuda._scales_rows(torch.device("cpu"), torch.bfloat16)

    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("Rowwise scaling is not currently supported on your device")

    linear_cuda._scales_rows.cache_clear()
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert not linear_cuda._scales_rows(torch.device("cpu"), torch.bfloat16)
    linear_cuda._scales_rows.cache_clear()


def test_rescale_multiplies_before_it_adds_and_rounds_once() -> None:
    sums = torch.tensor([[3, 5, 99], [7, 9, 99]], dtype=torch.int32)
    got = ops_reference.rescale(
        sums, torch.tensor([2.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, -1.0]), torch.half
    )
    assert got.tolist() == [[4.0, 9.0]]
