"""One tenant of a storage: its files and batches, created and run without HTTP and without RQ."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai.types import Batch, FileObject

from producer.files.batches import cancel_batch, create_batch, find_batch
from producer.files.catalog import find_file
from producer.files.folder import Folder
from producer.files.objects import file_object, file_record
from producer.files.run import run_batch
from producer.files.storage import FILE, new_id
from tests.support import eventually
from tests.tokenmill.batch.files import COMPLETIONS, request
from tests.tokenmill.mini import Queue
from tokenmill.client.sync import Client

Lines = Iterable[dict[str, Any] | str]


def text_of(lines: Lines) -> bytes:
    return "".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines).encode()


@dataclass
class Tenant:
    """A tenant with its files and batches."""

    folder: Path
    queue: Queue
    name: str | None = "t"
    storage: Folder = field(init=False)

    def __post_init__(self) -> None:
        self.storage = Folder(self.folder)
        self.files, self.batches = self.storage.files(self.name), self.storage.batches(self.name)

    def upload(self, content: bytes, purpose: str = "batch") -> str:
        file_id = new_id(FILE)
        with self.files.draft() as draft:
            draft.file.write(content)
            draft.commit(file_id, file_record("in.jsonl", len(content), purpose, 1, None))
        return file_id

    def create(self, lines: Lines | bytes, window: str = "24h", **more: Any) -> str:
        """Upload a file and create a batch of it; return the batch's id."""
        file_id = self.upload(lines if isinstance(lines, bytes) else text_of(lines))
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": window, **more}
        made = create_batch(self.storage, self.name, body, root=self.queue.keys.root, ttl_s=None)
        return str(Batch.model_validate(made, strict=True).id)

    def of(self, prompts: Iterable[str], window: str = "24h") -> str:
        """Create a batch of one request for each prompt, with the custom ids 0, 1, …."""
        return self.create((request(str(n), prompt) for n, prompt in enumerate(prompts)), window)

    def run(self, batch_id: str, makes_way: Callable[[float], bool] = lambda start_s: False) -> bool:
        """Run a batch on, as the clerk does."""
        with Client(self.queue.url, self.queue.keys.queue, block_ms=300) as client:
            return run_batch(self.storage, self.name, batch_id, client=client, makes_way=makes_way)

    def start(self, batch_id: str, makes_way: Callable[[float], bool] = lambda start_s: False) -> threading.Thread:
        thread = threading.Thread(target=self.run, args=(batch_id, makes_way))
        thread.start()
        return thread

    def cancel(self, batch_id: str) -> Batch:
        return Batch.model_validate(cancel_batch(self.batches, batch_id), strict=True)

    def batch(self, batch_id: str) -> Batch:
        return Batch.model_validate(find_batch(self.batches, batch_id), strict=True)

    def lines(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """Custom id → line of an output or error file."""
        if file_id is None:
            return {}
        file = FileObject.model_validate(file_object(file_id, find_file(self.files, file_id)), strict=True)
        data = self.files.content(file_id).read_bytes()
        assert (file.purpose, file.bytes) == ("batch_output", len(data))
        lines = [json.loads(line) for line in data.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found

    def check_whole(self, batch_id: str, ids: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check an ended batch: each request has one line in its files, which the counts fit; return both files."""
        batch = self.batch(batch_id)
        good, bad = self.lines(batch.output_file_id), self.lines(batch.error_file_id)
        assert sorted([*good, *bad]) == sorted(ids)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (len(good) + len(bad), len(good), len(bad))
        eventually(lambda: batch_id not in [found for found, _, _ in self.storage.open_batches()])
        outputs = [one for one in self.files.ids() if (self.files.load(one) or {})["purpose"] == "batch_output"]
        assert len(outputs) == (batch.output_file_id is not None) + (batch.error_file_id is not None)
        return good, bad
