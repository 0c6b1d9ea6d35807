"""Stand-ins for packages that the engine imports and that a bare machine lacks, so that it runs there all the same."""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_PACKAGES: dict[str, tuple[str, ...]] = {
    "structlog": ("structlog", "structlog.contextvars"),
    "llguidance": ("llguidance", "llguidance.numpy"),
    "orjson": ("orjson",),
    "gguf": ("gguf", "gguf.constants"),
}
"""Package → its modules that the engine imports. No check uses grammars; GGUF files are read only where gguf is."""


class _Absent(ModuleType):
    """A module of a package that is not installed: its names can be imported, and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Logger:
    """As structlog's logger: an event and its fields; warnings and errors are printed."""

    def __getattr__(self, level: str) -> Any:
        log = getattr(logging.getLogger("engine"), "error" if level == "exception" else level)

        def write(event: str, *_: Any, **fields: Any) -> None:
            fields.pop("exc_info", None)
            log("%s %s", event, " ".join(f"{key}={value}" for key, value in fields.items()))

        return write

    def bind(self, **_: Any) -> _Logger:
        return self


def absent(package: str) -> bool:
    """Return whether a package is not installed; one with a stand-in is not."""
    found = sys.modules.get(package)
    return isinstance(found, _Absent) or (found is None and importlib.util.find_spec(package) is None)


def stand_in() -> list[str]:
    """Put stand-ins for the packages that are missing into `sys.modules`; return the names of the packages."""
    missing = [name for name in _PACKAGES if absent(name)]
    for package in missing:
        for name in _PACKAGES[package]:
            module = _Absent(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__path__ = []
            sys.modules[name] = module
    if "structlog" in missing:
        sys.modules["structlog"].get_logger = lambda *_, **__: _Logger()  # type: ignore[attr-defined]
    return missing


def quiet() -> None:
    """Log errors only, so that the output is the table."""
    logging.basicConfig(level=logging.ERROR)
    import structlog

    if not isinstance(structlog, _Absent):
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
