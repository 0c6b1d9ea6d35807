"""Row 12: output tokens a second beside `generate_batch` of transformers, on the same shapes, prompts and lengths."""

from __future__ import annotations

import gc
import importlib.util
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu_check import models
from bench.gpu_check.models import SHAPES, Shape
from bench.gpu_check.table import Line, Setup, Skip, check

_LONGEST, _SHORTEST = 512, 64
_CHOICES: dict[str, dict[str, Any]] = {
    "its defaults": {},
    "graphs and two batches in flight": {"use_cuda_graph": True, "use_async_batching": True},
}
"""Configurations of `generate_batch`; the fastest counts."""


def ours(setup: Setup) -> Iterator[Line]:
    """Yield the rate of tokenmill on each shape."""
    yield from _each(setup, _tokenmill)


def theirs(setup: Setup) -> Iterator[Line]:
    """Yield the rate of `generate_batch` on each shape."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    yield from _each(setup, _generate_batch)


def _each(setup: Setup, rate: Callable[[Setup, Shape, list[list[int]], int], Line]) -> Iterator[Line]:
    for name in setup.pick(("1B", "8B"), ("tiny",)):
        shape = SHAPES[name]
        what = f"{name} {rate.__name__.lstrip('_')}"
        yield check(what, partial(rate, setup, shape, _prompts(setup, shape), setup.pick(128, 3)))
        gc.collect()
        if not setup.reduced:
            torch.cuda.empty_cache()


def _prompts(setup: Setup, shape: Shape) -> list[list[int]]:
    """Return different prompts, of lengths that are spread evenly."""
    count = setup.pick(128, 2)
    longest, shortest = setup.pick((_LONGEST, _SHORTEST), (8, 4))
    made = models.prompts(count, longest, shape.vocab)
    return [ids[: shortest + (longest - shortest) * i // count] for i, ids in enumerate(made)]


def _line(what: str, prompts: list[list[int]], count: int, seconds: float, how: str) -> Line:
    rate = count * len(prompts) / seconds
    lengths = f"{len(prompts)} prompts of {len(prompts[0])} to {len(prompts[-1])} tokens, {count} tokens each"
    return Line(what, f"{rate:.0f} output tok/s ({lengths}; {how})", "", {f"rate {what}": rate})


def _tokenmill(setup: Setup, shape: Shape, prompts: list[list[int]], count: int) -> Line:
    engine, _ = models.build(setup, models.Random(shape.name), attention="triton", pool=None, max_num_seqs=len(prompts))
    for name, tokens in (("warm", 4), ("timed", count)):
        requests = [models.greedy(f"{name}{i}", prompt, tokens) for i, prompt in enumerate(prompts)]
        torch.cuda.synchronize()
        ids, seconds = models.run(engine, requests)
    if any(len(choice) != count for (choice,) in ids.values()):
        raise ValueError("a text is shorter than asked for")
    return _line(f"{shape.name} tokenmill", prompts, count, seconds, "its defaults")


def _generate_batch(setup: Setup, shape: Shape, prompts: list[list[int]], count: int) -> Line:
    """Measure `generate_batch` in each configuration that runs here."""
    model = stock_llama(shape, setup.pick(setup.device, "cpu"), setup.pick(torch.bfloat16, torch.float32))
    found: dict[str, float] = {}
    said: list[str] = []
    for how, options in _CHOICES.items():
        try:
            found[how] = _generated(setup, model, prompts, count, options)
            said.append(f"{how} {count * len(prompts) / found[how]:.0f}")
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, MemoryError) as error:
            said.append(f"{how}: {type(error).__name__}: {error}"[:120])
        gc.collect()
    if not found:
        raise Skip("; ".join(said))
    return _line(f"{shape.name} generate_batch", prompts, count, min(found.values()), "; ".join(said))


def stock_llama(shape: Shape, device: str, dtype: torch.dtype) -> Any:
    """Return transformers' Llama of a shape, with random weights made on the device."""
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        max_position_embeddings=models.MAX_MODEL_LEN,
        tie_word_embeddings=shape.tied,
    )
    # Of itself it takes flash-attn where that is installed. It would also take it from the package `kernels`, which
    # downloads; the prefix keeps it from that.
    config._attn_implementation = "sdpa" if importlib.util.find_spec("flash_attn") else "paged|sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return library.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _generated(setup: Setup, model: Any, prompts: list[list[int]], count: int, options: dict[str, Any]) -> float:
    """Return the seconds of `generate_batch`, after a first call that captures graphs and fills caches.

    Raises:
        RuntimeError: a text is missing, or shorter than asked for.
    """
    import transformers.generation

    library: Any = transformers.generation
    if setup.reduced:
        options = {**options, "num_blocks": 16, "max_batch_tokens": 64}
    generation = library.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = library.ContinuousBatchingConfig(allow_block_sharing=False, **options)
    try:
        for _ in range(2):
            begun = time.perf_counter()
            results = model.generate_batch(
                prompts,
                generation_config=generation,
                continuous_batching_config=batching,
                progress_bar=False,
                persistent_manager=True,
            )
            seconds = time.perf_counter() - begun
    finally:
        model.destroy_cached_continuous_batching_manager()
    lengths = {len(result.generated_tokens) for result in results.values()}
    if len(results) != len(prompts) or lengths != {count}:
        raise RuntimeError(f"{len(results)} texts of {sorted(lengths)} tokens")
    return seconds
