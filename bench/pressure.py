"""Measures throughput with a KV pool of a third of what the workload needs: swap, recompute, exact predictions."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass

from engine.build import CacheOptions, build_engine
from engine.config import EngineConfig, ModelOptions
from engine.engine import Engine
from engine.request import Request, SamplingParams
from engine.runner import Computed, Runner
from engine.scheduling.plan import Plan
from engine.scheduling.policy import Ints, OutputLengths


class Oracle(OutputLengths):
    """Predicts the exact length of each output, which is its limit here."""

    def remaining(self, done: Ints, limits: Ints) -> Ints:
        return limits - done


class Script:
    """Ends each output of a runner at the length in the workload, with an end-of-text id."""

    def __init__(self, runner: Runner, eos: int) -> None:
        self._launch = runner.launch
        self._eos = eos
        self.ends: dict[str, int] = {}
        runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Plan) -> Computed:
        sampled = self._launch(plan).result()
        ids = tuple(
            self._eos if seq.num_output_tokens + 1 >= self.ends[seq.request.id] else self._eos + 1 + number % 1000
            for number, seq in enumerate(plan.sampling)
        )
        return Computed(dataclasses.replace(sampled, token_ids=ids))


@dataclass(frozen=True)
class Setting:
    """One configuration that runs the workload."""

    name: str
    share: float | None
    """Size of the pool as a share of what all requests together need; None: room for all of them at their limits."""
    swap_bytes: int = 0
    oracle: bool = False


SETTINGS = (
    Setting("unlimited pool", None),
    Setting("oracle", 1 / 3, swap_bytes=4 << 30, oracle=True),
    Setting("swap", 1 / 3, swap_bytes=4 << 30),
    Setting("recompute", 1 / 3),
)


def workload(count: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Return (prompt ids, output length) of each request; lengths vary widely, so that predictions matter."""
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(1000, 40_000) for _ in range(draw.randint(16, 128))],
            min(256, 8 + int(draw.expovariate(1 / 64))),
        )
        for _ in range(count)
    ]


def run(engine: Engine, script: Script, work: list[tuple[list[int], int]], salt: str, oracle: bool) -> float:
    """Return the seconds to serve all requests; `max_tokens` is 256, or with the oracle the output length."""
    for number, (prompt, output) in enumerate(work):
        limit = output if oracle else 256
        engine.add(Request(str(number), prompt, SamplingParams(limit, temperature=0.0), cache_salt=salt))
        script.ends[str(number)] = output
    begin = time.monotonic()
    while engine.has_work:
        engine.step()
    return time.monotonic() - begin


def report(model: str, dtype: str, count: int, rounds: int) -> None:
    """Print medians over alternating rounds, and their share of the median with the oracle."""
    work = workload(count)
    size = 16
    wanted = sum(-(-(len(prompt) + output) // size) for prompt, output in work)
    tokens = sum(output for _, output in work)
    engines: dict[Setting, tuple[Engine, Script]] = {}
    for setting in SETTINGS:
        config = EngineConfig(max_num_seqs=count, block_size=size)
        blocks = count * 25 if setting.share is None else max(24, int(wanted * setting.share))
        cache = CacheOptions(num_blocks=blocks, swap_bytes=setting.swap_bytes)
        options = ModelOptions(model, dtype=dtype, max_model_len=2048)  # type: ignore[arg-type]  # `load_model` checks it
        engine, loaded = build_engine(options, config, cache)
        script = Script(engine.runner, min(loaded.generation.eos_token_ids))
        engines[setting] = engine, script
        if setting.oracle:
            engine.scheduler.lengths = Oracle()
        run(engine, script, work[:2], "warm-up", setting.oracle)
    rates: dict[Setting, list[float]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds):
        for setting, (engine, script) in engines.items():
            before = engine.stats()
            seconds = run(engine, script, work, f"round-{number}", setting.oracle)
            after = engine.stats()
            rates[setting].append(tokens / seconds)
            print(
                f"{setting.name:<15} {after.total_blocks:5} blocks  {seconds:6.1f} s  "
                f"{tokens / seconds:6.1f} out tok/s  "
                f"{after.steps - before.steps} steps, "
                f"{after.preemptions_swap - before.preemptions_swap} swapped, "
                f"{after.preemptions_recompute - before.preemptions_recompute} recomputed",
                flush=True,
            )
    oracle = statistics.median(next(values for setting, values in rates.items() if setting.oracle))
    for setting, values in rates.items():
        print(f"{setting.name:<15} {statistics.median(values) / oracle:.3f} of the oracle's throughput")
