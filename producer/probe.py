"""`python -m producer.probe`: does an RQ worker live on this machine? For the health checks of containers.

Looks among the workers that RQ lists at `RQ_REDIS_URL` for one of this host; RQ forgets those that show no sign of
life. Exit 0: there is one; 1: there is none, or Redis cannot be asked; 2: the variable is wrong.
"""

from __future__ import annotations

import os
import socket
import sys

from redis.exceptions import RedisError
from rq.worker import Worker

from tokenmill.protocol.connection import DEFAULT_URL, command_client


def probe(url: str, hostname: str) -> bool:
    """Whether RQ lists a worker of `hostname`."""
    with command_client(url, retries=0) as client:
        return any(worker.hostname == hostname for worker in Worker.all(connection=client))


def main() -> int:
    """The exit status."""
    try:
        alive = probe(os.environ.get("RQ_REDIS_URL", DEFAULT_URL), socket.gethostname())
    except ValueError as error:
        print(f"RQ_REDIS_URL: {error}", file=sys.stderr)
        return 2
    except RedisError as error:
        print(error, file=sys.stderr)
        return 1
    print("alive" if alive else "no RQ worker of this host is known")
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
