"""The storage in a folder: whole objects or none, names that cannot leave it, locks, what killed processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producer.files.folder import Folder
from producer.files.storage import BATCH, FILE, Storage, is_id, new_id
from tests.support import eventually
from tokenmill import durable

WICKED = ["", ".", "..", "../../etc/passwd", "file-", "file-../../x", f"{FILE}{'g' * 32}", f"{FILE}{'0' * 32}/..", "\0"]


@pytest.fixture
def storage(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "files")


def put(storage: Storage, tenant: str | None, content: bytes = b"x", **record: object) -> str:
    file_id = new_id(FILE)
    with storage.files(tenant).draft() as draft:
        draft.file.write(content)
        draft.commit(file_id, {"n": 1, **record})
    return file_id


def test_an_object_is_on_the_bucket_with_its_content_and_record(storage: Folder) -> None:
    file_id = put(storage, "t", b"abc", name="ü")
    bucket = storage.files("t")
    assert bucket.ids() == [file_id]
    assert bucket.load(file_id) == {"n": 1, "name": "ü"}
    with bucket.open(file_id) as file:
        assert file.read() == b"abc"


def test_a_draft_that_is_not_committed_leaves_nothing(storage: Folder) -> None:
    bucket = storage.files("t")
    with bucket.draft() as draft:
        draft.file.write(b"half")
    assert bucket.ids() == []
    assert os.listdir(storage.root / "tenant-t" / "files") == []


def test_an_object_is_not_on_the_bucket_before_it_is_whole(storage: Folder) -> None:
    with storage.files("t").draft() as draft:
        draft.file.write(b"half")
        assert storage.files("t").ids() == []


@pytest.mark.parametrize("tenant", [".", "..", "open", "a.b", "tenant-x", "A" * 128])
def test_the_folder_of_any_tenant_is_its_own_and_inside_the_root(storage: Folder, tenant: str) -> None:
    file_id = put(storage, tenant)
    others = [put(storage, None), put(storage, "other")]
    assert storage.files(tenant).ids() == [file_id]
    found = list(storage.root.parent.rglob(file_id))
    assert len(found) == 1
    assert storage.root in found[0].resolve().parents
    assert {tenant, None, "other"} == {*storage.tenants()}
    assert all(storage.files(tenant).load(other) is None for other in others)


@pytest.mark.parametrize("wicked", WICKED)
def test_a_malformed_id_is_unknown_and_touches_no_path(storage: Folder, wicked: str) -> None:
    put(storage, "t")
    bucket = storage.files("t")
    assert not is_id(wicked, FILE)
    assert bucket.load(wicked) is None
    assert bucket.noted(wicked, "cancel") is None
    assert not bucket.delete(wicked)
    for refused in (
        lambda: bucket.open(wicked),
        lambda: bucket.save(wicked, {}),
        lambda: bucket.workspace(wicked),
        lambda: bucket.content(wicked),
        lambda: bucket.note(wicked, "cancel", {}),
        lambda: bucket.lock(wicked).__enter__(),
    ):
        with pytest.raises(KeyError):
            refused()


def test_the_id_of_a_file_is_not_an_id_of_a_batch() -> None:
    assert is_id(new_id(FILE), FILE)
    assert is_id(new_id(BATCH), BATCH)
    assert not is_id(new_id(FILE), BATCH)


def test_ids_sort_by_the_time_at_which_they_were_made() -> None:
    moments = [0.0, 1.5, 1.501, 1e9, 4e9]
    ids = [new_id(FILE, moment) for moment in moments]
    assert ids == sorted(ids)


def test_the_content_of_an_added_object_outlives_its_source(storage: Folder) -> None:
    file_id, batch_id = put(storage, "t", b"abc"), new_id(BATCH)
    assert storage.batches("t").add(batch_id, {}, storage.files("t").content(file_id))
    assert storage.files("t").delete(file_id)
    assert storage.batches("t").content(batch_id).read_bytes() == b"abc"


def test_an_object_is_added_once(storage: Folder, tmp_path: Path) -> None:
    source, batch_id = tmp_path / "source", new_id(BATCH)
    source.write_bytes(b"abc")
    bucket = storage.batches("t")
    assert bucket.add(batch_id, {"n": 1}, source)
    assert not bucket.add(batch_id, {"n": 2}, source)
    assert bucket.load(batch_id) == {"n": 1}
    assert os.listdir(storage.root / "tenant-t" / "batches") == [batch_id]


def test_the_content_is_copied_where_it_cannot_be_linked(
    storage: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    source, batch_id = tmp_path / "source", new_id(BATCH)
    source.write_bytes(b"abc")
    monkeypatch.setattr(os, "link", refuse)
    storage.batches(None).add(batch_id, {}, source)
    source.write_bytes(b"changed")
    assert storage.batches(None).content(batch_id).read_bytes() == b"abc"


def test_the_first_note_of_a_name_stays(storage: Folder) -> None:
    bucket, file_id = storage.files(None), put(storage, None)
    assert bucket.noted(file_id, "cancel") is None
    assert bucket.note(file_id, "cancel", {"at": 1})
    assert not bucket.note(file_id, "cancel", {"at": 2})
    assert bucket.noted(file_id, "cancel") == {"at": 1}


def test_the_first_value_of_a_key_stays_until_it_is_old(storage: Folder) -> None:
    assert storage.remember("ab", {"id": "1"}) == {"id": "1"}
    assert storage.remember("ab", {"id": "2"}) == {"id": "1"}
    assert storage.forget(3600) == 0
    os.utime(storage.root / ".keys" / "ab", (0, 0))
    assert storage.forget(3600) == 1
    assert storage.remember("ab", {"id": "3"}) == {"id": "3"}


def test_the_open_batches_are_listed_until_they_are_closed(storage: Folder) -> None:
    first, second = new_id(BATCH, 1), new_id(BATCH, 2)
    storage.open_batch(second, None)
    storage.open_batch(first, "..")
    storage.open_batch(first, "..")
    assert [(batch_id, tenant) for batch_id, tenant, _ in storage.open_batches()] == [(first, ".."), (second, None)]
    storage.close_batch(first)
    storage.close_batch(first)
    assert [batch_id for batch_id, _, _ in storage.open_batches()] == [second]


def test_no_other_process_gets_a_lock_until_its_process_ends(storage: Folder) -> None:
    file_id = put(storage, None)
    code = (
        "import sys, time; from producer.files.folder import Folder\n"
        f"with Folder({str(storage.root)!r}).files(None).lock({file_id!r}) as held:\n"
        "    print(held, flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with storage.files(None).lock(file_id) as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    finally:
        holder.kill()

    def free() -> bool:
        with storage.files(None).lock(file_id) as held:
            return held

    eventually(free)


def test_old_leftovers_of_killed_processes_are_deleted(storage: Folder) -> None:
    file_id, bucket = put(storage, None), storage.files(None)
    kept = storage.root / "open" / "files"
    for name in (".new-1", ".gone-1"):
        (kept / name).mkdir()
        (kept / name / "content").write_bytes(b"half")
    os.utime(kept / file_id, (0, 0))
    assert bucket.sweep(3600) == 0
    for name in (".new-1", ".gone-1"):
        os.utime(kept / name, (0, 0))
    assert bucket.sweep(3600) == 2
    assert os.listdir(kept) == [file_id]


def test_a_record_that_cannot_be_replaced_stays(storage: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id, bucket = put(storage, None), storage.files(None)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        bucket.save(file_id, {"n": 2})
    assert bucket.load(file_id) == {"n": 1}
    assert sorted(os.listdir(storage.root / "open" / "files" / file_id)) == ["content", "record.json"]


def test_a_file_is_replaced_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    durable.replace_file(path, b"one")
    durable.replace_file(path, b"two")
    assert not durable.create_file(path, b"three")
    assert path.read_bytes() == b"two"
    assert durable.create_file(tmp_path / "b", b"four")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_five_thousand_objects_are_listed_in_order(storage: Folder) -> None:
    begun = time.time()
    made = [new_id(FILE, begun + n / 1000) for n in range(5000)]
    bucket = storage.files(None)
    bucket.ensure()
    for file_id in reversed(made):
        (bucket.path / file_id).mkdir()
    assert bucket.ids() == made
