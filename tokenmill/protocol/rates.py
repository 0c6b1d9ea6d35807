"""The calls of the script that limits the requests and tokens a minute of one caller, without I/O.

All gateways of a queue share the counts, which are in Redis and by Redis' clock.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from tokenmill.protocol.calls import Call
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.lua import encode

MAX_TOKENS: Final = 10**12
"""A larger charge is counted as this number: Lua's numbers are exact below 2 ** 53."""


class Charged(NamedTuple):
    """The charge was accepted."""

    slot: int
    """The moment of the charge, in quarters of a second of Redis' clock."""


class Wait(NamedTuple):
    """The charge was refused, and nothing was counted."""

    seconds: float
    """Time after which the same charge fits if nothing else is charged."""
    limit: Literal["rpm", "tpm"]


def charge_call(keys: Keys, key: str, requests: int, tokens: int, rpm: int | None, tpm: int | None) -> Call:
    """Make the call that charges requests and tokens to the caller `key`; `charge_reply` reads its reply.

    Args:
        rpm, tpm: most requests and tokens within a minute; None: no such limit. A charge of more than `tpm` tokens fits
            if no other token was charged within the last minute.
    """
    request = encode(requests=requests, tokens=min(tokens, MAX_TOKENS), rpm=rpm, tpm=tpm)
    return Call("rate", [keys.rate(key)], [request])


def charge_reply(reply: Any) -> Charged | Wait:
    """Read the reply of `charge_call`."""
    if reply[0] == b"OK":
        return Charged(int(reply[1]))
    return Wait(int(reply[1]) / 1000, "rpm" if reply[2] == b"rpm" else "tpm")


def give_back_call(keys: Keys, key: str, slot: int, tokens: int) -> Call:
    """Make the call that takes tokens out of a charge of the last minute; of an older charge nothing is left."""
    return Call("rate", [keys.rate(key)], [encode(slot=slot, give_back=min(tokens, MAX_TOKENS))])
