"""Files of a batch, and a run of them on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tokenmill.batch.files import check_whole, request, write
from tokenmill import batch
from tokenmill.batch import BatchReport, Progress
from tokenmill.client.sync import Client


class Files:
    """The input, the output and the error file of a batch."""

    def __init__(self, folder: Path, requests: list[Any]) -> None:
        self.input = write(folder / "in.jsonl", requests)
        self.output, self.errors = folder / "out.jsonl", folder / "err.jsonl"
        self.ids = [one["custom_id"] for one in requests]

    def run(self, client: Client, **options: Any) -> BatchReport:
        return batch.run(self.input, self.output, self.errors, client=client, **options)

    def close(self, client: Client, **options: Any) -> BatchReport:
        return batch.close(self.input, self.output, self.errors, client=client, **options)

    def check(self) -> None:
        check_whole(self.ids, self.output, self.errors)


class Later:
    """A call of `run`, or of `call`, on a thread of its own."""

    def __init__(
        self, files: Files, client: Client, call: Callable[..., BatchReport] = Files.run, **options: Any
    ) -> None:
        self.stop = threading.Event()
        self.told: list[Progress] = []
        self.report: BatchReport | None = None
        self.error: BaseException | None = None
        options = {"stop": self.stop, "progress": self.told.append, **options}
        self._thread = threading.Thread(target=self._go, args=(files, client, call, options))
        self._thread.start()

    def _go(self, files: Files, client: Client, call: Callable[..., BatchReport], options: dict[str, Any]) -> None:
        try:
            self.report = call(files, client, **options)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error

    def join(self) -> BatchReport:
        self._thread.join(30)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report


def requests(count: int) -> list[Any]:
    return [request(f"r{number}", f"say {number}", max_tokens=10) for number in range(count)]
