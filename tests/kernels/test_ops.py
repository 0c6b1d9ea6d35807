"""The fused small operations against their torch references, and their bits against the shape of the batch.

Tolerances, with u = 2^-24 for fp32 and 2^-8 for bf16: both sides round at the same places, so that an inner value that
differs in fp32's last bits can fall to either side of a rounding and move the result by one unit (2 u) for each such
rounding, relative to the result.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import native, ops
from kernels import ops_reference as reference
from kernels.attention import get_backend
from kernels.attention.base import CacheSpec
from tests.kernels.cache import Cache

pytestmark = pytest.mark.skipif(native.library() is None, reason="the compiled kernels are not there")

COLS = [1, 15, 16, 33, 576, 1000]


@pytest.fixture(params=native.DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    value: torch.dtype = request.param
    return value


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def close(got: Tensor, want: Tensor, roundings: int) -> bool:
    """Within `roundings` units of the dtype, and 2^-126: smaller numbers may become 0."""
    unit = 2.0**-23 if got.dtype == torch.float32 else 2.0**-7
    return torch.allclose(got.double(), want.double(), rtol=roundings * unit, atol=2.0**-126)


@pytest.mark.parametrize("cols", COLS)
def test_norms_equal_the_reference(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x, residual, weight = (
        draw(37, cols, dtype=dtype),
        draw(37, cols, dtype=dtype, seed=1),
        draw(cols, dtype=dtype, seed=2),
    )
    # fp32: the sum of squares may differ by cols / 16 roundings in each of two orders; the root halves that.
    roundings = 2 if dtype == torch.bfloat16 else 4 + cols // 16
    assert close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), roundings)
    want, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    got, summed = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(summed, total)
    assert close(got, want, roundings)


@pytest.mark.parametrize("cols", COLS)
def test_a_wide_weight_multiplies_before_the_rounding(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x, residual = draw(37, cols, dtype=dtype), draw(37, cols, dtype=dtype, seed=1)
    weight = draw(cols, dtype=torch.float32, seed=2)
    # As above, with one rounding the less.
    roundings = 1 if dtype == torch.bfloat16 else 4 + cols // 16
    assert close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), roundings)
    got, summed = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    want, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(summed, total)
    assert close(got, want, roundings)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert close(ops.rms_norm(x, weight, 1e-5), exact.to(dtype), roundings)


@pytest.mark.parametrize("cols", COLS)
def test_gelu_mul_equals_the_reference(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x = draw(37, 2 * cols, dtype=dtype, scale=1.5)
    # fp32: the exponent, below 34 for |x| < 6.9, is a product of sums with at most 6 roundings on either side.
    roundings = 2 if dtype == torch.bfloat16 else 4 + 6 * 34
    got = ops.gelu_mul(x)
    assert close(got, reference.gelu_mul(x), roundings)
    gate, up = x.double().chunk(2, dim=-1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    # 1 + tanh cancels where the gate is far below zero, in fp64 as well.
    assert torch.allclose(
        got.double(), exact, rtol=roundings * (2**-23 if dtype == torch.float32 else 2**-7), atol=1e-9
    )


def test_gelu_mul_of_extremes(instruction_set: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, -0.0, 30.0, -30.0, 1e4, -1e4, 3e38, -3e38, torch.inf, torch.nan]]).to(dtype)
    got = ops.gelu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    want = reference.gelu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.allclose(got, want, rtol=2.0**-6, atol=1e-30, equal_nan=True)
    assert got[0, :8].isfinite().all()


@pytest.mark.parametrize("cols", COLS)
def test_softcap_equals_the_reference(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x, cap = draw(37, cols, dtype=dtype, scale=25.0), 30.0
    x[5, cols // 2], x[6, 0], x[7, cols - 1] = torch.inf, -torch.inf, 3e38
    want = cap * torch.tanh(x.double() / cap)
    # 1 - 2 / (e^2x + 1): five roundings of numbers up to 2, and what they lose of e^2x changes it by less than one.
    bound = cap * 6 * 2.0**-23 + want.abs() * (0 if dtype == torch.float32 else 2.0**-8)
    assert ((reference.softcap(x.clone(), cap).double() - want).abs() <= bound).all()
    assert ((ops.softcap(x.clone(), cap).double() - want).abs() <= bound).all()
    assert ops.softcap(torch.full((1, 3), torch.nan, dtype=dtype), cap).isnan().all()


@pytest.mark.parametrize("cols", COLS)
def test_silu_mul_equals_the_reference(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x = draw(37, 2 * cols, dtype=dtype, scale=6.0)
    # fp32: exp(-x) = 2^(-x log2 e) loses |x| u of its argument, and |x| stays below 32 here.
    assert close(ops.silu_mul(x), reference.silu_mul(x), 2 if dtype == torch.bfloat16 else 4 + 32)


def test_silu_mul_of_extremes(instruction_set: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([[0.0, -0.0, 88.0, -88.0, 200.0, -200.0, 3e38, -3e38, torch.inf, torch.nan]]).to(dtype)
    got = ops.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    want = reference.silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert torch.allclose(got, want, rtol=2.0**-6, atol=1e-30, equal_nan=True)


@pytest.mark.usefixtures("two_threads")
def test_bits_of_a_row_depend_on_the_row_alone(instruction_set: str, dtype: torch.dtype) -> None:
    x, residual, weight = draw(70, 577, dtype=dtype), draw(70, 577, dtype=dtype, seed=1), draw(577, dtype=dtype, seed=2)
    gate_up, wide = draw(70, 2 * 577, dtype=dtype, seed=3), draw(577, dtype=torch.float32, seed=4)
    normed, summed = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for begin, end in ((0, 1), (3, 4), (5, 22), (1, 70)):
            rows = slice(begin, end)
            part, part_sum = ops.add_rms_norm(x[rows], residual[rows].clone(), weight, 1e-5)
            assert torch.equal(part, normed[rows])
            assert torch.equal(part_sum, summed[rows])
            assert torch.equal(ops.rms_norm(x[rows], weight, 1e-5), ops.rms_norm(x, weight, 1e-5)[rows])
            assert torch.equal(ops.silu_mul(gate_up[rows]), ops.silu_mul(gate_up)[rows])
            assert torch.equal(ops.gelu_mul(gate_up[rows]), ops.gelu_mul(gate_up)[rows])
            assert torch.equal(ops.rms_norm(x[rows], wide, 1e-5), ops.rms_norm(x, wide, 1e-5)[rows])
            assert torch.equal(ops.softcap(x[rows].clone(), 5.0), ops.softcap(x.clone(), 5.0)[rows])
            assert torch.equal(reference.gelu_mul(gate_up[rows]), reference.gelu_mul(gate_up)[rows])
            assert torch.equal(reference.softcap(x[rows].clone(), 5.0), reference.softcap(x.clone(), 5.0)[rows])


@pytest.mark.parametrize("cols", [1, 2, 17, 511, 513, 3000])
def test_argmax_equals_the_reference(instruction_set: str, dtype: torch.dtype, cols: int) -> None:
    x = draw(40, cols + 3, dtype=dtype).sub_(5)[:, :cols]  # rows of a wider matrix, all negative, with ties in bf16
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        x[row, (7 * row) % cols] = value
    got, finite = ops.argmax(x)
    want, want_finite = reference.argmax(x)
    assert torch.equal(finite, want_finite)
    assert finite.tolist() == [i not in (1, 2, 3) for i in range(40)]
    assert torch.equal(x.gather(1, got[:, None])[finite], x.gather(1, want[:, None])[finite])
    first = (x == x.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(got[finite], first[finite])


def test_other_tensors_go_to_the_reference() -> None:
    weight = torch.ones(64)
    wide = torch.randn(4, 128)
    assert torch.equal(ops.rms_norm(wide[:, :64], weight, 1e-5), reference.rms_norm(wide[:, :64], weight, 1e-5))
    half = torch.randn(4, 64).half()
    assert torch.equal(ops.rms_norm(half, weight.half(), 1e-5), reference.rms_norm(half, weight.half(), 1e-5))


@pytest.mark.parametrize("dim", [16, 64, 80, 256])
@pytest.mark.parametrize("parts", ["none", "rotation", "both", "wide"])
def test_write_rotated_equals_the_reference(instruction_set: str, dtype: torch.dtype, dim: int, parts: str) -> None:
    rows, heads, kv_heads = 21, 6, 2
    qkv = draw(rows + 3, heads + 2 * kv_heads, dim, dtype=dtype)
    angles = draw(rows + 3, dim // 2, dtype=torch.float32, seed=1, scale=10.0)
    weights = torch.float32 if parts == "wide" else dtype
    norms = None
    if parts in ("both", "wide"):
        norms = draw(dim, dtype=weights, seed=2), draw(dim, dtype=weights, seed=3), 1e-6
    rotation = None if parts == "none" else (angles.cos(), angles.sin())
    out = []
    for name in ("cpu", "reference"):
        spec = CacheSpec(2, kv_heads, dim, 16, dtype, torch.device("cpu"))
        cache = Cache(spec, [rows], heads, name=name)
        assert get_backend(name, spec).name == name
        batch = cache.batch([(0, 0, rows)], padding=3)
        q = cache.backend.write_rotated(1, qkv.clone(), batch, norms=norms, rotation=rotation)
        out.append((q[:rows], *cache.backend.read(1, cache.tables[0], rows)))
    # A rotated value is a difference of two products: rounding is relative to the pair, not to the value.
    # The norm before it adds what the norms above differ by.
    unit = 2.0**-23 if dtype == torch.float32 else 2.0**-7
    normed = 4 + (4 + dim // 16 if dtype == torch.float32 else 2)
    steps = {"none": 0, "rotation": 2, "both": normed, "wide": normed}[parts]
    for got, want in zip(out[0][:2], out[1][:2], strict=True):
        bound = steps * unit * want.double().abs().amax(-1, keepdim=True) * 2**0.5
        assert ((got.double() - want.double()).abs() <= bound).all()
    assert torch.equal(out[0][2], out[1][2])
