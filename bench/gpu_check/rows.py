"""The rows of the table, correctness first, with their time boxes in seconds on a GPU."""

from __future__ import annotations

from bench.gpu_check.table import Row

ROWS = (
    Row("1", "versions and compiler", 30, "versions:versions"),
    Row("2", "errors against fp64", 50, "kernels:errors"),
    Row("3", "bits of attention", 20, "kernels:bits"),
    Row("3b", "ids of transformers", 30, "parity:parity", pretends=False),
    Row("3c", "the worker's own check", 40, "engines:start"),
    Row("4", "ids of the sampler", 20, "sampling:sampler"),
    Row("5", "graphs against eager steps", 30, "engines:graphs"),
    Row("6", "overlap against none", 20, "engines:overlap"),
    Row("7", "waits of a step", 20, "engines:waits"),
    Row("8", "memory", 25, "engines:memory", proves=False),
    Row("9", "attention speed", 35, "speed:attention", proves=False),
    Row("10", "steps of 8B", 50, "steps:eight", proves=False),
    Row("12", "tokens/s of tokenmill", 45, "peer:ours", proves=False),
    Row("12", "tokens/s of generate_batch", 55, "peer:theirs", proves=False, pretends=False),
    Row("10", "steps of the demo model", 30, "steps:demo", proves=False),
    Row("10", "steps of 1B", 30, "steps:one", proves=False),
    Row("11", "compute-sanitizer", 60, "sanitizer:sanitizer"),
)
"""What proves something comes first, but for the sanitizer, which takes long; then what the claims need."""
TOTAL_SECONDS = 335
"""Seconds after which no row runs any more; the script ends at 355 whatever happens."""
