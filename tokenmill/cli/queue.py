"""The command that shows a queue: `info`."""

from __future__ import annotations

from tokenmill.cli.console import Prefix, Queue, Url, connected
from tokenmill.client.patience import BRIEF_S
from tokenmill.protocol.connection import DEFAULT_URL
from tokenmill.queue.overview import read_overview


def info(redis: Url = DEFAULT_URL, queue: Queue = "default", prefix: Prefix = "tokenmill") -> None:
    """Show the number of jobs in each lane, and the workers of the queue."""
    with connected(redis, queue, prefix) as client:
        found = client.patiently(lambda: read_overview(client.redis, client.keys), outage_s=BRIEF_S)
        for name, depth in {**found.lanes, "delayed": found.delayed, "dead": found.dead}.items():
            print(f"{name:8}{depth}")
        if found.meta.paused:
            print(f"paused: workers read nothing; to resume: HDEL '{client.keys.meta}' paused")
        for problem in found.meta.problems:
            print(f"meta is not understood: {problem}")
        if not found.workers:
            print("no worker serves this queue")
        for worker in found.workers:
            print(f"worker {worker.name} {' '.join(f'{name}={value}' for name, value in worker.fields.items())}")
