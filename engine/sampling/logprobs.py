"""Log-probabilities of ids, and the most likely ids, from rows of log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.outputs import Logprob, TokenLogprobs


def token_logprobs(values: Tensor, tokens: Seq[int], top: int) -> list[TokenLogprobs]:
    """Return, for each row of `values`, the log-probability of its token and the `top` highest ones.

    Args:
        values: log-probabilities, `[R, ids]`.
        tokens: R ids.
        top: number of most likely ids; equal log-probabilities are ordered by id.
    """
    chosen = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None]).squeeze(-1).tolist()
    ranked = _ranked(values, top) if top else [()] * len(tokens)
    return [TokenLogprobs(Logprob(token, mine), best) for token, mine, best in zip(tokens, chosen, ranked, strict=True)]


def _ranked(values: Tensor, top: int) -> list[tuple[Logprob, ...]]:
    """Return the `top` highest entries of each row, resolving the ties that `topk` leaves at its end."""
    top = min(top, values.shape[-1])
    best, ids = values.topk(top, dim=-1)
    ties = ((values >= best[:, -1:]).sum(-1) > top).tolist()
    rows = list(zip(best.tolist(), ids.tolist(), strict=True))
    for i, tied in enumerate(ties):
        if tied:
            candidates = (values[i] >= best[i, -1]).nonzero().squeeze(-1)
            rows[i] = values[i, candidates].tolist(), candidates.tolist()
    return [
        tuple(
            Logprob(token, p) for p, token in sorted(zip(*row, strict=True), key=lambda pair: (-pair[0], pair[1]))[:top]
        )
        for row in rows
    ]
