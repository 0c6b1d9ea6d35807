"""Callers of the gateway, and the API keys that name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """The sender of a request, as its API key says."""

    tenant: str | None
    """None: the gateway has no keys."""
    priority: str = "normal"
    """The highest lane that the caller may use, and the default."""
    rpm: int | None = None
    """Requests a minute; None: any number."""
    tpm: int | None = None
    """Tokens a minute; None: any number."""
    key: str = ""
    """First 16 hex digits of the key's SHA-256, for logs and the rates in Redis."""
