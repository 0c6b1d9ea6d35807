"""Runs a small fixed prompt alone, through the same runner as all requests, to check that the engine still computes.

If a step raises for a request that runs alone, the cause may be the request or the engine. The canary decides: if this
harmless prompt fails as well, the engine is broken.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.sampling.text import TextStream, TokenBytes
from engine.scheduling.plan import Plan, Slice
from engine.scheduling.scheduler import Scheduler
from engine.sequence import RequestState, Sequence

CANARY_ID = "canary"
CANARY_TOKENS = 4
"""Tokens that each run samples; several, so that an intermittent fault is more likely to appear."""
TEMPERATURES = (0.0, 1.0)
"""One run for each: greedy and random sampling use different code of the sampler."""


class Canary:
    """Runs the fixed prompt, without the scheduler. Holds no block between two runs."""

    def __init__(self, scheduler: Scheduler, runner: Runner, token_bytes: TokenBytes, prompt: Seq[int]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._token_bytes = token_bytes
        self._prompt = tuple(prompt)

    def run(self) -> str | None:
        """Run the prompt; return what is wrong with the engine. None: nothing, or no block is free for the check."""
        for temperature in TEMPERATURES:
            params = SamplingParams(max_tokens=CANARY_TOKENS, temperature=temperature, seed=0, ignore_eos=True)
            request = Request(CANARY_ID, self._prompt, params)
            seq = Sequence(RequestState(request), 0, TextStream(self._token_bytes))
            try:
                wrong = self._generate(seq)
            except BaseException as error:  # noqa: BLE001 - a panic of the Rust tokenizer is no Exception
                return f"{type(error).__name__}: {error}"
            finally:
                self._scheduler.blocks.free(seq)
                self._runner.forget(seq)
            if wrong is not None:
                return wrong
        return None

    def _generate(self, seq: Sequence) -> str | None:
        """Compute the prompt, then one token per step while blocks are free; return what is wrong, or None."""
        scheduler = self._scheduler
        last = min(len(self._prompt) + CANARY_TOKENS, scheduler.config.capacity)
        while seq.num_tokens < last and scheduler.blocks.allocate(seq, seq.num_tokens):
            moves = scheduler.blocks.moves
            plan = Plan(
                (Slice(seq, seq.num_computed_tokens, seq.num_uncomputed_tokens, True),),
                swap_out=tuple(moves.out),
                copies=tuple((read, write) for write, read in moves.copies.items()),
            )
            if plan.moves:
                self._runner.move(plan)
            scheduler.moved()
            token = self._runner.launch(plan).result().token_ids[0]
            if token is None:
                return "the model returned logits that are not finite"
            seq.num_computed_tokens = seq.num_tokens
            seq.tokens.append(token)
            seq.text.push(token)
        seq.text.finish()
        return None
