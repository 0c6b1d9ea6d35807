"""Steps without requests: the largest step, whose memory on a GPU is measured, and steps that compile kernels."""

from __future__ import annotations

import dataclasses

from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.runner import Runner
from engine.sampling.text import TextStream, TokenBytes
from engine.scheduling.plan import Plan, Slice
from engine.sequence import RequestState, Sequence

_PARAMS = SamplingParams(
    max_tokens=1,
    temperature=1.0,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 0.1),),
    seed=0,
    ignore_eos=True,
    logprobs=20,
)
"""Every option for which the sampler takes memory, except prompt logprobs: their rows would reserve gigabytes for an
option that few requests have, and a step that runs out of memory is repeated with fewer tokens."""


def largest_step(config: EngineConfig, kv_tokens: int, token_bytes: TokenBytes) -> Plan:
    """Return a step of `max_num_batched_tokens` rows in which `max_num_seqs` sequences sample.

    The first sequences are prefilled, the other ones decode. One sequence has the maximum length, so that a long
    context is split; the others share the remaining tokens that the KV pool can hold. All blocks are block 0.

    Args:
        config: its block size and `max_model_len` are final.
        kv_tokens: maximum number of tokens in the KV pool.
        token_bytes: maps an id to its bytes.
    """
    rows = config.max_num_batched_tokens
    count = min(config.max_num_seqs, rows)
    longest = max(1, min(config.max_model_len, kv_tokens))
    share = max(1, min(longest, (kv_tokens - longest) // max(1, count - 1)))
    pieces = []
    for index in range(count):
        taken = min(longest, rows - (count - index - 1))
        rows -= taken
        pieces.append(piece(longest if index == 0 else max(taken, share), taken, config.block_size, token_bytes))
    return Plan(tuple(pieces))


def run(runner: Runner, plan: Plan) -> None:
    """Run a plan, and discard the runner's state of its sequences."""
    try:
        runner.launch(plan).result()
    finally:
        for seq in plan.sampling:
            runner.forget(seq)


def run_largest(runner: Runner, config: EngineConfig, kv_tokens: int, token_bytes: TokenBytes) -> None:
    """Run the largest step, and the largest step of decodes alone; arguments as in `largest_step`."""
    few = dataclasses.replace(config, max_num_batched_tokens=min(config.max_num_seqs, config.max_num_batched_tokens))
    for limits in (config, few):
        run(runner, largest_step(limits, kv_tokens, token_bytes))


def warm_up(
    runner: Runner, config: EngineConfig, kv_tokens: int, token_bytes: TokenBytes, experts: bool = False
) -> None:
    """Run the largest steps and small ones with each kind of sampling, so that no kernel is compiled while jobs run.

    Args:
        runner, config, kv_tokens, token_bytes: as in `run_largest`.
        experts: whether the model has experts. The tiles of their products follow the number of rows: each step with
            half the rows of the step before runs as well.
    """
    run_largest(runner, config, kv_tokens, token_bytes)
    tokens = config.max_num_batched_tokens // 2 if experts else 0
    while tokens:
        run(runner, largest_step(dataclasses.replace(config, max_num_batched_tokens=tokens), kv_tokens, token_bytes))
        tokens //= 2
    plain = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
    drawn = dataclasses.replace(plain, temperature=1.0)
    informed = dataclasses.replace(plain, logprobs=0, prompt_logprobs=0)
    rows = min(5, config.max_num_batched_tokens, config.capacity)
    for params, count in ((plain, rows), (plain, 1), (drawn, 1), (informed, rows)):
        run(runner, Plan((piece(rows, count, config.block_size, token_bytes, params),)))


def piece(length: int, rows: int, block_size: int, token_bytes: TokenBytes, params: SamplingParams = _PARAMS) -> Slice:
    """Return the last `rows` tokens of a sequence of `length` tokens, which samples. All its blocks are block 0."""
    seq = Sequence(RequestState(Request("profile", (0,), params)), 0, TextStream(token_bytes))
    seq.tokens = [0] * length
    seq.num_prompt_tokens = length
    seq.num_computed_tokens = length - rows
    seq.block_table = [0] * -(-length // block_size)
    return Slice(seq, length - rows, rows, True)
