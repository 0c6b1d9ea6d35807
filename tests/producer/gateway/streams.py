"""Requests over sockets of their own, which tests read slowly or close in the middle."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.producer.gateway.harness import HOST, GatewayProcess, get

CHAT = "/v1/chat/completions"
JOBS = "/v1/jobs"


class Sent(NamedTuple):
    """A server-sent event."""

    name: str | None
    id: str | None
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Call:
    """A request that was sent, and whose answer is read on demand."""

    def __init__(
        self, gateway: GatewayProcess, path: str, body: Any = None, *, timeout: float = 60, **headers: str
    ) -> None:
        self.connection = http.client.HTTPConnection(HOST, gateway.port, timeout=timeout)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        raw = None if body is None else json.dumps(body).encode()
        if raw is not None:
            given.setdefault("content-type", "application/json")
        self.connection.request("GET" if raw is None else "POST", path, raw, given)
        self._response: http.client.HTTPResponse | None = None

    @property
    def response(self) -> http.client.HTTPResponse:
        """The answer, as soon as its headers have come."""
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def json(self) -> Any:
        return json.loads(self.response.read())

    def header(self, name: str) -> str | None:
        return self.response.getheader(name)

    def events(self) -> Iterator[Sent]:
        """Yield the server-sent events as they come; comments are skipped."""
        fields: dict[str, str] = {}
        while line := self.response.readline():
            text = line.decode().rstrip("\n")
            if text:
                name, _, value = text.partition(": ")
                fields[name] = value
            elif "data" in fields:
                yield Sent(fields.get("event"), fields.get("id"), fields["data"])
                fields = {}
            else:
                fields = {}

    def close(self) -> None:
        """Close the connection, as a client that goes away."""
        self.connection.close()
        if self._response is not None:
            self._response.close()


def chat(text: str = "Hi", max_tokens: int = 8, **params: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, **params}


def texts_of(events: list[Sent]) -> str:
    """The joined text of choice 0 of a streamed chat, `[DONE]` and errors left out."""
    chunks = [event.json for event in events if event.data != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ()) if choice["index"] == 0]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def metric(gateway: GatewayProcess, name: str) -> float:
    """The value of a metric without labels."""
    lines = get(f"{gateway.url}/metrics").body.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"tokenmill_gateway_{name} "))
