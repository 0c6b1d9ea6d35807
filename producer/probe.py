"""`python -m producer.probe`: checks whether an RQ worker is alive on this host. For health checks of containers.

It looks for a worker of this host in RQ's list at `RQ_REDIS_URL`; RQ removes workers without a heartbeat. Exit status
0: a worker is alive; 1: none is, or Redis cannot be reached; 2: the variable is wrong.
"""

from __future__ import annotations

import os
import socket
import sys

from redis.exceptions import RedisError
from rq.worker import Worker

from tokenmill.protocol.connection import DEFAULT_URL, command_client


def probe(url: str, hostname: str) -> bool:
    """Return whether RQ lists a worker of `hostname`."""
    with command_client(url, retries=0) as client:
        return any(worker.hostname == hostname for worker in Worker.all(connection=client))


def main() -> int:
    """Print the state of this host's RQ worker; return the exit status."""
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
