"""The outputs say what is done, and belong to one input and one run at a time."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from producer.batch.index import Index
from producer.batch.output import OutputFile, Outputs
from producer.batch.report import BatchError
from producer.batch.source import Source
from producer.batch.validate import Validator
from tests.producer.batch.files import read, request, write

DIGEST = "d" * 64


def answer(custom_id: str, status_code: int = 200) -> bytes:
    return (
        json.dumps({"custom_id": custom_id, "response": {"status_code": status_code}, "error": None}).encode() + b"\n"
    )


@contextmanager
def index_of(folder: Path, *ids: str) -> Iterator[Index]:
    path = write(folder / "in.jsonl", [request(one) for one in ids])
    with Source(path, folder) as source:
        index = Validator(source, threading.Event()).index()
        yield index
        index.close()


def test_what_a_crash_tore_is_cut_off_and_done_again(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    with Outputs(output, errors, DIGEST) as outputs:
        outputs.append([answer("a"), answer("b")], [answer("c", 400)])
    whole = output.read_bytes()
    for cut in range(1, len(answer("b")) + 1):
        output.write_bytes(whole[:-cut])
        with Outputs(output, errors, DIGEST) as outputs, index_of(tmp_path, "a", "b", "c", "d") as index:
            outputs.recover(index)
            assert (outputs.succeeded, outputs.failed) == (1, 1)
            assert [line.custom_id for line in index.plan()] == ["b", "d"]
        assert output.read_bytes() == answer("a")


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for kept in (b"", answer("a")):
        path.write_bytes(kept + b"x" * 200_000)
        OutputFile(path).close()
        assert path.read_bytes() == kept


def test_two_runs_cannot_have_one_file(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    with Outputs(output, errors, DIGEST):
        with pytest.raises(BatchError, match="out: another run writes to it"):
            Outputs(output, None, DIGEST)
        with pytest.raises(BatchError, match="err: another run writes to it"):
            Outputs(tmp_path / "other", errors, DIGEST)
    Outputs(output, errors, DIGEST).__exit__(None, None, None)


def test_ids_are_the_same_at_every_run_over_the_same_files_and_unlike_any_others(tmp_path: Path) -> None:
    with Outputs(tmp_path / "out", None, DIGEST) as first:
        ids = {first.state.job_id(number) for number in range(100)}
    with Outputs(tmp_path / "out", None, DIGEST) as again:
        assert {again.state.job_id(number) for number in range(100)} == ids
        again.next_generation()
        assert ids.isdisjoint(again.state.job_id(number) for number in range(100))
        moved = {again.state.job_id(number) for number in range(100)}
    with Outputs(tmp_path / "out", None, DIGEST) as after:
        assert {after.state.job_id(number) for number in range(100)} == moved
    with Outputs(tmp_path / "other", None, DIGEST) as other:
        assert ids.isdisjoint(other.state.job_id(number) for number in range(100))


def test_outputs_belong_to_one_input(tmp_path: Path) -> None:
    with Outputs(tmp_path / "out", None, DIGEST) as outputs:
        outputs.append([answer("a")], [])
    with pytest.raises(BatchError, match="another input, or this one was changed"):
        Outputs(tmp_path / "out", None, "e" * 64)
    with pytest.raises(BatchError, match="begun with the error file None, not err"):
        Outputs(tmp_path / "out", tmp_path / "err", DIGEST)
    (tmp_path / "foreign").write_bytes(answer("a"))
    with pytest.raises(BatchError, match="no output of a batch run"):
        Outputs(tmp_path / "foreign", None, DIGEST)
    assert (tmp_path / "foreign").read_bytes() == answer("a")


def test_the_error_file_cannot_be_the_note(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="name another error file"):
        Outputs(tmp_path / "out", tmp_path / "out.state", DIGEST)
    assert not (tmp_path / "out.state").exists()


def test_who_removes_the_outputs_begins_anew(tmp_path: Path) -> None:
    with Outputs(tmp_path / "out", None, DIGEST) as outputs:
        outputs.append([answer("a")], [])
        salt = outputs.state.salt
    (tmp_path / "out").unlink()
    with Outputs(tmp_path / "out", tmp_path / "err", "e" * 64) as outputs:
        assert outputs.state.salt != salt
        assert (outputs.state.digest, outputs.state.errors) == ("e" * 64, "err")


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Outputs(tmp_path / "a" / "out", tmp_path / "a" / "err", DIGEST) as outputs:
        outputs.append([answer("a")], [])
    (tmp_path / "a").rename(tmp_path / "b")
    with Outputs(tmp_path / "b" / "out", tmp_path / "b" / "err", DIGEST) as outputs:
        assert outputs.state.errors == "err"


def test_lines_of_another_file_are_told(tmp_path: Path) -> None:
    with Outputs(tmp_path / "out", None, DIGEST) as outputs, index_of(tmp_path, "a") as index:
        outputs.append([answer("a"), answer("a")], [])
        with pytest.raises(BatchError, match="'a' is twice there or not in the input"):
            outputs.recover(index)
    with (tmp_path / "out").open("ab") as file:
        file.write(b"nonsense\n")
    with Outputs(tmp_path / "out", None, DIGEST) as outputs, index_of(tmp_path, "a") as index:
        outputs._output._file.truncate(0)
        outputs.append([answer("a")], [])
    with (tmp_path / "out").open("ab") as file:
        file.write(b'{"custom_id":"b","response":5}\n')
    with (
        Outputs(tmp_path / "out", None, DIGEST) as outputs,
        index_of(tmp_path, "a") as index,
        pytest.raises(BatchError, match="line 2 is no line of a batch's output"),
    ):
        outputs.recover(index)


def test_no_separator_of_unicode_splits_a_line(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d"
    with Outputs(tmp_path / "out", None, DIGEST) as outputs:
        line = {"custom_id": odd, "response": {"status_code": 200}}
        outputs.append([json.dumps(line, ensure_ascii=False).encode() + b"\n"] * 2, [])
    assert [line["custom_id"] for line in read(tmp_path / "out")] == [odd, odd]


def test_without_an_error_file_all_lines_go_to_the_output(tmp_path: Path) -> None:
    for errors in (None, tmp_path / "out"):
        output = tmp_path / "out"
        with Outputs(output, errors, DIGEST) as outputs:
            outputs.append([answer("a")], [answer("b", 400)])
            outputs.sync()
        assert [line["custom_id"] for line in read(output)] == ["a", "b"]
        output.unlink()


def test_a_broken_note_is_told_and_a_half_written_one_never_seen(tmp_path: Path) -> None:
    (tmp_path / "out.state").write_text("{")
    with pytest.raises(BatchError, match=r"out\.state: not readable"):
        Outputs(tmp_path / "out", None, DIGEST)
    (tmp_path / "out.state").write_text(json.dumps({"digest": DIGEST, "salt": "", "errors": None, "format": 2}))
    with pytest.raises(BatchError, match="another version"):
        Outputs(tmp_path / "out", None, DIGEST)
    (tmp_path / "out.state").unlink()
    (tmp_path / "out.state.new").write_text("{")
    Outputs(tmp_path / "out", None, DIGEST).__exit__(None, None, None)
    assert sorted(os.listdir(tmp_path)) == ["out", "out.state"]


def test_a_full_disk_is_told_and_the_next_run_finds_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Outputs(tmp_path / "out", None, DIGEST) as outputs:
        outputs.append([answer("a")], [])
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(answer("a")) + 10, hard))
        try:
            with pytest.raises(BatchError, match="File too large"):
                outputs.append([answer("b")], [])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Outputs(tmp_path / "out", None, DIGEST) as outputs, index_of(tmp_path, "a", "b") as index:
        outputs.recover(index)
        assert [line.custom_id for line in index.plan()] == ["b"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="No such file"):
        Outputs(tmp_path / "none" / "out", None, DIGEST)


@pytest.mark.parametrize("name", [".", "..", "/dev/null", "/dev/full"])
def test_what_is_no_regular_file_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BatchError, match=r"directory|no regular file"):
        Outputs(Path(name), None, DIGEST)
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null.state").exists()


def test_a_plan_may_be_left_in_the_middle(tmp_path: Path) -> None:
    with index_of(tmp_path, "a", "b") as index:
        plan = index.plan()
        assert isinstance(plan, Generator)
        next(plan)
    plan.close()
