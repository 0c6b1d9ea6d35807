"""Which of C++, Triton and torch computes a small operation."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

from kernels import ops, triton
from kernels import ops_reference as reference
from tests.pretend_gpu import pretend_gpu


@pytest.fixture(autouse=True)
def _all_enabled() -> Iterator[None]:
    triton.enable_all()
    yield
    triton.enable_all()


@pytest.fixture
def x() -> Iterator[Tensor]:
    with pretend_gpu(), mock.patch("kernels.triton._installed", return_value=True):
        yield torch.ones(2, 8, device="cuda")


def test_tensors_of_a_gpu_go_to_triton_until_the_group_is_disabled(x: Tensor) -> None:
    kernels = pytest.importorskip("kernels.triton.ops")
    assert ops._other("norm", x, weight=x[0]) is kernels
    triton.disable("norm", "wrong")
    triton.disable("norm", "later")
    assert ops._other("norm", x, weight=x[0]) is reference
    assert ops._other("gate", x) is kernels
    assert dict(triton.disabled()) == {"norm": "wrong"}


def test_what_triton_does_not_support_goes_to_the_reference(x: Tensor) -> None:
    assert ops._other("gate", x.double()) is reference
    assert ops._other("gate", x[:, :4]) is reference
    assert ops._other("norm", x, x.half(), weight=x[0]) is reference
    assert ops._other("norm", x, weight=x[:, 0]) is reference
    assert ops._other("gate", torch.ones(2, 8)) is reference


@pytest.mark.parametrize("error", [ImportError("no module named triton._C"), OSError("libcuda.so.1")])
def test_a_triton_that_does_not_load_disables_the_groups_with_the_reason(x: Tensor, error: Exception) -> None:
    with mock.patch("importlib.import_module", side_effect=error):
        assert ops._other("gate", x) is reference
    assert str(error) in triton.disabled()["gate"]
    assert str(error) in triton.disabled()["norm"]


def test_without_triton_the_reference_computes_and_nothing_is_disabled(x: Tensor) -> None:
    with mock.patch("kernels.triton._installed", return_value=False):
        assert ops._other("gate", x) is reference
    assert not triton.disabled()


def test_an_unknown_group_cannot_be_disabled() -> None:
    with pytest.raises(ValueError, match="no group of Triton kernels is named 'sort'"):
        triton.disable("sort", "it is slow")
