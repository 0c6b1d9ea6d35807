"""The version of tokenmill."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the installed version; `unknown` if tokenmill runs without being installed."""
    try:
        return importlib.metadata.version("tokenmill")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
