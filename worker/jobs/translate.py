"""Turns an entry of a lane into a `Request` of the engine; every mistake of a producer ends here, as a `JobError`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from engine.request import GrammarError, GrammarUndecided, InvalidRequest, PromptTooLong, Request, SamplingParams
from tokenmill.protocol.body import Body, parse_body
from tokenmill.protocol.callback import AllowList, CallbackError
from tokenmill.protocol.errors import ErrorCode, JobError
from tokenmill.protocol.job import JobEntry
from worker.jobs.defaults import Defaults
from worker.jobs.job import Job, Structure
from worker.settings import Settings

if TYPE_CHECKING:
    from engine.sampling.structured import Grammar

LONGEST_TOKEN = 256
"""Bytes of text that one token may stand for: a prompt too long for the context at that rate is not tokenised."""

MAX_LOGPROBS = 1_000_000
"""Most log-probabilities in one result, of all choices and of the prompt: about 100 MB of JSON."""


class TokenizerLike(Protocol):
    """The part of `engine.models.chat.Tokenizer` that the worker uses."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Any, tools: Any = None, **template_kwargs: Any) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


class Compiler(Protocol):
    """The part of `engine.sampling.structured.GrammarCompiler` that the worker uses."""

    def compile(self, kind: Any, spec: Any) -> Grammar: ...
    def check(self) -> None: ...


class ModelLike(Protocol):
    """The part of `engine.models.loading.LoadedModel` that the worker uses."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def generation(self) -> Any: ...
    @property
    def grammars(self) -> Compiler: ...


class Limits(Protocol):
    """The two methods of the engine that any thread may call."""

    def limit_tokens(self, prompt_tokens: int, asked: int | None) -> int: ...
    def validate(self, request: Request) -> None: ...


class Translator:
    """Applies the model's defaults and limits. Any thread may call it."""

    def __init__(self, settings: Settings, engine: Limits, model: ModelLike, chat_error: type[Exception]) -> None:
        """`chat_error`: raised by the tokenizer when it refuses messages; its text begins with the key of the body."""
        self.served = settings.served_model_name or (model.name,)
        self._settings = settings
        self._callbacks = AllowList.of(settings.callback_hosts)
        self._engine = engine
        self._tokenizer: TokenizerLike = model.tokenizer
        self._defaults = Defaults.of(model.generation)
        self._model = model
        self._chat_error = chat_error

    def request(self, job: Job, entry: JobEntry, priority: int, deadline: float | None) -> Request:
        """Read the body and build the request; sets in `job.options` what the result will report.

        Args:
            job: the job that `entry` became.
            entry: the well-formed entry; its body is not parsed yet.
            priority: 0 for the highest lane.
            deadline: `time.monotonic()` at which the job expires, or None.

        If `job.options.structure` is set, the caller still has to compile it into the request's `grammar`.

        Raises:
            JobError: the producer's mistake, with the code of the wire protocol.
        """
        if entry.callback is not None:
            self._check_callback(entry.callback)
        if deadline is not None and deadline <= time.monotonic():
            raise JobError(
                ErrorCode.DEADLINE_EXCEEDED, f"ttl_ms: the {entry.ttl_ms} ms ran out before the job was read"
            )
        body = parse_body(entry.body, self._settings.max_body_bytes)
        self._check_supported(body)
        job.options.token_ids = bool(body.return_token_ids)
        job.options.structure = _structure(body)
        try:
            prompt = self._prompt(body)
            job.options.prompt_tokens = len(prompt)
            request = Request(
                id=job.handle,
                prompt=prompt,
                params=self._params(job, body, len(prompt)),
                priority=priority,
                deadline=deadline,
                cache_salt=body.cache_salt or "",
                place=job.ref.place,
            )
            _check_logprobs(request)
            self._engine.validate(request)
        except PromptTooLong as error:
            raise JobError(ErrorCode.PROMPT_TOO_LONG, f"prompt: {error}") from None
        except InvalidRequest as error:
            raise JobError(ErrorCode.INVALID_REQUEST, str(error)) from None
        return request

    def callback(self, url: str | None) -> str | None:
        """Return `url` if `--callback-hosts` allows it, else None."""
        if url is None:
            return None
        try:
            self._callbacks.check(url)
        except CallbackError:
            return None
        return url

    def check(self) -> None:
        """Tokenise a small fixed prompt; an error of the tokenizer is raised, and is then the fault of no job."""
        self._tokenizer.encode("Hello")

    def _check_callback(self, url: str) -> None:
        try:
            self._callbacks.check(url)
        except CallbackError as error:
            raise JobError(ErrorCode.INVALID_REQUEST, f"callback: {error}") from None

    def _check_supported(self, body: Body) -> None:
        if body.model is not None and body.model not in self.served:
            raise JobError(ErrorCode.MODEL_MISMATCH, f"model: this worker serves {', '.join(self.served)}")

    def grammar(self, structure: Structure) -> Grammar:
        """Compile a grammar. May take seconds, so it must not run on a thread that jobs wait for.

        Raises:
            JobError: `structure` is not a grammar, or uses a feature that is not supported.
            GrammarUndecided: this worker could not determine whether it compiles; the job is not at fault.
        """
        try:
            return self._model.grammars.compile(structure.kind, structure.spec)
        except (GrammarError, ValueError) as error:
            raise JobError(ErrorCode.INVALID_REQUEST, f"{structure.key}: {error}") from None

    def can_compile(self) -> bool:
        """Return whether a small fixed grammar can be compiled; if not, no job's grammar is to blame."""
        try:
            self._model.grammars.check()
        except GrammarUndecided:
            return False
        return True

    def _prompt(self, body: Body) -> Sequence[int]:
        if isinstance(body.prompt, list):
            return body.prompt
        if body.prompt is not None:
            self._check_length(len(body.prompt.encode()))
            return self._tokenizer.encode(body.prompt)
        chat = body.chat or []
        self._check_length(sum(len(str(message.get("content") or "").encode()) for message in chat))
        kwargs = body.chat_template_kwargs or {}
        try:
            return self._tokenizer.encode_chat(chat, body.tools, **kwargs)
        except self._chat_error as error:
            raise JobError(ErrorCode.INVALID_REQUEST, str(error)) from None

    def _check_length(self, size: int) -> None:
        """Refuse a prompt that cannot fit, before the tokenizer spends seconds on it; `size` in bytes."""
        try:
            self._engine.limit_tokens(size // LONGEST_TOKEN, None)
        except PromptTooLong:
            raise JobError(
                ErrorCode.PROMPT_TOO_LONG, f"prompt: {size} bytes cannot fit into this worker's context"
            ) from None

    def _params(self, job: Job, body: Body, prompt_tokens: int) -> SamplingParams:
        """Build the sampling parameters: the body's values, else the model's generation config's, else OpenAI's."""
        most = self._engine.limit_tokens(prompt_tokens, self._settings.max_output_tokens)
        asked = body.output_limit
        limit = most if asked is None else min(asked, most)
        least = min(body.min_tokens or 0, limit)
        if asked is not None and limit < asked:
            job.options.clamped["max_tokens"] = limit
        if least < (body.min_tokens or 0):
            job.options.clamped["min_tokens"] = least
        top_k = self._default(body, "top_k", 0)
        return SamplingParams(
            max_tokens=limit,
            min_tokens=least,
            temperature=self._default(body, "temperature", 1.0),
            top_p=self._default(body, "top_p", 1.0),
            top_k=max(top_k, 0),
            min_p=self._default(body, "min_p", 0.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=self._default(body, "repetition_penalty", 1.0),
            logit_bias=body.bias,
            seed=body.seed,
            stop=(*body.stops, *(() if body.ignore_eos else self._defaults.stop)),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            bans=self._defaults.bans,
            skip_special_tokens=body.skip_special_tokens is not False,
            n=body.n or 1,
            logprobs=body.top_logprobs_count,
            prompt_logprobs=body.prompt_logprobs,
        )

    def _default(self, body: Body, name: str, openai: Any) -> Any:
        asked = getattr(body, name)
        return self._defaults.sampling.get(name, openai) if asked is None else asked


def _structure(body: Body) -> Structure | None:
    if body.structure is None:
        return None
    kind, spec = body.structure
    return Structure("response_format" if body.structured_outputs is None else f"structured_outputs.{kind}", kind, spec)


def _check_logprobs(request: Request) -> None:
    params = request.params
    entries = 0
    if params.logprobs is not None:
        entries += params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        entries += len(request.prompt) * (params.prompt_logprobs + 1)
    if entries * params.n > MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs: prompt, max_tokens and n could give {entries * params.n} log-probabilities, at most "
            f"{MAX_LOGPROBS} are allowed"
        )
