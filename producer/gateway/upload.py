"""Reads an uploaded form: writes its file to the disk while it arrives, in bounded memory.

Starlette's own parser keeps a file in memory or in a temporary folder, and it would have to be copied from there.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import IO, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from producer.gateway.storing import stored
from tokenmill.openai.errors import ApiError

FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
"""The fields of the form, beside `file`."""
MAX_FIELD_BYTES: Final = 4096
FORM_BYTES: Final = 64 << 10
"""Maximum size of a form without the bytes of its file."""
PIECE_BYTES: Final = 256 << 10
"""How many bytes of the form are collected before a thread writes them."""


logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs each malformed form; the answer says the same


class Upload:
    """One form; its file goes to `target`.

    Args:
        content_type: header of the request.
        limit: maximum size of the file in bytes.

    Raises:
        ApiError: 400, the header is not that of a form.
    """

    def __init__(self, content_type: str, target: IO[bytes], limit: int) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(400, "The request needs the header `Content-Type: multipart/form-data; boundary=…`.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.size = 0
        self._target, self._limit = target, limit
        self._name, self._value, self._is_file, self._complete = "", bytearray(), False, False
        self._header, self._header_value, self._disposition = bytearray(), bytearray(), b""
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part,
                    "on_header_field": self._on_header,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the form to its end.

        Raises:
            ApiError: 400 a malformed form; 413 the file is too large; 503 the storage failed.
        """
        piece = bytearray()
        async for chunk in chunks:
            piece += chunk
            if len(piece) >= PIECE_BYTES:
                await stored(self._write, bytes(piece))
                piece.clear()
        await stored(self._write, bytes(piece))
        if not self._complete:
            raise ApiError(400, "The form is not complete.")
        if self.filename is None:
            raise ApiError(400, "file: is missing", param="file")

    def _write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None

    # ── what the parser finds ─────────────────────────────────────────────────────────────────────────────────────

    def _on_part(self) -> None:
        self._disposition = b""
        self._value.clear()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        if len(self._header_value) > MAX_FIELD_BYTES:
            raise ApiError(400, "A header of the form is too long.")

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise ApiError(400, "file: is given twice", param="file")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        elif self._name not in FIELDS:
            raise ApiError(400, "The form has a field that is none of file, purpose and expires_after.")
        elif self._name in self.fields:
            raise ApiError(400, f"{self._name}: is given twice", param=self._name)

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            if self.size > self._limit:
                raise ApiError(413, f"file: is larger than {self._limit} bytes", code="too_large", param="file")
            self._target.write(memoryview(data)[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ApiError(400, f"{self._name}: is too long", param=self._name)

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._complete = True


def _malformed(error: FormParserError) -> ApiError:
    return ApiError(400, f"The form is malformed: {error}")
