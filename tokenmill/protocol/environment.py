"""Find environment variables that look like misspelt settings of tokenmill.

for note in misspelt(os.environ, known): …   # TOKENMILL_QUEU … did you mean TOKENMILL_QUEUE?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple

PREFIX: Final = "TOKENMILL_"

COMMANDS: Final = frozenset(PREFIX + name for name in ("REDIS", "QUEUE", "PREFIX"))
"""Settings of every command, of the clerk and of the RQ jobs."""
CLERK: Final = frozenset(
    PREFIX + name
    for name in (
        *("CALLBACK_HOSTS", "CALLBACK_SECRET", "CALLBACK_CA_FILE", "CALLBACK_MAX_ATTEMPTS", "CALLBACK_BACKOFF_SECONDS"),
        *("CALLBACK_TIMEOUT_SECONDS", "CALLBACK_LEASE_SECONDS"),
        "FILES",
        *("DANGEROUSLY_ALLOW_HTTP_CALLBACKS", "DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS"),
    )
)
GATEWAY: Final = frozenset(
    PREFIX + name
    for name in (
        *("HOST", "PORT", "API_KEYS", "NO_AUTH", "FILES", "REQUEST_TIMEOUT", "WORKER_TIMEOUT", "MAX_BODY_BYTES"),
        *("MAX_FILE_BYTES", "MAX_REQUESTS", "HEADER_TIMEOUT", "BODY_TIMEOUT", "DRAIN_SECONDS", "BATCH_QUEUE"),
        *("FILE_TTL_DAYS", "LOG_FORMAT", "LOG_LEVEL"),
    )
)
"""Settings of the gateway beside `COMMANDS`; the clerk reads some of them, too."""
KNOWN: Final = COMMANDS | CLERK | GATEWAY
"""Every setting but those of the worker, which are many."""
_TESTS: Final = PREFIX + "TEST_"
_SERVICE_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_|$)")
"""Variables that Kubernetes sets for a service whose name begins with `tokenmill`."""


class Misspelt(NamedTuple):
    """A variable that is not a setting. Its value is not kept, since it may be a secret."""

    name: str
    nearest: str | None
    """The most similar setting; None if no setting is similar."""

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"warning: the variable {self.name} is no setting of tokenmill and is ignored{hint}"


def is_service_link(name: str, value: str) -> bool:
    """Return whether a variable is the address that Kubernetes sets for a service, such as `TOKENMILL_PORT`."""
    return name.endswith("_PORT") and "://" in value


def misspelt(environ: Mapping[str, str], known: Iterable[str]) -> Iterator[Misspelt]:
    """Yield the variables whose names have the prefix `TOKENMILL_`, or nearly so, and are not in `known`."""
    names = sorted(known)
    short = [name.removeprefix(PREFIX) for name in names]
    for name in sorted(set(environ).difference(names)):
        if name.startswith(PREFIX):
            if name.startswith(_TESTS) or _SERVICE_LINK.search(name) or is_service_link(name, environ[name]):
                continue
            near = get_close_matches(name.removeprefix(PREFIX).upper(), short, n=1)
            yield Misspelt(name, PREFIX + near[0] if near else None)
        elif name.upper().startswith("TOKEN"):  # TOKENMIL_QUEUE, TOKEN_MILL_QUEUE, tokenmill_queue
            near = get_close_matches(name.upper(), names, n=1, cutoff=0.9)
            if near:
                yield Misspelt(name, near[0])
