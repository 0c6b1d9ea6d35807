"""`python -m worker.ops.probe`: checks whether the worker on this machine is ready, for health checks of containers.

Reads `/readyz` on port `TOKENMILL_HTTP_PORT` of `TOKENMILL_HTTP_HOST`, or of loopback if that is unset or means all
addresses. Exit status 0: ready; 1: not ready, with the reason on stdout; 2: the variable is wrong.
"""

from __future__ import annotations

import sys

from tokenmill.probe import LOOPBACK, check, probe

__all__ = ["LOOPBACK", "main", "probe"]


def main() -> int:
    """Print the answer of `/readyz`, and return the exit status."""
    return check("TOKENMILL_HTTP_PORT", "TOKENMILL_HTTP_HOST", "/readyz")


if __name__ == "__main__":
    sys.exit(main())
