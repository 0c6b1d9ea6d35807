"""Which tokenmill this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed version; `unknown` where the sources run without being installed."""
    try:
        return importlib.metadata.version("tokenmill")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
