"""`python -m bench`: one command for each claim that is measured."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench import attention as attention_bench
from bench import gateway as gateway_bench
from bench import growth as growth_bench
from bench import measure, offline, queued
from bench import pressure as pressure_bench
from bench import publish as publish_bench
from bench import quality as quality_bench
from bench import scheduler as scheduler_bench
from bench import startup as startup_bench
from bench.workloads import WORKLOADS, Item
from kernels import native
from worker.cli import settings_from
from worker.loading import load
from worker.loop import EngineLike

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Measure the claims of tokenmill.")


@app.command()
def engine(
    workload: Annotated[str, typer.Option(help=" | ".join(WORKLOADS))] = "mixed",
    only: Annotated[str | None, typer.Option(help="offline | redis. Default: both in turn, and their ratio.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each kind; they alternate.")] = 1,
    readers: Annotated[bool, typer.Option(help="Read the token events of all jobs, and time them there.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests of the workload.")] = None,
    model: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "auto",
    quantize: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "none",
    kv_cache_memory: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "2GiB",
    max_model_len: Annotated[int, typer.Option(help="As for `tokenmill worker`.")] = 2048,
) -> None:
    """Run a workload by calling the engine and through Redis; greedy, EOS ignored, exact output lengths."""
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
    if only not in (None, "offline", "redis"):
        raise typer.BadParameter(f"--only is offline or redis, not {only!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the worker are stopped
    items = WORKLOADS[workload]()[:limit]
    options = {
        "model": model,
        "dtype": dtype,
        "quantize": quantize,
        "kv_cache_memory": kv_cache_memory,
        "max_model_len": str(max_model_len),
    }
    print(_machine())
    direct: list[measure.Run] = []
    through: list[measure.Run] = []
    with contextlib.ExitStack() as exits:
        built = None if only == "redis" else _engine(options)
        stack = None if only == "offline" else exits.enter_context(queued.stack(_command_line(options)))
        for number in range(rounds):
            if built is not None:
                direct.append(offline.run(built, items, f"round-{number}"))
                print(measure.line(direct[-1]), flush=True)
            if stack is not None:
                through.append(stack.run(items, f"round-{number}", readers))
                print(measure.line(through[-1]), flush=True)
    if direct and through:
        print(f"{workload}: through Redis / offline = {measure.ratio(through, direct):.3f}")


@app.command()
def scheduler() -> None:
    """Measure the CPU time of schedule + commit per step, by the number of running and waiting sequences."""
    scheduler_bench.report()


@app.command()
def pressure(
    requests: Annotated[int, typer.Option(min=4, help="Number of requests.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each setting; they alternate.")] = 1,
    model: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "auto",
) -> None:
    """Measure a workload that needs three times the KV pool: swap, recompute, a larger pool, exact predictions."""
    pressure_bench.report(model, dtype, requests, rounds)


@app.command()
def publish(
    streams: Annotated[int, typer.Option(min=1, help="Jobs running at once.")] = 256,
    rate: Annotated[float, typer.Option(min=1, help="Steps per second.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each of the two runs.")] = 10.0,
) -> None:
    """Measure the worker's CPU time per token event through a real Redis, and the delay of the engine's steps."""
    raise typer.Exit(0 if publish_bench.report(streams, rate, seconds) else 1)


@app.command()
def gateway(
    clients: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 200,
    rate: Annotated[float, typer.Option(min=1, help="Tokens per second of each stream.")] = 10.0,
    tokens: Annotated[int, typer.Option(min=2, max=200, help="Tokens of each stream.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of each kind; they alternate.")] = 3,
    burst: Annotated[bool, typer.Option(help="Begin all streams at once, not spread over time.")] = False,
) -> None:
    """Measure streams over HTTP against readers on Redis: first tokens, gaps, and the gateway's memory."""
    raise typer.Exit(0 if gateway_bench.report(clients, rate, tokens, rounds, burst) else 1)


@app.command()
def quality(
    windows: Annotated[int, typer.Option(min=1, help="Pieces of text.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each piece.")] = 512,
    model: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "smollm2-135m",
) -> None:
    """Measure the perplexity of fp32, bf16 and int8 on the same text, and how far bf16 and int8 are from fp32."""
    quality_bench.report(model, windows, length)


@app.command()
def startup(
    model: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs of each kind; they alternate.")] = 3,
) -> None:
    """Measure the CPU time of a worker until it is ready, and that of `import torch`."""
    startup_bench.report(model, rounds)


@app.command()
def growth(
    folder: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("docs/images"),
    model: Annotated[str, typer.Option(help="As for `tokenmill worker`.")] = "smollm2-135m",
) -> None:
    """Measure decode speed and step overhead by running sequences, context and waiting jobs; draw pictures."""
    growth_bench.report(model, folder)


@app.command()
def attention(
    dtype: Annotated[str, typer.Option(help="bfloat16 | float32")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="Measured runs; the median is reported.")] = 3,
    only: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    reference: Annotated[bool, typer.Option(help="Run the reference backend, too, and print the ratio.")] = True,
) -> None:
    """Measure paged attention alone, against the memory bandwidth and the peak FLOP rate of this machine."""
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if dtype not in kinds:
        raise typer.BadParameter(f"--dtype is bfloat16 or float32, not {dtype!r}")
    print(f"{_machine()}; {_instruction_set()}; {dtype}")
    print(attention_bench.HEADER)
    backends = ("cpu", "reference") if reference else ("cpu",)
    for case in attention_bench.cases():
        if only in case.name:
            found = attention_bench.measure(case, kinds[dtype], backends, rounds)
            print(attention_bench.line(found, kinds[dtype]), flush=True)


@app.command()
def triton(
    target: Annotated[list[str] | None, typer.Option(help="sm_80 | sm_90 | sm_100. Default: all.")] = None,
    part: Annotated[int, typer.Option(min=0, help="With --parts: the first variant to compile.")] = 0,
    parts: Annotated[int, typer.Option(min=1, help="Compile only every N-th variant.")] = 1,
    write: Annotated[bool, typer.Option(help="Write the table instead of comparing with it.")] = False,
) -> None:
    """Compile the Triton kernels ahead of time, and compare their resources with kernels/triton/resources.json."""
    from bench import triton_resources  # needs Triton

    if write and (target or parts > 1):
        raise typer.BadParameter("--write needs all targets and variants")
    wrong = triton_resources.report(target or list(triton_resources.CAPABILITIES), part, parts, write)
    for line in wrong:
        print(line, file=sys.stderr)
    raise typer.Exit(1 if wrong else 0)


def _engine(options: dict[str, str]) -> EngineLike:
    """Build the engine as a worker does, and run one small request."""
    built = load(settings_from(options)).engine
    offline.run(built, [Item((7,) * 20, 4)], "warm-up")
    return built


def _command_line(options: dict[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]


def _instruction_set() -> str:
    """Return the instruction set that the compiled kernels use on this CPU; `none` without compiled kernels."""
    library, names = native.library(), native.INSTRUCTION_SETS
    return names[library.tm_choose(len(names))] if library is not None else names[0]


def _machine() -> str:
    """Describe the machine and the libraries."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{cpu}, {os.cpu_count()} cores; torch {torch.__version__}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    app(prog_name="python -m bench")
