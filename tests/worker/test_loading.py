"""What a worker reports about its model, in its log and to `tokenmill info`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.models.tiny import build
from tests.support import eventually
from tests.worker.harness import Inside, Queue
from worker.cli import settings_from
from worker.loading import Loaded, load
from worker.ops.exits import Exit


def loaded(path: Path, **options: Any) -> tuple[Loaded, list[Any]]:
    settings = settings_from({"model": str(path), "device": "cpu", "dtype": "float32", "max_num_seqs": 4, **options})
    with structlog.testing.capture_logs() as logs:
        return load(settings), list(logs)


def events(logs: list[Any], name: str) -> list[Any]:
    return [entry for entry in logs if entry["event"] == name]


def test_a_fused_model_is_reported_as_such_without_a_reason(tmp_path: Path) -> None:
    found, logs = loaded(build(tmp_path))
    assert found.facts["backend"] == "fused"
    assert "backend_reason" not in found.facts
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


def test_an_unknown_key_of_a_config_is_named_in_a_warning_and_by_info(tmp_path: Path) -> None:
    build(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "logit_scale": 0.5}))
    found, logs = loaded(tmp_path)
    assert found.facts["backend"] == "transformers"
    assert found.facts["backend_reason"] == "config key logit_scale = 0.5"
    (warning,) = events(logs, "fused_decoder_not_used")
    assert (warning["log_level"], warning["reason"]) == ("warning", "config key logit_scale = 0.5")


def test_the_transformers_backend_when_it_was_chosen_is_no_warning(tmp_path: Path) -> None:
    found, logs = loaded(build(tmp_path), backend="transformers")
    assert found.facts["backend_reason"] == "--backend transformers"
    assert not events(logs, "fused_decoder_not_used")


def test_memory_is_reported_in_parts_and_bounded_by_what_the_sequences_can_fill(tmp_path: Path) -> None:
    found, _ = loaded(build(tmp_path))
    facts: dict[str, Any] = dict(found.facts)
    assert facts["kv_cache_mib"] <= 1  # 4 sequences of 256 tokens with the keys and values of 3 tiny layers
    assert 0 < facts["memory_mib"] <= facts["memory_full_mib"] <= facts["memory_mib"] + 3


def test_a_pool_and_host_tier_larger_than_the_available_memory_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    monkeypatch.setattr("engine.build.available_bytes", lambda: 3 << 20)
    _, logs = loaded(tmp_path, kv_cache_memory="1MiB", swap_space="1MiB")
    assert not events(logs, "memory_is_short")
    _, logs = loaded(tmp_path, kv_cache_memory="1MiB", swap_space="4MiB")
    (warning,) = events(logs, "memory_is_short")
    assert (warning["needed_mib"], warning["available_mib"]) == (4, 3)
    _, logs = loaded(tmp_path, kv_cache_memory="1MiB", swap_space="4MiB", swap_file=str(tmp_path / "swap"))
    assert not events(logs, "memory_is_short"), "a file is no memory"


def test_the_workers_key_shows_facts_of_the_model(queue: Queue) -> None:
    worker = Inside(queue)
    load_plain = worker.worker._loader
    facts = {"backend": "transformers", "backend_reason": "model type 'olmo3'", "memory_full_mib": 5}
    worker.worker._loader = lambda settings: Loaded(
        *(getattr(load_plain(settings), name) for name in ("engine", "model", "translator")), facts
    )
    worker.start()
    key = queue.keys.worker(worker.worker.name)
    told: Any = eventually(lambda: queue.client.hgetall(key))
    assert {name: told[name.encode()].decode() for name in facts} == {name: str(value) for name, value in facts.items()}
    assert worker.stop() is Exit.OK
