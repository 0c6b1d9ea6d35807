"""The first pass over an input: checks the whole file before anything is submitted.

An error outside of a line's body (not JSON, a missing or repeated custom id, a second URL or model) is an error of the
whole file, as with OpenAI. After an error in a body, that request gets an error line, and the other requests run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

from tokenmill.batch.index import Index
from tokenmill.batch.prefix import prefix_of
from tokenmill.batch.report import SHOWN_FAULTS, BatchInvalid, BatchStopped, Fault
from tokenmill.batch.source import MAX_LINE_BYTES, Raw, Source
from tokenmill.openai.request import URLS
from tokenmill.protocol.errors import clean

MAX_CUSTOM_ID = 512
_KEYS = ("custom_id", "method", "url", "body")
_CHUNK = 1000

Row = tuple[int, int, int, int, str]


class _Bad(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code, self.message, self.param = code, message, param


class Validator:
    """Checks one file in one pass; holds the URL and the model that all lines must share.

    Args:
        url: the URL that all lines must have; None: that of the first line.
    """

    def __init__(self, source: Source, stop: threading.Event, url: str | None = None) -> None:
        self._source, self._stop = source, stop
        self._asked, self._url = url, url
        self._model: str | None = None
        self._faults: list[Fault] = []
        self._count = 0

    @property
    def url(self) -> str:
        """The URL of all lines, once `index` has returned."""
        return self._url or ""

    def index(self) -> Index:
        """Check the file and return the index of its lines.

        Raises:
            BatchInvalid: the file has errors.
            BatchStopped: `stop` was set.
        """
        index = Index()
        try:
            rows = self._rows()
            while chunk := list(islice(rows, _CHUNK)):
                index.add(chunk)
                if self._stop.is_set():
                    raise BatchStopped("Stopped while the input was checked; nothing submitted.")
            index.seal()
            self._check_ids(index)
            if self._count == 0 and index.total == 0:
                self._note(Fault(None, "empty_file", f"{self._source.path} holds no request"))
            if self._count:
                raise BatchInvalid(sorted(self._faults, key=_place)[:SHOWN_FAULTS], self._count)
        except BaseException:
            index.close()
            raise
        return index

    def _rows(self) -> Iterator[Row]:
        for raw in self._source.lines():
            try:
                yield self._row(raw)
            except _Bad as bad:
                self._note(Fault(raw.number, bad.code, bad.message, bad.param))

    def _row(self, raw: Raw) -> Row:
        if raw.data is None:
            raise _Bad("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
        custom_id, _, body = self._frame(parse_line(raw.data))
        return raw.number, raw.offset, len(raw.data), prefix_of(body), custom_id

    def _frame(self, line: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
        for key in _KEYS:
            if line.get(key) is None:
                raise _Bad("missing_required_parameter", f"{key} is missing", key)
        unknown = next((key for key, value in line.items() if key not in _KEYS and value is not None), None)
        if unknown is not None:
            raise _Bad("unknown_parameter", f"unknown key {clean(unknown, 64)!r}", clean(unknown, 64))
        custom_id, method, url, body = (line[key] for key in _KEYS)
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
            raise _Bad(
                "invalid_custom_id", f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters", "custom_id"
            )
        if method != "POST":
            raise _Bad("invalid_method", "method must be POST", "method")
        if url not in URLS:
            raise _Bad("invalid_url", f"url must be {' or '.join(URLS)}", "url")
        if not isinstance(body, dict):
            raise _Bad("invalid_body", "body must be an object", "body")
        self._check_common(url, body.get("model"))
        return custom_id, url, body

    def _check_common(self, url: str, model: Any) -> None:
        if self._url is None:
            self._url = url
        if url != self._url:
            others = "that of the batch is" if self._asked else "in earlier lines"
            raise _Bad("url_mismatch", f"url is {url}, {others} {self._url}; a file has one url", "url")
        if model is None:
            return
        if not isinstance(model, str):
            raise _Bad("invalid_model", "model must be a string", "body.model")
        if self._model is None:
            self._model = model
        if model != self._model:
            raise _Bad(
                "model_mismatch",
                f"model is {clean(model, 64)!r}, in earlier lines {clean(self._model, 64)!r}; a file has one model",
                "body.model",
            )

    def _check_ids(self, index: Index) -> None:
        for number, first in index.repeated():
            message = f"line {first} has the same custom_id"
            self._note(Fault(number, "duplicate_custom_id", message, "custom_id"), extra=True)

    def _note(self, fault: Fault, extra: bool = False) -> None:
        """Count a fault, and keep it if it may belong to the first `SHOWN_FAULTS` of the file.

        Faults are noted in the order of lines, except `extra` faults, which are noted at the end.
        """
        self._count += 1
        if len(self._faults) < (2 if extra else 1) * SHOWN_FAULTS:
            self._faults.append(fault)


def _place(fault: Fault) -> int:
    return fault.line or 0


def parse_line(data: bytes) -> dict[str, Any]:
    """Parse a line that must be a JSON object; raises `_Bad` for anything else."""
    try:
        line = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _Bad("invalid_json_line", f"not JSON: {clean(error.msg, 120)} at character {error.pos}") from None
    if not isinstance(line, dict):
        raise _Bad("invalid_json_line", "must be an object")
    return line
