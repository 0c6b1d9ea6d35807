"""Translates the events of a job into the chunks of OpenAI's stream.

    chunks = Chunks(CHAT, job_id, model="m", include_usage=False, created=now)
    async for event in job.stream():
        for chunk in chunks.feed(event): …    # each is the JSON of one `data:` line
    chunks.error                              # an ApiError instead of [DONE], if the job did not succeed

What was sent stays a prefix of what follows, also if a second worker restarts the job.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tokenmill.client.follow import TextFollower, TextRestarted, restarted
from tokenmill.openai.errors import ApiError, error_of
from tokenmill.openai.request import CHAT
from tokenmill.openai.response import PREFIXES, TextLogprobs, chat_logprobs, usage_of
from tokenmill.protocol.events import Event, FinalEvent, StartEvent
from tokenmill.protocol.result import Choice, Result

Json = dict[str, Any]


class Chunks:
    """Translates the events of one job.

    Args:
        url: `CHAT` or `COMPLETIONS`.
        model: name of the model in every chunk; the attribute may be set until the first chunk.
        include_usage: whether a last chunk holds the usage.
        created: Unix time in seconds.
    """

    def __init__(self, url: str, job_id: str, *, model: str, include_usage: bool, created: int) -> None:
        self.model = model
        self.done = False
        """Whether the final event was fed."""
        self.error: ApiError | None = None
        """After the final event: the last event of the stream instead of `[DONE]`, for a job that did not succeed."""
        self._job_id, self._chat, self._usage = job_id, url == CHAT, include_usage
        self._frame: Json = {
            "id": f"{PREFIXES[url]}-{job_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "system_fingerprint": None,
        }
        self._choices: dict[int, _Choice] = {}

    def feed(self, event: Event) -> list[Json]:
        """Return the chunks that an event adds, often none.

        The first chunk of a choice of a chat has `delta.role`. Text comes with the first event that holds it. The final
        event adds the text that is missing, the `finish_reason` of each choice and the usage; for a job that did not
        succeed, only the missing text, and sets `error`.

        Raises:
            TextRestarted: a second worker restarted the job, and its text or its tokens differ from those sent.
        """
        if isinstance(event, StartEvent):
            for choice in self._choices.values():
                choice.restart(event)
            return []
        chunks: list[Json] = []
        if isinstance(event, FinalEvent):
            self.done = True
            self._end(event, chunks)
        else:
            choice = self._choice(event.index)
            logprobs = None if event.logprobs is None else event.logprobs["content"]
            self._add(choice, choice.text.feed(event), choice.add(event.token_ids, logprobs), chunks)
        return chunks

    def _choice(self, index: int) -> _Choice:
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(index, self._chat)
        return choice

    def _add(self, choice: _Choice, text: str, more: Json, chunks: list[Json]) -> None:
        if text or more:
            self._open(choice, chunks)
            chunks.append(self._chunk(choice.part(text, more)))

    def _open(self, choice: _Choice, chunks: list[Json]) -> None:
        """Add the first chunk of a choice, after those of lower indexes: openai's package takes them in this order."""
        if not self._chat or choice.opened:
            return
        for index in range(choice.index + 1):
            lower = self._choice(index)
            if not lower.opened:
                lower.opened = True
                chunks.append(self._chunk(lower.head()))

    def _chunk(self, *choices: Json) -> Json:
        chunk = {**self._frame, "model": self.model, "choices": list(choices)}
        if self._usage:
            chunk["usage"] = None
        return chunk

    # ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, event: FinalEvent, chunks: list[Json]) -> None:
        result = event.result
        if result is None:
            message = f"Job {self._job_id} has ended ({event.status}), but its result is no longer kept."
            self.error = ApiError(500, message, code="result_expired", retry=False)
        elif result.ok:
            self._finish(event, result, chunks)
        else:
            self.error = error_of(result, chat=self._chat)
            for found in result.choices:
                # Text that differs, or ends before what was sent, adds nothing: the stream ends with an error anyway.
                with suppress(TextRestarted):
                    self._rest(event, found, chunks)

    def _finish(self, event: FinalEvent, result: Result, chunks: list[Json]) -> None:
        for found in result.choices:
            self._rest(event, found, chunks)
            choice = self._choice(found.index)
            choice.require_whole()
            self._open(choice, chunks)
            chunks.append(self._chunk(choice.tail(found.finish_reason)) | _extras(result, found))
        if self._usage:
            chunks.append(self._chunk() | {"usage": usage_of(result.usage)})

    def _rest(self, event: FinalEvent, found: Choice, chunks: list[Json]) -> None:
        """Add what is missing of a choice of the result."""
        choice = self._choice(found.index)
        logprobs = None if found.logprobs is None else found.logprobs["content"]
        text, more = choice.text.feed(event), choice.rest(found.token_ids, logprobs)
        self._add(choice, text, more, chunks)


class _Choice:
    """What was sent of one choice."""

    def __init__(self, index: int, chat: bool) -> None:
        self.index, self.opened = index, False
        self.text = TextFollower(index)
        self._chat = chat
        self._ids, self._logprobs = _Once(), _Once()
        self._offsets = TextLogprobs()

    def restart(self, start: StartEvent) -> None:
        """Expect all text and tokens again, from the beginning."""
        self.text.feed(start)
        self._ids.restart()
        self._logprobs.restart()

    def add(self, ids: list[int] | None, logprobs: list[Json] | None) -> Json:
        """Return the keys `token_ids` and `logprobs` for those of the given tokens that were not sent."""
        more: Json = {}
        if ids is not None and (new := self._ids.add(ids, ids)):
            more["token_ids"] = new
        if logprobs is not None and (new := self._logprobs.add(logprobs, [_identity(token) for token in logprobs])):
            content = {"content": new}
            more["logprobs"] = chat_logprobs(content) if self._chat else self._offsets.add(content)
        return more

    def rest(self, ids: list[int] | None, logprobs: list[Json] | None) -> Json:
        """Do what `add` does, for all tokens of the result."""
        self._ids.restart()
        self._logprobs.restart()
        return self.add(ids, logprobs)

    def require_whole(self) -> None:
        """Raise TextRestarted if more tokens were sent than the result has."""
        if not (self._ids.whole and self._logprobs.whole):
            raise restarted()

    def head(self) -> Json:
        """Return the first part of a choice of a chat."""
        return self._part({"role": "assistant", "content": "", "refusal": None})

    def part(self, text: str, more: Json) -> Json:
        """Return a part with text, and with the keys that `add` returned."""
        return {**self._part({"content": text} if self._chat else text), **more}

    def tail(self, finish_reason: str) -> Json:
        """Return the last part of a choice."""
        return {**self._part({} if self._chat else ""), "finish_reason": finish_reason}

    def _part(self, content: Any) -> Json:
        name = "delta" if self._chat else "text"
        return {"index": self.index, name: content, "logprobs": None, "finish_reason": None}


class _Once:
    """Yields items of a list once, though a restart repeats them from the beginning."""

    def __init__(self) -> None:
        self._sent: list[Any] = []
        """Identities of the items that were yielded."""
        self._at = 0
        """Number of items since the last restart."""

    def restart(self) -> None:
        self._at = 0

    @property
    def whole(self) -> bool:
        """Whether all items that were yielded have come again since the last restart."""
        return self._at >= len(self._sent)

    def add(self, items: list[Any], identities: list[Any]) -> list[Any]:
        """Return the items that were not yielded yet.

        Raises:
            TextRestarted: an item differs from the item that was yielded in its place.
        """
        again = self._sent[self._at : self._at + len(items)]
        if again != identities[: len(again)]:
            raise restarted()
        self._sent += identities[len(again) :]
        self._at += len(items)
        return items[len(again) :]


def _identity(token: Json) -> Any:
    """Return what identifies a token: its id, or its bytes if the worker gives no id."""
    return token.get("token_id", token["bytes"])


def _extras(result: Result, choice: Choice) -> Json:
    """Return the keys of ours that a whole answer has, for the last chunk of the first choice."""
    if choice is not result.choices[0]:
        return {}
    clamped = {"clamped": dict(result.clamped)} if result.clamped else {}
    return clamped if choice.prompt_logprobs is None else {**clamped, "prompt_logprobs": choice.prompt_logprobs}
