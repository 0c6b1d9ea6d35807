"""Slow imports happen only if they are needed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.models.test_gguf import convert
from tests.models.tiny import build
from tests.support import output_of

_LOAD = """
import sys
from engine.config import ModelOptions
from engine.models.loading import load_model
import engine.build, worker.service
loaded = load_model(ModelOptions(sys.argv[1], device="cpu"))
loaded.tokenizer.encode("text")
print(*(name for name in ("transformers", "torch._dynamo", "sympy") if name in sys.modules))
"""


def test_a_gguf_file_starts_without_transformers_and_without_torchs_compiler(tmp_path: Path) -> None:
    path = convert(build(tmp_path / "hf"), tmp_path / "model.gguf", "llama")
    assert output_of([sys.executable, "-c", _LOAD, path]).split() == []
