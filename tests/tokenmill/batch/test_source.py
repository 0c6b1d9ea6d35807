"""Input files of all kinds: their lines, with numbers and positions."""

from __future__ import annotations

import gzip
import os
import threading
from pathlib import Path

import pytest

from tokenmill.batch import source as module
from tokenmill.batch.report import BatchError, BatchInvalid
from tokenmill.batch.source import Source


def lines(path: Path) -> list[tuple[int, bytes | None]]:
    with Source(path, path.parent) as source:
        found = []
        for raw in source.lines():
            assert raw.data is None or source.read(raw.offset, len(raw.data)) == raw.data
            found.append((raw.number, None if raw.data is None else raw.data.strip()))
        assert len(source.digest) == 64
        return found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n \n\t\r\n", []),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\n\nb\n\n", [(1, b"a"), (3, b"b")]),
        (b"\xef\xbb\xbfa\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbf\na\n", [(2, b"a")]),
        ("a\u2028b\u2029c\u0085d\x0be\n".encode(), [(1, "a\u2028b\u2029c\u0085d\x0be".encode())]),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_only_lf_ends_a_line(tmp_path: Path, content: bytes, expected: list[tuple[int, bytes]], zipped: bool) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert lines(path) == expected


def test_a_line_over_the_limit_is_reported_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(module, "_BLOCK", 4)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"a\n" + b"x" * 30 + b"\n" + b"b" * 9 + b"\n" + b"y" * 11)
    assert lines(path) == [(1, b"a"), (2, None), (3, b"b" * 9), (4, None)]


def test_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"a\nb\n"))
    writer.start()
    assert lines(path) == [(1, b"a"), (2, b"b")]
    writer.join()


def test_plain_and_gzip_are_the_same_input(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a", b"one\ntwo\n"), ("b", gzip.compress(b"one\ntwo\n"))):
        (tmp_path / name).write_bytes(content)
        with Source(tmp_path / name, tmp_path) as source:
            assert len(list(source.lines())) == 2
            digests.add(source.digest)
    assert len(digests) == 1


def test_an_unreadable_input_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="No such file"):
        Source(tmp_path / "none", tmp_path)
    with pytest.raises(BatchError, match="directory"):
        Source(tmp_path, tmp_path)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(os.urandom(1000))[:500])
    with pytest.raises(BatchInvalid, match=r"invalid_file: .*broken gzip"):
        Source(torn, tmp_path)
    assert os.listdir(tmp_path) == ["torn.gz"]
