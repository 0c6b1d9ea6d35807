"""Fixtures shared by the kernel tests."""

from __future__ import annotations

from tests.models.conftest import one_thread, two_threads

__all__ = ["one_thread", "two_threads"]
