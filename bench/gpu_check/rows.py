"""The rows of the table, correctness first, with their time boxes in seconds on a GPU."""

from __future__ import annotations

from bench.gpu_check.table import Row

ROWS = (
    Row("1", "versions and compiler", 60, "versions:versions"),
    Row("2", "errors against fp64", 30, "kernels:errors"),
    Row("3", "bits of attention", 20, "kernels:bits"),
    Row("3b", "ids of transformers", 30, "parity:parity", pretends=False),
    Row("9", "attention speed", 35, "speed:attention", proves=False),
    Row("10", "steps of the demo model", 35, "steps:demo", proves=False),
    Row("10", "steps of 1B", 35, "steps:one", proves=False),
    Row("10", "steps of 8B", 50, "steps:eight", proves=False),
    Row("12", "tokens/s of tokenmill", 40, "peer:ours", proves=False),
    Row("12", "tokens/s of generate_batch", 50, "peer:theirs", proves=False, pretends=False),
)
TOTAL_SECONDS = 335
"""Seconds after which no row runs any more; the script ends at 355 whatever happens."""
