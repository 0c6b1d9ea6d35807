"""Ask an HTTP server on this machine whether it is well, for health checks of containers.

Imports only the standard library, since a check runs every few seconds; proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import os
import sys

TIMEOUT_S = 4.0
LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address that a server listens on → address at which this machine reaches it."""


def probe(port: int, host: str = "127.0.0.1", path: str = "/readyz") -> tuple[bool, str]:
    """Return whether the server at `host` and `port` answers `path` with 200, and the first KB of its answer."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status == 200, answer.read(1000).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return False, f"no answer on port {port}: {error}"
    finally:
        connection.close()


def check(port: str, host: str, path: str) -> int:
    """Probe the server that two environment variables describe, print its answer, and return the exit status.

    Args:
        port: Name of the variable with the server's port.
        host: Name of the variable with the address that the server listens on; unset means loopback.
        path: What is asked for.

    Returns:
        0: answered with 200; 1: not, with the reason on stdout; 2: the port is missing or wrong.
    """
    number = os.environ.get(port, "")
    if not number.isdecimal() or not 0 < int(number) < 65536:
        print(f"{port} must be a port: a number from 1 to 65535", file=sys.stderr)
        return 2
    address = os.environ.get(host, "").strip("[]")
    well, said = probe(int(number), LOOPBACK.get(address, address), path)
    print(said)
    return 0 if well else 1
