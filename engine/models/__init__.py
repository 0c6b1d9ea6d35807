"""Configs, weights and decoders.

Importing this package first settles that our `kernels` is not the hub project's package of that import name, which
transformers uses where it finds it: transformers goes by the version of whatever distribution brings the name.
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
    """Ask transformers whether the hub's `kernels` is installed while ours can't be seen; it keeps the answer."""
    ours = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's own mark for "there is no such module"
    try:
        ask = getattr(import_utils, "is_kernels_available", None)
        if ask is not None:
            ask()
    finally:
        del sys.modules["kernels"]
        if ours is not None:
            sys.modules["kernels"] = ours


class _AskFirst(MetaPathFinder):
    """Has `_disown_kernels` run as soon as transformers is imported, by whomever; many workers never need it."""

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
