"""A model of noise over a real vocabulary: what a model with random weights does, without computing one."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.chat import Tokenizer
from engine.request import Request, SamplingParams
from engine.runner import Computed
from engine.sampling.sampler import Row, Sampled, Sampler
from engine.sampling.structured import Grammar
from engine.scheduling.plan import Plan
from engine.sequence import Sequence as Seq

_CLOSERS = b'",:]}'


@functools.cache
def _table() -> torch.Tensor:
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 2


class NoiseRunner:
    """Plays `Runner`: logits depend on seed and position alone. Short ids and what ends a string are likelier.

    Without that a text of random ids from a vocabulary of thousands would hardly ever close what it opened.
    """

    def __init__(self, tokenizer: Tokenizer, eos: frozenset[int], ending: float = 6.0) -> None:
        self.sampler = Sampler(tokenizer.size)
        self.eos = eos
        self.bias = torch.zeros(tokenizer.size)
        for i in range(tokenizer.size):
            raw = tokenizer.token_bytes(i)
            self.bias[i] = 2.0 * (len(raw) == 1) + ending * (i in eos or (len(raw) == 1 and raw in _CLOSERS))

    def move(self, plan: Plan) -> None:
        """There is nothing in the pool."""

    def launch(self, plan: Plan) -> Computed:
        if not plan.sampling:
            return Computed(Sampled((), ()))
        logits = torch.stack([self._logits(seq) for seq in plan.sampling])
        return Computed(self.sampler.sample(logits, self._rows(plan.sampling)).result())

    def forget(self, seq: Seq) -> None:
        self.sampler.forget(seq.uid)

    def _logits(self, seq: Seq) -> torch.Tensor:
        key = f"{seq.request.noise_seed}/{seq.index}/{seq.num_tokens}".encode()
        size = len(self.bias)
        at = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % (len(_table()) - size)
        return _table()[at : at + size] + self.bias

    def _rows(self, seqs: Sequence[Seq]) -> list[Row]:
        return [
            Row(
                uid=seq.uid,
                params=seq.request.params,
                noise_seed=seq.request.noise_seed,
                index=seq.index,
                num_prompt_tokens=seq.num_prompt_tokens,
                tokens=seq.tokens,
                eos_token_ids=self.eos,
                matcher=seq.matcher,
            )
            for seq in seqs
        ]


def noise_engine(tokenizer: Tokenizer, eos: frozenset[int], ending: float = 6.0, **limits: object) -> Engine:
    """An engine over noise; `limits` are fields of EngineConfig."""
    config = EngineConfig(
        **{"max_model_len": 1024, "block_size": 16, "num_blocks": 6000, "max_num_seqs": 512, **limits}  # type: ignore[arg-type]
    )
    runner = NoiseRunner(tokenizer, eos, ending)
    return Engine(config, runner, token_bytes=tokenizer.token_bytes, num_ids=tokenizer.size, eos_token_ids=eos)


def constrained(request_id: str, grammar: Grammar, max_tokens: int = 400, seed: int = 0, **params: object) -> Request:
    """A request at temperature 1 whose text must match."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=seed, **params)  # type: ignore[arg-type]
    return Request(request_id, [7, 8, 9], sampling, grammar=grammar)
