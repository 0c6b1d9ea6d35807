"""`python -m producer.gateway.probe`: checks whether a gateway answers, for health checks of containers.

Reads `/healthz` on port `TOKENMILL_PORT` (8000 if unset) of `TOKENMILL_HOST`, or of loopback if that is unset or means
all addresses. Exit status 0: it answers; 1: it does not, with the reason on stdout; 2: the port is wrong.
"""

from __future__ import annotations

import os
import sys

from tokenmill.probe import check


def main() -> int:
    """Print the answer of `/healthz`, and return the exit status."""
    os.environ.setdefault("TOKENMILL_PORT", "8000")
    return check("TOKENMILL_PORT", "TOKENMILL_HOST", "/healthz")


if __name__ == "__main__":
    sys.exit(main())
