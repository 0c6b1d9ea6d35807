"""The file of API keys: what is read, what is refused, and when a changed file takes effect."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from producer.gateway.keys import Caller, KeyRing, KeysError


def hashed(key: str | bytes) -> str:
    return hashlib.sha256(key if isinstance(key, bytes) else key.encode()).hexdigest()


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def ring(folder: Path, text: str | bytes) -> KeyRing:
    return KeyRing(written(folder, text))


def look(keys: KeyRing) -> list[str]:
    """Let the ring look twice, as in two seconds; return the events of the log."""
    with capture_logs() as logs:
        keys.look()
        keys.look()
    return [entry["event"] for entry in logs]


def test_a_key_is_found_with_its_tenant_limits_and_priority(tmp_path: Path) -> None:
    lines = [
        "# keys of the gateway",
        "",
        f"{hashed('one')} acme",
        f"  {hashed('two').upper()}\tteam-2  tpm=7 priority=low rpm=60  # a comment\r",
        f"{hashed('three')} acme priority=high",
    ]
    keys = ring(tmp_path, "\ufeff" + "\n".join(lines))
    assert len(keys) == 3
    assert keys.find(b"one") == Caller("acme", key=hashed("one")[:16])
    assert keys.find(b"two") == Caller("team-2", "low", 60, 7, hashed("two")[:16])
    assert keys.find(b"three") == Caller("acme", "high", None, None, hashed("three")[:16])
    assert keys.find(b"four") is None


@pytest.mark.parametrize("key", ["ключ-🔑".encode(), b"\xff\xfe\x00", b"a b", b" ", b"x" * 60_000])
def test_a_key_may_have_any_bytes(tmp_path: Path, key: bytes) -> None:
    keys = ring(tmp_path, f"{hashed(key)} t\n")
    assert keys.find(key) is not None
    assert keys.find(key + b"x") is None
    assert keys.find(b"") is None


SECRET = "sk-this-is-a-secret"
GOOD = f"{hashed('good')} t"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (SECRET, "first word"),
        (f"{SECRET} {SECRET}", "first word"),
        (f"{hashed('a')[:-1]} {SECRET}", "first word"),
        (f"{hashed('a')}0 {SECRET}", "first word"),
        (hashed("a"), "second word"),
        (f"{hashed('a')} ten/ant:{SECRET}", "second word"),
        (f"{hashed('a')} {'t' * 129}", "second word"),
        (f"{hashed('a')} tenant-é", "second word"),
        (f"{hashed('a')} t {SECRET}", "option"),
        (f"{hashed('a')} t {SECRET}=5", "option"),
        (f"{hashed('a')} t rpm={SECRET}", "rpm"),
        (f"{hashed('a')} t rpm=0", "rpm"),
        (f"{hashed('a')} t rpm=-1", "rpm"),
        (f"{hashed('a')} t tpm=1.5", "tpm"),
        (f"{hashed('a')} t tpm=10000000000000000", "tpm"),
        (f"{hashed('a')} t rpm=1 rpm=2", "twice"),
        (f"{hashed('a')} t priority={SECRET}", "priority"),
        (f"{hashed('a')} t priority", "priority"),
        (f"{hashed('a')} t RPM=1", "option"),
        (hashed("good").upper() + " other", "same hash"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_and_never_quoted(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(KeysError) as error:
        ring(tmp_path, f"# comment\n{GOOD}\n{line}\n")
    assert "line 3" in str(error.value)
    assert reason in str(error.value)
    assert SECRET not in str(error.value)
    assert hashed("a")[:20] not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"# nothing\n\n", b"\xff\xfe\x00", b"\x00" * 100, GOOD.encode("utf-16")])
def test_a_file_without_keys_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(KeysError):
        ring(tmp_path, data)


def test_a_path_that_is_no_readable_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe", "."):
        with pytest.raises(KeysError):
            KeyRing(tmp_path / name)


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producer.gateway.keys.MAX_BYTES", 100)
    with pytest.raises(KeysError, match="larger"):
        ring(tmp_path, GOOD + "\n" + "#" * 100)


def test_every_key_is_compared_in_constant_time_and_with_equal_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ring(tmp_path, "".join(f"{hashed(str(number))} t\n" for number in range(50)))
    compared: list[tuple[int, int]] = []
    plain = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return plain(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (b"0", b"49", b"unknown", b"", b"x" * 100_000):
        compared.clear()
        keys.find(key)
        assert compared == [(32, 32)] * 50


def test_a_file_of_a_mebibyte_is_read(tmp_path: Path) -> None:
    count = (1 << 20) // 80
    text = "".join(f"{hashed(str(number))} tenant-{number % 999} rpm=5\n" for number in range(count))
    keys = ring(tmp_path, text)
    assert len(keys) == count
    assert keys.find(str(count - 1).encode()) is not None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"{hashed('old')} t\n")
    assert look(keys) == []
    written(tmp_path, f"{hashed('new')} t\n")
    assert look(keys) == ["api_keys_read"]
    assert keys.find(b"old") is None
    assert keys.find(b"new") is not None
    assert look(keys) == []


def test_a_file_replaced_by_a_rename_is_read_again(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"{hashed('old')} t\n")
    other = tmp_path / "other"
    other.write_text(f"{hashed('new')} t\n")
    os.utime(other, ns=(0, keys.path.stat().st_mtime_ns))
    other.rename(keys.path)
    assert look(keys) == ["api_keys_read"]
    assert keys.find(b"new") is not None


def test_a_file_that_is_being_written_is_read_when_it_is_complete(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"{hashed('a')} t\n{hashed('b')} t\n")
    with keys.path.open("w") as file:
        file.write(f"{hashed('b')} t\n")
        file.flush()
        keys.look()
        assert keys.find(b"a") is not None
        file.write(f"{hashed('a')} t rpm=1\n")
        file.flush()
        keys.look()
        assert keys.find(b"a") == Caller("t", key=hashed("a")[:16])
    keys.look()
    assert keys.find(b"a") == Caller("t", rpm=1, key=hashed("a")[:16])


def test_a_wrong_new_file_is_logged_once_and_the_old_keys_stay(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"{hashed('old')} t\n")
    written(tmp_path, f"{hashed('new')} t\n{SECRET}\n")
    with capture_logs() as logs:
        for _ in range(5):
            keys.look()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("api_keys_refused", "error")]
    assert "line 2" in logs[0]["message"]
    assert SECRET not in str(logs)
    assert keys.find(b"old") is not None
    assert keys.find(b"new") is None
    written(tmp_path, f"{hashed('new')} t\n")
    assert look(keys) == ["api_keys_read"]


def test_the_keys_stay_while_the_file_is_missing(tmp_path: Path) -> None:
    keys = ring(tmp_path, f"{hashed('old')} t\n")
    keys.path.unlink()
    assert look(keys) == ["api_keys_refused"]
    assert look(keys) == []
    assert keys.find(b"old") is not None
    written(tmp_path, f"{hashed('new')} t\n")
    assert look(keys) == ["api_keys_read"]
