"""A model without weights whose text is wrong after any mistake in the KV pool.

Its KV entry of a token is an integer that depends on the token and its position; its logits are an exact hash of all
entries that it reads through the block table. A wrong slot, a stale block or a skipped token changes the text, and
rounding cannot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import Delta, Finished, StepOutput, TokenLogprobs
from engine.request import Request, SamplingParams
from engine.runner import sampler_row
from engine.sampling.logprobs import token_logprobs
from engine.sampling.row import Sampled
from engine.sampling.sampler import Sampler
from engine.sampling.structured import Grammar
from engine.scheduling.block_manager import Moves
from engine.scheduling.plan import Draft, Plan, Slice
from engine.sequence import Sequence

Entries = np.ndarray[tuple[int], np.dtype[np.uint64]]

VOCAB = 61
EOS = 0
OVERLAP = False
"""`EngineConfig.overlap` of an engine whose test gives `make_engine` none; the fixture `overlap` sets it."""
_ODD = np.uint64(6_364_136_223_846_793_005)
_IDS = np.arange(VOCAB, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
_POWERS = np.cumprod(np.full(1024, _ODD))


def logits_of(entries: Entries) -> torch.Tensor:
    """VOCAB logits that depend on every entry and on its place, in arithmetic modulo 2**64."""
    state = (entries * _POWERS[: len(entries)]).sum(dtype=np.uint64)
    mixed = (state ^ _IDS) * _ODD
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _ODD
    return torch.from_numpy((mixed >> np.uint64(54)).astype(np.float32) / 100)


class Misused(BaseException):
    """The engine asked for what a device cannot do. Not an `Exception`, for which the engine would blame a request."""


def require(holds: bool, message: str) -> None:
    """Raise `Misused` if the engine broke a rule of the runner."""
    if not holds:
        raise Misused(message)


class Flight:
    """A step of the stub whose ids nothing but the device's `last` knows before `result`."""

    def __init__(self, runner: StubRunner, number: int, sampled: Sampled) -> None:
        self._runner = runner
        self._number = number
        self._sampled = sampled

    def result(self) -> Sampled:
        self._runner.landed(self._number)
        return self._sampled


class StubRunner:
    """Plays `Runner` over a pool of integers that starts as garbage.

    Like a device, it knows the sampled ids as soon as a step was launched, and the engine knows them after `result`: a
    launch takes a pending id from `last`, never from `Sequence.tokens`.
    """

    def __init__(self, config: EngineConfig, garbage: int = 0) -> None:
        self.block_size = config.block_size
        noise = np.random.default_rng(garbage)
        self.pool = noise.integers(1 << 63, size=config.num_blocks * config.block_size, dtype=np.uint64)
        self.host = noise.integers(1 << 63, size=(config.host_slots, config.block_size), dtype=np.uint64)
        self.sampler = Sampler(VOCAB)
        self.raises: set[str] = set()
        """Ids of requests whose forward raises."""
        self.poisons: set[str] = set()
        """Ids of requests whose logits are NaN."""
        self.plans: list[Plan] = []
        self.events: list[str] = []
        """`launch 0`, `result 0` and so on, in order."""
        self.last: dict[int, int] = {}
        """Uid of each sequence that sampled → its last id; -1 after logits that were not finite."""
        self.most_in_flight = 2 if config.overlap else 1
        self._launched = 0
        self._in_flight: list[int] = []

    def landed(self, number: int) -> None:
        """Record that the result of a step was fetched, which must happen once and in the order of the launches."""
        require(self._in_flight[:1] == [number], "results are fetched in the order of the launches, once")
        del self._in_flight[0]
        self.events.append(f"result {number}")

    def move(self, plan: Plan) -> None:
        device, host = self.pool.reshape(-1, self.block_size), self.host
        for source, target, pairs in (
            (device, host, plan.swap_out),
            (host, device, plan.swap_in),
            (device, device, plan.copies),
        ):
            assert len({to for _, to in pairs}) == len(pairs), "one block is written twice"
            copied = [(to, source[origin].copy()) for origin, to in pairs]
            for to, entries in copied:
                target[to] = entries

    def launch(self, plan: Plan) -> Flight:
        self.plans.append(plan)
        for piece in plan.slices:
            if piece.seq.request.id in self.raises:
                raise RuntimeError("the stub was told to raise")
            end = piece.start + piece.num_tokens
            tokens = np.array(self._known(piece.seq, end)[piece.start :], dtype=np.uint64)
            positions = np.arange(piece.start, end, dtype=np.uint64)
            entries = (tokens * np.uint64(1_000_003) + positions * np.uint64(7_919) + np.uint64(12_345)) * _ODD
            self.pool[self._slots(piece.seq, end)[piece.start :]] = entries
        prompts = tuple(self._prompt_logprobs(piece) for piece in plan.slices if piece.prompt_rows)
        return self._launch(dataclasses.replace(self._sample(plan), prompt_logprobs=prompts))

    def _launch(self, sampled: Sampled) -> Flight:
        number = self._launched
        self._launched += 1
        self._in_flight.append(number)
        require(len(self._in_flight) <= self.most_in_flight, "too many steps in flight")
        self.events.append(f"launch {number}")
        return Flight(self, number, sampled)

    def _known(self, seq: Sequence, end: int) -> list[int]:
        """Return the first `end` ids of a sequence as the device knows them: the pending id comes from `last`."""
        require(seq.num_pending in (0, 1), "two ids of a sequence are pending")
        require(not seq.num_pending or seq.matcher is None, "the mask needs the id that is pending")
        require(end <= seq.num_tokens, "a token that was never sampled")
        require(not seq.num_pending or seq.uid in self.last, "a pending id that no launched step sampled")
        ids = seq.tokens[:end]
        return [*ids, max(0, self.last[seq.uid])] if end > len(ids) else ids

    def _sample(self, plan: Plan) -> Sampled:
        if not plan.sampling:
            return Sampled((), ())
        logits = torch.stack([self._logits(piece.seq) for piece in plan.slices for _ in piece.sampling])
        last = torch.tensor([self.last.get(seq.uid, -1) for seq in plan.sampling], dtype=torch.int32)
        rows = [sampler_row(seq, frozenset({EOS}), i, seq.num_pending > 0) for i, seq in enumerate(plan.sampling)]
        sampled = self.sampler.sample(logits, rows, last).result()
        for seq, token in zip(plan.sampling, sampled.token_ids, strict=True):
            self.last[seq.uid] = -1 if token is None else token
        return sampled

    def _prompt_logprobs(self, piece: Slice) -> tuple[TokenLogprobs, ...]:
        seq, rows = piece.seq, piece.prompt_rows
        entries = self.pool[self._slots(seq, rows.stop)]
        values = torch.stack([logits_of(entries[: i + 1]) for i in rows]).log_softmax(-1)
        tokens = seq.tokens[rows.start + 1 : rows.stop + 1]
        return tuple(token_logprobs(values, tokens, seq.request.params.prompt_logprobs or 0))

    def forget(self, seq: Sequence) -> None:
        self.sampler.forget(seq.uid)
        self.last.pop(seq.uid, None)

    def _slots(self, seq: Sequence, end: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the slots of the first `end` tokens of a sequence."""
        places = np.arange(end)
        return np.array(seq.block_table)[places // self.block_size] * self.block_size + places % self.block_size

    def _logits(self, seq: Sequence) -> torch.Tensor:
        if seq.request.id in self.poisons:
            return torch.full((VOCAB,), torch.nan)
        return logits_of(self.pool[self._slots(seq, seq.num_tokens)])


def token_bytes(token: int, skip_special: bool = True) -> bytes:
    """One letter an id; EOS is special."""
    return chr(ord("a") + token).encode() if token != EOS or not skip_special else b""


def decode(ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """The text of ids."""
    return b"".join(token_bytes(i, skip_special_tokens) for i in ids).decode()


def make_engine(garbage: int = 0, **limits: object) -> tuple[Engine, StubRunner]:
    """An engine over the stub; `limits` are fields of EngineConfig."""
    usual = {"max_model_len": 64, "block_size": 4, "num_blocks": 64, "overlap": OVERLAP}
    config = EngineConfig(**{**usual, **limits})  # type: ignore[arg-type]
    runner = StubRunner(config, garbage)
    return Engine(config, runner, token_bytes=token_bytes, num_ids=VOCAB, eos_token_ids=frozenset({EOS})), runner


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    priority: int = 1,
    salt: str = "",
    deadline: float | None = None,
    grammar: Grammar | None = None,
    **params: object,
) -> Request:
    """A greedy request unless `params` say otherwise."""
    sampling = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})  # type: ignore[arg-type]
    return Request(request_id, prompt, sampling, priority=priority, cache_salt=salt, deadline=deadline, grammar=grammar)


def steps(engine: Engine, limit: int = 10_000) -> Iterator[StepOutput]:
    """Step until the engine is idle; run `check_integrity` after each step."""
    for _ in range(limit):
        if not engine.has_work:
            return
        output = engine.step()
        engine.check_integrity()
        yield output
    raise AssertionError(f"the engine still had work after {limit} steps")


def expect_short_outputs(engine: Engine) -> None:
    """Make the engine expect outputs of one token, so that it admits too many requests and must preempt some."""
    for _ in range(20):
        engine.scheduler.lengths.learn(1)
    engine.scheduler.lengths.learn = lambda length: None  # type: ignore[method-assign]


def preempt(engine: Engine, request_id: str) -> None:
    """Take the blocks of all running sequences of a request now, between two steps, and make the copies."""
    engine._pipeline.settle()
    scheduler = engine.scheduler
    for seq in [seq for seq in scheduler.running if seq.request.id == request_id]:
        scheduler._preempt(seq, Draft(0, None))
    moves = scheduler.blocks.moves
    copies = tuple((read, write) for write, read in moves.copies.items())
    engine.runner.move(Plan(swap_out=tuple(moves.out), copies=copies))
    scheduler.moved()
    engine.check_integrity()


class Collector:
    """Collects the deltas of each request as a reader sees them, and checks them."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = {}
        self.finished: dict[str, Finished] = {}

    def take(self, output: StepOutput) -> None:
        for delta in output.deltas:
            assert delta.request_id not in self.finished, "a token event after the end"
            self.deltas.setdefault(delta.request_id, []).append(delta)
        for last in output.finished:
            assert last.request_id not in self.finished, "two endings"
            self.finished[last.request_id] = last
            self.check(last)

    def check(self, last: Finished) -> None:
        """Joined deltas are the final text, and carry each id once."""
        for choice in last.choices:
            mine = [d for d in self.deltas.get(last.request_id, []) if d.index == choice.index]
            assert "".join(d.text for d in mine) == choice.text
            assert tuple(i for d in mine for i in d.token_ids) == choice.token_ids
            if choice.logprobs is not None:
                assert [p.chosen.token_id for p in choice.logprobs] == list(choice.token_ids)
                assert tuple(p for d in mine for p in d.logprobs or ()) == choice.logprobs
        assert last.completion_tokens >= sum(len(c.token_ids) for c in last.choices)


def run(engine: Engine, *requests: Request, limit: int = 10_000) -> dict[str, Finished]:
    """Add the requests, step until idle, and return their final outputs; check that all blocks are free then."""
    for one in requests:
        engine.add(one)
    collector = Collector()
    for output in steps(engine, limit):
        collector.take(output)
    expect_idle(engine)
    return collector.finished


def alone(one: Request, **limits: object) -> Finished:
    """Run the same request on an idle engine of its own, with enough blocks and without overlap."""
    engine, _ = make_engine(garbage=99, **{"num_blocks": 256, "block_size": 4, "overlap": False, **limits})
    params = dataclasses.replace(one.params, seed=one.noise_seed)
    copy = Request(one.id, one.prompt, params, cache_salt=one.cache_salt, grammar=one.grammar)
    return run(engine, copy)[one.id]


def expect_idle(engine: Engine) -> None:
    """Check that all blocks are free, and that the engine holds nothing of any request."""
    engine.check_integrity()
    scheduler = engine.scheduler
    assert scheduler.blocks.device.num_free == scheduler.blocks.device.size
    assert scheduler.blocks.host.num_free == scheduler.blocks.host.size
    assert (scheduler.num_waiting, scheduler.running, scheduler.swapped) == (0, [], [])
    assert (scheduler.waiting._heap, scheduler.waiting._parked, scheduler.waiting._computing) == ([], {}, {})
    assert scheduler.children == {}
    assert scheduler.blocks.moves == Moves()
    assert (engine._live.by_id, engine._live.endings) == ({}, {})
    assert engine._live.deadlines._heap == []
    assert (engine._pipeline.flights, engine._live.has_output, engine.computing) == ((), False, frozenset())
    sampler = engine.runner.sampler  # type: ignore[attr-defined]
    assert sampler.idle
    if isinstance(engine.runner, StubRunner):
        assert (engine.runner.last, engine.runner._in_flight) == ({}, [])
