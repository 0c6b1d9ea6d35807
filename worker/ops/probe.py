"""`python -m worker.ops.probe`: checks whether the worker on this machine is ready, for health checks of containers.

Reads `/readyz` on port `TOKENMILL_HTTP_PORT` of `TOKENMILL_HTTP_HOST`, or of loopback if that is unset or means all
addresses. Exit status 0: ready; 1: not ready, with the reason on stdout; 2: the variable is wrong.
Imports only the standard library, since it runs every few seconds; proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def probe(port: int, host: str = "127.0.0.1") -> tuple[bool, str]:
    """Return whether the worker at `host` and `port` is ready, and its answer."""
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
    """Print the answer, and return the exit status."""
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
