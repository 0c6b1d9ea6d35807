"""Linear layers whose rows don't depend on the batch: oneDNN with prepacked weights on the CPU, `F.linear` elsewhere.

A prepacked oneDNN product gives a row the same bits for every number of rows from 2 on (measured in fp32 and bf16);
rows are padded to buckets, since oneDNN builds one primitive for each row count that it meets.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

_FALLBACK_ROWS = 16
"""`F.linear` on the CPU is another kernel for few rows."""


def bucket(rows: int) -> int:
    """The row count that `rows` is padded to: 2, 4, 8, 16, then multiples of 16."""
    if rows <= 16:
        return max(2, 1 << (rows - 1).bit_length()) if rows > 1 else 2
    return -(-rows // 16) * 16


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """`x` (`[n, ...]`) with zero rows appended up to `rows`."""
    if x.shape[0] == rows:
        return x
    out = x.new_zeros((rows, *x.shape[1:]))
    out[: x.shape[0]] = x
    return out


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether torch's private oneDNN operators exist here and compute right in `dtype`."""
    weight = torch.arange(32 * 16, dtype=torch.float32).view(32, 16).remainder(7).sub(3).to(dtype)
    x = torch.arange(4 * 16, dtype=torch.float32).view(4, 16).remainder(5).sub(2).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        out = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.allclose(out.float(), x.float() @ weight.float().t())


class Linear:
    """`y = x @ weight.T + bias`, for `x` of shape `[rows, in]`. Keeps a packed copy of the weight only.

    Args:
        weight: `[out, in]`.
        bias: `[out]` or None.
    """

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_prepack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.linear(x, self._weight, self._bias)
        rows = x.shape[0]
        x = pad_rows(x, bucket(rows) if self._packed else max(rows, _FALLBACK_ROWS))
        out: Tensor
        if self._packed:
            out = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            out = F.linear(x, self._weight, self._bias)
        return out[:rows]

    @property
    def invariant(self) -> bool:
        """Whether a row's bits are the same for every row count, checked by running it."""
        x = torch.randn(64, self.in_features, generator=torch.Generator().manual_seed(0)).to(self._weight.dtype)
        whole = self(x)
        return all(torch.equal(self(x[:rows]), whole[:rows]) for rows in (1, 2, 3, 7, 16, 33))
