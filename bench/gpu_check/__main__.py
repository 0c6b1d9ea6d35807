"""The command: `python -m bench.gpu_check`, which `bench/gpu_check.sh` runs with a hard time limit."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.gpu_check.bare import quiet, stand_in
from bench.gpu_check.claims import claims
from bench.gpu_check.rows import ROWS, TOTAL_SECONDS
from bench.gpu_check.table import Setup, Table

_REDUCED_FACTOR = 8
"""How much longer a row may take where kernels are interpreted."""


def main(arguments: list[str]) -> int:
    """Run the rows; return 1 if one that proves something failed, else 0."""
    options = _options(arguments)
    missing = stand_in()
    quiet()
    importlib.import_module("engine.build")  # once, for the processes of all rows
    found = "" if options.cpu else _gpu()
    reduced = not found
    rows = [row for row in ROWS if not options.rows or row.number in options.rows]
    print(f"GPU: {found or 'none: kernels are interpreted, the GPU is pretended, times mean nothing'}")
    if missing:
        print(f"not installed, and not needed here: {', '.join(missing)}")
    print(f"{'row':>3} {'what':<44}{'result':<8}{'time':>8}  detail", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        factor = _REDUCED_FACTOR if reduced else 1
        table = Table(Setup(reduced=reduced, folder=Path(folder)), options.seconds * factor)
        for row in rows:
            table.run(dataclasses.replace(row, seconds=row.seconds * factor))
        for row, line in () if reduced else claims(table):
            table.add(row, 0.0, line)
    failed = table.failed
    if options.json is not None:
        about = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "gpu": found, "reduced": reduced}
        table.write(options.json, {**about, "failed": failed})
    print(f"{len(table.lines)} lines, {len(failed)} failed{': ' * bool(failed)}{', '.join(failed)}")
    return 1 if failed else 0


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu_check.sh",
        description="Checks tokenmill on this machine's GPU, and measures it. Exit status 1 if a check fails.",
    )
    parser.add_argument("--cpu", action="store_true", help="the reduced form, on the CPU: tiny sizes, no real times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON, too")
    parser.add_argument(
        "--rows", type=lambda text: text.split(","), default=[], metavar="1,3,10", help="only these rows"
    )
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="after this time no row runs any more (%(default)s)"
    )
    return parser.parse_args(arguments)


def _gpu() -> str:
    """Return the name of the GPU, empty if there is none. A process of its own looks: one that has used CUDA can no
    longer fork the processes of the rows."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    return found.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
