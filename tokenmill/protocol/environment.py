"""Variables of the environment that look like settings of ours and are none: misspelt ones are told, not just ignored.

for note in misspelt(os.environ, known): …   # TOKENMILL_QUEU … did you mean TOKENMILL_QUEUE?
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple

PREFIX: Final = "TOKENMILL_"

COMMANDS: Final = frozenset(PREFIX + name for name in ("REDIS", "QUEUE", "PREFIX"))
"""Settings of every command, of the clerk and of the jobs for RQ."""
CLERK: Final = frozenset(
    PREFIX + name
    for name in (
        *("CALLBACK_HOSTS", "CALLBACK_SECRET", "CALLBACK_CA_FILE", "CALLBACK_MAX_ATTEMPTS", "CALLBACK_BACKOFF_SECONDS"),
        *("CALLBACK_TIMEOUT_SECONDS", "CALLBACK_LEASE_SECONDS"),
        *("DANGEROUSLY_ALLOW_HTTP_CALLBACKS", "DANGEROUSLY_ALLOW_PRIVATE_CALLBACKS"),
    )
)
_TESTS: Final = PREFIX + "TEST_"
_SERVICE_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_|$)")
"""What Kubernetes sets for a service whose name begins with ours."""


class Misspelt(NamedTuple):
    """A variable that is no setting; its value may be a secret, and is not kept."""

    name: str
    nearest: str | None
    """The setting that was meant, most likely."""

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"warning: the variable {self.name} is no setting of tokenmill and is ignored{hint}"


def misspelt(environ: Mapping[str, str], known: Iterable[str]) -> Iterator[Misspelt]:
    """Variables with our prefix, or nearly so, that are not `known`."""
    names = sorted(known)
    short = [name.removeprefix(PREFIX) for name in names]
    for name in sorted(set(environ).difference(names)):
        if name.startswith(PREFIX):
            if (
                name.startswith(_TESTS)
                or _SERVICE_LINK.search(name)
                or (name.endswith("_PORT") and "://" in environ[name])
            ):
                continue
            near = get_close_matches(name.removeprefix(PREFIX).upper(), short, n=1)
            yield Misspelt(name, PREFIX + near[0] if near else None)
        elif name.upper().startswith("TOKEN"):  # TOKENMIL_QUEUE, TOKEN_MILL_QUEUE, tokenmill_queue
            near = get_close_matches(name.upper(), names, n=1, cutoff=0.9)
            if near:
                yield Misspelt(name, near[0])
