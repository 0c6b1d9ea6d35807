"""`python -m tests.tokenmill.batch.closer URL QUEUE INPUT OUTPUT ERRORS`: closes a batch, as the clerk does."""

from __future__ import annotations

import sys

from tokenmill import Client, batch


def main(url: str, queue: str, *paths: str) -> None:
    with Client(url, queue) as client:
        report = batch.close(*paths, client=client)  # type: ignore[arg-type]
    assert report.complete, report


if __name__ == "__main__":
    main(*sys.argv[1:])
