"""Configs, weights, decoders and tokenizers.

transformers uses a package of the Hugging Face hub project named `kernels` if it is installed, and takes our `kernels`
for it. Importing this package makes sure that it does not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_ASKED = "transformers.utils.import_utils"


def _disown_kernels(import_utils: ModuleType) -> None:
    """Let transformers look for the hub's `kernels` while ours is hidden; it caches the answer."""
    ours = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # for Python, None means that there is no such module
    try:
        ask = getattr(import_utils, "is_kernels_available", None)
        if ask is not None:
            ask()
    finally:
        del sys.modules["kernels"]
        if ours is not None:
            sys.modules["kernels"] = ours


class _AskFirst(MetaPathFinder):
    """Runs `_disown_kernels` when transformers is imported; many workers never import it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ASKED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _disown_kernels(module)

            loader.exec_module = exec_module
        return spec


if (found := sys.modules.get(_ASKED)) is not None:
    _disown_kernels(found)
else:
    sys.meta_path.insert(0, _AskFirst())
