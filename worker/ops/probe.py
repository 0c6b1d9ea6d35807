"""`python -m worker.ops.probe`: can the worker on this machine do work now? For the health checks of containers.

Asks `/readyz` on the port of `TOKENMILL_HTTP_PORT` at `TOKENMILL_HTTP_HOST`, or at loopback where that stands for all
addresses. Exit 0: ready; 1: not, and why; 2: the variable is wrong.
Only the standard library, since it runs every few seconds; no proxy of the environment is asked.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def probe(port: int, host: str = "127.0.0.1") -> tuple[bool, str]:
    """Whether the worker behind `port` of this machine is ready, and what it says."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return answer.status == 200, answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, f"no answer on port {port}: {error}"
    finally:
        connection.close()


def main() -> int:
    """Print the answer; the exit status."""
    port = os.environ.get("TOKENMILL_HTTP_PORT", "")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        print("TOKENMILL_HTTP_PORT must be the port of a worker's --http-port", file=sys.stderr)
        return 2
    host = os.environ.get("TOKENMILL_HTTP_HOST", "").strip("[]")
    ready, said = probe(int(port), LOOPBACK.get(host, host))
    print(said)
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
