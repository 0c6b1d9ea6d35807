"""`python -m tests.chaos --seed 1 --minutes 5`: a long run; ends with 1 and the seed when a promise is broken."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.chaos.run import chaos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--overlap", choices=("on", "off", "mixed"), default="mixed")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        chaos(Path(folder), given.seed, given.workers, given.overlap) as run,
    ):
        run.run(given.minutes * 60)
        print(f"seed {given.seed}: {len(run.tasks)} jobs, {len(run.children)} workers, {dict(run.events)}: all kept")


if __name__ == "__main__":
    main()
