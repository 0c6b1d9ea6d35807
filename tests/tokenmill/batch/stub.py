"""`python -m tests.tokenmill.batch.stub URL QUEUE`: a worker without an engine that answers as fast as Redis lets it.

The answer is the first eight characters of the last message or of the prompt. It holds no leases; SIGTERM ends it.
"""

from __future__ import annotations

import signal
import sys
import threading

import orjson

from tokenmill.protocol.connection import command_client
from tokenmill.protocol.job import Identity, identify
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.replies import Ref, StartStatus
from tokenmill.protocol.result import Choice, Result, Status, Usage
from tokenmill.protocol.scripts import EndOptions, Scripts

COUNT = 256


def answer(body: bytes) -> str:
    asked = orjson.loads(body)
    text = asked["messages"][-1]["content"] if "messages" in asked else asked["prompt"]
    return str(text)[:8]


def main(url: str, queue: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    client = command_client(url)
    scripts = Scripts(client, Keys(queue), "stub")
    scripts.ensure_groups()
    while not stop.is_set():
        deliveries = scripts.read(COUNT) or ()
        if not deliveries:
            stop.wait(0.002)
            continue
        jobs = [(Ref(d.lane, d.entry, d.fields[b"id"].decode()), identify(d.fields), d.fields) for d in deliveries]
        started = scripts.start_all(
            [(ref, identity, {"prompt_tokens": 3}) for ref, identity, _ in jobs if identity is not None]
        )
        ends: list[tuple[Ref, Identity, Result, EndOptions]] = []
        for (ref, identity, fields), start in zip(jobs, started, strict=True):
            if identity is not None and start.status is StartStatus.OK:
                choices = (Choice(0, answer(fields[b"body"]), "stop"),)
                result = Result(identity.id, Status.SUCCEEDED, "stub", 1, "stub", choices, Usage(3, 2, 0))
                ends.append((ref, identity, result, {"fence": start.fence}))
        scripts.end_all(ends)


if __name__ == "__main__":
    main(*sys.argv[1:])
