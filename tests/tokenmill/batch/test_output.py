"""The outputs record which requests are done, and belong to one input and one run at a time."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tokenmill.batch.files import read, request, write
from tokenmill.batch import output as output_module
from tokenmill.batch.index import Index
from tokenmill.batch.output import OutputFile, Outputs, check_paths
from tokenmill.batch.report import BatchError
from tokenmill.batch.response import LINE_START, Asked, refusal_line, response_line
from tokenmill.batch.source import Source
from tokenmill.batch.state import State
from tokenmill.batch.validate import Validator
from tokenmill.openai.request import COMPLETIONS
from tokenmill.protocol.keys import Keys
from tokenmill.protocol.result import Result, Status

DIGEST = "d" * 64


ROOT = Keys("q").root


def answer(custom_id: str, status_code: int = 200) -> bytes:
    asked = Asked("7f3a", custom_id, COMPLETIONS)
    if status_code == 200:
        return response_line(asked, Result("7f3a", Status.SUCCEEDED))[0]
    return refusal_line(asked, "prompt: is missing")


@contextmanager
def begun(output: Path, errors: Path | None = None, digest: str = DIGEST) -> Iterator[Outputs]:
    """Outputs as a run has them when it submits its first request."""
    with Outputs(output, errors, digest) as outputs:
        outputs.begin(ROOT)
        yield outputs


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def index_of(folder: Path, *ids: str) -> Iterator[Index]:
    path = write(folder / "in.jsonl", [request(one) for one in ids])
    with Source(path, folder) as source:
        index = Validator(source, threading.Event()).index()
        yield index
        index.close()


def test_a_line_that_a_crash_tore_is_cut_off_and_its_request_done_again(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    kept, torn = answer("a"), answer("b")
    with begun(output, errors) as outputs:
        outputs.append([kept, torn], [answer("c", 400)])
    whole = output.read_bytes()
    for cut in range(1, len(torn) + 1):
        output.write_bytes(whole[:-cut])
        with Outputs(output, errors, DIGEST) as outputs, index_of(tmp_path, "a", "b", "c", "d") as index:
            outputs.recover(index)
            outputs.begin(ROOT)
            assert (outputs.succeeded, outputs.failed) == (1, 1)
            assert [line.custom_id for line in index.plan()] == ["b", "d"]
        assert output.read_bytes() == kept


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for kept in (b"", answer("a")):
        path.write_bytes(kept + answer("b" * 200_000)[:-1])
        file = OutputFile(path)
        file.check_torn()
        file.begin()
        file.close()
        assert path.read_bytes() == kept


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    with begun(output, errors):
        with pytest.raises(BatchError, match="out: another run writes to it"):
            Outputs(output, None, DIGEST)
        with pytest.raises(BatchError, match="err: another run writes to it"):
            Outputs(tmp_path / "other", errors, DIGEST)
    with begun(output, errors):
        pass


def test_of_two_runs_that_begin_at_once_the_second_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    with Outputs(output, errors, DIGEST) as late:
        with begun(output, errors) as first:
            first.append([answer("a")], [])
        before = contents(tmp_path)
        with pytest.raises(BatchError, match="out: another run writes to it"):
            late.begin(ROOT)
    assert contents(tmp_path) == before


def test_ids_are_the_same_in_every_run_over_the_same_files_and_unique_otherwise(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as first:
        ids = {first.state.job_id(number) for number in range(100)}
    with begun(tmp_path / "out") as again:
        assert {again.state.job_id(number) for number in range(100)} == ids
        again.next_generation()
        assert ids.isdisjoint(again.state.job_id(number) for number in range(100))
        moved = {again.state.job_id(number) for number in range(100)}
    with Outputs(tmp_path / "out", None, DIGEST) as after:
        assert {after.state.job_id(number) for number in range(100)} == moved
    with Outputs(tmp_path / "other", None, DIGEST) as other:
        assert ids.isdisjoint(other.state.job_id(number) for number in range(100))


def test_outputs_belong_to_one_input(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as outputs:
        outputs.append([answer("a")], [])
    with pytest.raises(BatchError, match="another input, or the input was changed"):
        Outputs(tmp_path / "out", None, "e" * 64)
    with pytest.raises(BatchError, match="begun with the error file None, not err"):
        Outputs(tmp_path / "out", tmp_path / "err", DIGEST)
    (tmp_path / "foreign").write_bytes(answer("a"))
    with pytest.raises(BatchError, match="no output of a batch run"):
        Outputs(tmp_path / "foreign", None, DIGEST)
    assert (tmp_path / "foreign").read_bytes() == answer("a")


def test_outputs_without_a_line_belong_to_the_input_whose_requests_may_be_in_flight(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as outputs:
        state = (tmp_path / "out.state").read_bytes()
    with pytest.raises(BatchError, match="another input, or the input was changed"):
        Outputs(tmp_path / "out", None, "e" * 64)
    assert (tmp_path / "out.state").read_bytes() == state
    with begun(tmp_path / "out") as outputs:
        outputs.next_generation()  # as a cancel does
    with begun(tmp_path / "out", digest="e" * 64) as outputs:
        assert outputs.state.digest == "e" * 64


def test_a_batch_whose_output_file_was_removed_starts_from_scratch(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as outputs:
        outputs.append([answer("a")], [])
        salt = outputs.state.salt
    (tmp_path / "out").unlink()
    with Outputs(tmp_path / "out", tmp_path / "err", "e" * 64) as outputs:
        assert outputs.state.salt != salt
        assert (outputs.state.digest, outputs.state.errors) == ("e" * 64, "err")


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with begun(tmp_path / "a" / "out", tmp_path / "a" / "err") as outputs:
        outputs.append([answer("a")], [])
    (tmp_path / "a").rename(tmp_path / "b")
    with Outputs(tmp_path / "b" / "out", tmp_path / "b" / "err", DIGEST) as outputs:
        assert outputs.state.errors == "err"


def test_an_output_with_lines_of_another_input_is_reported(tmp_path: Path) -> None:
    with begun(tmp_path / "out") as outputs, index_of(tmp_path, "a") as index:
        outputs.append([answer("a"), answer("a")], [])
        with pytest.raises(BatchError, match="'a' is there twice or not in the input"):
            outputs.recover(index)
    os.truncate(tmp_path / "out", 0)
    with begun(tmp_path / "out") as outputs:
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
    with begun(tmp_path / "out") as outputs:
        line = {"custom_id": odd, "response": {"status_code": 200}}
        outputs.append([json.dumps(line, ensure_ascii=False).encode() + b"\n"] * 2, [])
    assert [line["custom_id"] for line in read(tmp_path / "out")] == [odd, odd]


def test_without_an_error_file_all_lines_go_to_the_output(tmp_path: Path) -> None:
    for errors in (None, tmp_path / "out"):
        output = tmp_path / "out"
        with begun(output, errors) as outputs:
            outputs.append([answer("a")], [answer("b", 400)])
            outputs.sync()
        assert [line["custom_id"] for line in read(output)] == ["a", "b"]
        output.unlink()


def test_a_broken_state_file_is_reported_and_a_half_written_one_never_seen(tmp_path: Path) -> None:
    (tmp_path / "out.state").write_text("{")
    with pytest.raises(BatchError, match=r"out\.state: is not the state of a batch run"):
        Outputs(tmp_path / "out", None, DIGEST)
    (tmp_path / "out.state").write_text(json.dumps({"digest": DIGEST, "salt": "", "errors": None, "format": 2}))
    with pytest.raises(BatchError, match="another version"):
        Outputs(tmp_path / "out", None, DIGEST)
    (tmp_path / "out.state").unlink()
    with begun(tmp_path / "out"):
        assert sorted(os.listdir(tmp_path)) == ["out", "out.state"]


def test_a_full_disk_is_reported_and_the_next_run_finds_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with begun(tmp_path / "out") as outputs:
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


PRECIOUS = [b'{"precious":1}', b'{"a":1}\n{"precious":1}', b"\x00\x01binary", b'{"custom_id":"a"}', answer("a")[:-1]]
"""Contents of files that are not a run's; none of the last lines is whole."""


@pytest.mark.parametrize("precious", PRECIOUS)
@pytest.mark.parametrize("place", ["output", "errors"])
def test_a_file_that_is_not_the_runs_keeps_every_byte(tmp_path: Path, place: str, precious: bytes) -> None:
    output, errors = tmp_path / "out", tmp_path / "err"
    (output if place == "output" else errors).write_bytes(precious)
    before = contents(tmp_path)
    with pytest.raises(BatchError, match="is no output of a batch run"):
        Outputs(output, errors, DIGEST)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("precious", PRECIOUS[:-1])
@pytest.mark.parametrize("place", ["out", "err"])
def test_a_file_that_took_the_place_of_an_output_keeps_every_byte(tmp_path: Path, place: str, precious: bytes) -> None:
    with begun(tmp_path / "out", tmp_path / "err"):
        pass
    (tmp_path / place).write_bytes(precious)
    with index_of(tmp_path, "a", "b") as index, Outputs(tmp_path / "out", tmp_path / "err", DIGEST) as outputs:
        before = contents(tmp_path)
        with pytest.raises(BatchError, match=f"{place}: .*no line of a batch's output"):
            outputs.recover(index)
    assert contents(tmp_path) == before


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path: Path) -> None:
    kept = answer("a")
    for torn in (b"\0" * 5000, answer("b")[:9] + b"\0" * 5000):
        with begun(tmp_path / "out"):
            (tmp_path / "out").write_bytes(kept + torn)
        with Outputs(tmp_path / "out", None, DIGEST) as outputs, index_of(tmp_path, "a", "b") as index:
            outputs.recover(index)
            outputs.begin(ROOT)
        assert (tmp_path / "out").read_bytes() == kept


def test_nothing_is_left_of_a_run_whose_state_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(note: Path, state: State) -> None:
        raise BatchError(f"{note}: No space left on device")

    monkeypatch.setattr(output_module, "save", full)
    with Outputs(tmp_path / "out", tmp_path / "err", DIGEST) as outputs, pytest.raises(BatchError, match="No space"):
        outputs.begin(ROOT)
    assert list(tmp_path.iterdir()) == []


def test_every_output_line_begins_with_the_mark_of_lines_that_may_be_cut_off() -> None:
    for line in (answer("a"), answer("b", 400)):
        assert line.startswith(LINE_START)


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="No such file"):
        check_paths(tmp_path / "in", tmp_path / "none" / "out", None)


@pytest.mark.parametrize("name", [".", "..", "/dev/null", "/dev/full", "pipe", "/dev/none", "/proc/self/fd/1", "sock"])
@pytest.mark.parametrize("place", ["output", "errors"])
def test_an_output_that_is_not_a_regular_file_is_refused_before_any_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        paths = {"output": Path("out"), "errors": Path("err"), place: Path(name)}
        with pytest.raises(BatchError, match=r"regular file"):
            check_paths(Path("in"), **paths)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "sock"]
    assert not Path("/dev/null.state").exists()


def test_standard_output_is_refused_as_an_output_wherever_it_leads(tmp_path: Path) -> None:
    code = "import pathlib, tokenmill.batch.output as o; o.check_paths(*map(pathlib.Path, ('in', '/dev/stdout')), None)"
    with (tmp_path / "to").open("wb") as to:
        done = subprocess.run([sys.executable, "-c", code], stdout=to, stderr=subprocess.PIPE, check=False)
    assert b"BatchError: /dev/stdout: is not the name of a regular file" in done.stderr


PAIRS = [("source", "out"), ("source", "err"), ("source", "note"), ("err", "note")]


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [(*pair, link) for pair in PAIRS for link in (None, os.link, os.symlink)]
    + [("out", "note", os.link), ("out", "note", os.symlink)],
)
def test_the_files_of_a_run_must_be_different_files(
    tmp_path: Path, one: str, other: str, link: Callable[[Path, Path], None] | None
) -> None:
    """Two paths may lead to one file by the same name, a hard link or a symbolic link."""
    paths = {name: tmp_path / name for name in ("source", "out", "err")} | {"note": tmp_path / "out.state"}
    paths[other].write_bytes(b"precious")
    if link is None:
        paths[one] = paths[other]
    else:
        link(paths[other], paths[one])
    before = contents(tmp_path)
    with pytest.raises(BatchError, match=r"is the input|is where the state|the input is where"):
        check_paths(paths["source"], paths["out"], paths["err"])
    assert contents(tmp_path) == before


def test_a_plan_may_be_left_in_the_middle(tmp_path: Path) -> None:
    with index_of(tmp_path, "a", "b") as index:
        plan = index.plan()
        assert isinstance(plan, Generator)
        next(plan)
    plan.close()
