"""Tells which requests share a prefix in the prefix cache, so that they can be submitted one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

LEADING_CHARS = 256
LEADING_IDS = 64
"""Requests without a system prompt share a prefix if this many characters or token ids of their beginning are equal."""


def prefix_of(body: Mapping[str, Any]) -> int:
    """Return a 64-bit hash of the prefix that requests may share in the prefix cache; 0 if it is too short.

    The prefix is the tools and leading system messages of a chat, otherwise the first `LEADING_CHARS` characters or
    `LEADING_IDS` token ids.
    """
    messages, tools = body.get("messages"), body.get("tools")
    first = body.get("prompt")
    if isinstance(messages, list) and messages:
        head = []
        for message in messages:
            if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
                break
            head.append(message.get("content"))
        if head or tools:
            return _hash([head, tools])
        first = messages[0].get("content") if isinstance(messages[0], dict) else None
    if isinstance(first, str):
        return _hash(first[:LEADING_CHARS]) if len(first) >= LEADING_CHARS else 0
    if isinstance(first, list):
        return _hash(first[:LEADING_IDS]) if len(first) >= LEADING_IDS else 0
    return 0


def _hash(what: Any) -> int:
    try:
        data = orjson.dumps(what)
    except TypeError:  # nested too deeply; the request is refused later
        return 0
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True) or 1
