"""The JSON body of a job, OpenAI-shaped and strict.

    parse_body(raw: bytes, max_bytes: int = MAX_BODY_BYTES) -> Body     # raises JobError
    encode_body(params: Mapping[str, Any]) -> bytes                     # for producers; checked by the same rules

Null is the same as absent, in nested objects too; only inside values that users define (`_FREE`) null is a value.
`Body` holds the parameters that were sent; the worker fills in the model's defaults later.
Derived readings: `Body.output_limit`, `.stops`, `.bias`, `.top_logprobs_count`, `.structure`, `.chat`.

A field's description completes the sentence "<key>: must be …" that its sender reads when the value is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tokenmill.protocol.body_fields import (
    MAX_BIAS,
    MAX_ID,
    MAX_REPETITION,
    OPERATORS,
    FirstError,
    Json,
    Message,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    TokenIds,
    check_bias,
    check_stop,
    integer,
    invalid,
    number,
)
from tokenmill.protocol.errors import ErrorCode, JobError, clean
from tokenmill.protocol.keys import MAX_BODY_BYTES

MAX_DEPTH: Final = 64
"""Maximum nesting of objects and lists; chat templates and schema compilers recurse over a body."""
_FREE = frozenset({"arguments", "parameters", "schema", "json", "metadata"})
"""Keys whose values users define: null in a schema or in an argument is a value, and is kept."""


class Body(Strict):
    """The parameters of a job, as sent; an absent parameter is None."""

    prompt: Annotated[
        str | TokenIds | None, Field(description=f"a string or a list of token ids, integers from 0 to {MAX_ID}")
    ] = None
    messages: Annotated[
        list[Message] | None,
        FirstError(),
        Field(min_length=1, description="a list of messages, each with a role of 1 to 64 characters and text content"),
    ] = None
    tools: Annotated[list[Json] | None, FirstError(), Field(description="a list of objects")] = None
    chat_template_kwargs: Annotated[Json | None, Field(description="an object")] = None

    max_tokens: Annotated[int | None, integer(1, MAX_ID)] = None
    max_completion_tokens: Annotated[int | None, integer(1, MAX_ID)] = None
    min_tokens: Annotated[int | None, integer(0, MAX_ID)] = None
    temperature: Annotated[float | None, number(0, 2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="a number above 0 and at most 1")] = None
    top_k: Annotated[int | None, integer(-1, MAX_ID, " (0 and -1: off)")] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    presence_penalty: Annotated[float | None, number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, number(-2, 2)] = None
    repetition_penalty: Annotated[float | None, number(1 / MAX_REPETITION, MAX_REPETITION)] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        AfterValidator(check_bias),
        Field(
            max_length=MAX_BIAS,
            description=f"an object of at most {MAX_BIAS} token ids, 0 to {MAX_ID}, with numbers from -100 to 100",
        ),
    ] = None
    seed: Annotated[int | None, integer(-(2**63), 2**63 - 1)] = None
    n: Annotated[int | None, integer(1, 64)] = None
    stop: Annotated[
        str | Annotated[list[str], FirstError()] | None,
        AfterValidator(check_stop),
        Field(description="a string or a list of at most 16, each of 1 to 256 characters"),
    ] = None
    stop_token_ids: Annotated[
        TokenIds | None, Field(description=f"a list of token ids, integers from 0 to {MAX_ID}")
    ] = None
    ignore_eos: Annotated[bool | None, Field(description="true or false")] = None

    logprobs: Annotated[
        bool | Annotated[int, Field(ge=0, le=20)] | None, Field(description="true, false or 0 to 20")
    ] = None
    top_logprobs: Annotated[int | None, integer(0, 20)] = None
    prompt_logprobs: Annotated[int | None, integer(0, 20)] = None
    cache_salt: Annotated[str | None, Field(max_length=256, description="a string of at most 256 characters")] = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="an object of type text, json_object or json_schema")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="an object with one of json, regex, choice, grammar")
    ] = None
    skip_special_tokens: Annotated[bool | None, Field(description="true or false")] = None
    return_token_ids: Annotated[bool | None, Field(description="true or false")] = None
    model: Annotated[str | None, Field(max_length=512, description="a string of at most 512 characters")] = None

    stream: Annotated[bool | None, Field(description="true or false")] = None
    stream_options: Annotated[Json | None, Field(description="an object")] = None
    user: Annotated[str | None, Field(description="a string")] = None
    metadata: Annotated[Json | None, Field(description="an object")] = None

    @model_validator(mode="after")
    def _consistent(self) -> Body:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt: must be given, or messages, and not both")
        if self.prompt is not None and not self.prompt:
            raise invalid("prompt: must not be empty")
        for name in self.chat_template_kwargs or {}:
            if name in OPERATORS:
                raise invalid(f"chat_template_kwargs: {name} cannot be set by a job")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            key = "tools" if self.tools is not None else "chat_template_kwargs"
            raise invalid(f"{key}: needs messages")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise invalid("max_completion_tokens: differs from max_tokens, of which it is an alias")
        if self.output_limit is not None and (self.min_tokens or 0) > self.output_limit:
            raise invalid("min_tokens: must be at most max_tokens")
        self._check_logprobs()
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise invalid("structured_outputs: cannot be combined with response_format")
        return self

    def _check_logprobs(self) -> None:
        if self.top_logprobs is None:
            return
        if self.logprobs is None or self.logprobs is False:
            raise invalid("top_logprobs: needs logprobs")
        if self.logprobs is not True and self.logprobs != self.top_logprobs:
            raise invalid("top_logprobs: differs from the count given as logprobs")

    @property
    def output_limit(self) -> int | None:
        """`max_tokens`, under either of its names."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as (token id, value)."""
        return tuple((int(key), value) for key, value in (self.logit_bias or {}).items())

    @property
    def top_logprobs_count(self) -> int | None:
        """Number of alternatives to report beside each sampled token; None: report no log-probabilities."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.top_logprobs or 0 if self.logprobs is True else self.logprobs

    @property
    def structure(self) -> tuple[str, Any] | None:
        """The output's constraint: (kind, value), or None.

        Kinds: `json_object`, whose value is None, `json`, `regex`, `choice` and `grammar`.
        """
        if self.structured_outputs is not None:
            asked = self.structured_outputs
            kinds = {"json": asked.json_, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
            return next((kind, value) for kind, value in kinds.items() if value is not None)
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is not None:
            return "json", self.response_format.json_schema.schema_
        return "json_object", None

    @property
    def chat(self) -> list[Json] | None:
        """`messages` as a chat template reads them: plain dicts, text parts joined."""
        if self.messages is None:
            return None
        chat = []
        for message in self.messages:
            plain = message.model_dump(exclude_none=True, exclude={"annotations", "refusal"})
            if not message.tool_calls:
                plain.pop("tool_calls", None)  # templates test for the key alone
            if isinstance(message.content, list):
                plain["content"] = "".join(part.text for part in message.content)
            elif message.content is None:
                # "" beside tool calls: templates that know no tool calls join it to a string.
                plain["content"] = message.refusal or ""
            chat.append(plain)
        return chat


def parse_body(raw: bytes, max_bytes: int = MAX_BODY_BYTES) -> Body:
    """Parse and check a body.

    Raises:
        JobError: `too_large` before anything is parsed, `invalid_json`, or `invalid_request` naming the key.
    """
    if len(raw) > max_bytes:
        raise JobError(ErrorCode.TOO_LARGE, f"body: {len(raw)} bytes, at most {max_bytes} are accepted")
    data = _decode(raw)
    if not isinstance(data, dict):
        raise JobError(ErrorCode.INVALID_REQUEST, "body: must be an object")
    data = {key: value for key, value in data.items() if value is not None}
    # Pydantic would report these, too, but all of them: a body with 80,000 unknown keys would take a second to refuse.
    for key in data:
        if key not in Body.model_fields:
            raise JobError(ErrorCode.INVALID_REQUEST, f"unknown key {clean(key, 64)!r}")
    bias = data.get("logit_bias")
    if isinstance(bias, dict) and len(bias) > MAX_BIAS:
        raise JobError(ErrorCode.INVALID_REQUEST, f"logit_bias: at most {MAX_BIAS} token ids are accepted")
    _check_depth(data)
    try:
        return Body.model_validate({key: _present(value, key) for key, value in data.items()})
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise JobError(ErrorCode.INVALID_REQUEST, _explain(details)) from None


def check_value(key: str, value: object) -> Any:
    """Check a value by the rules of the body's key `key`, and return it. For values that come from elsewhere.

    Raises:
        JobError: `invalid_request` naming the key.
    """
    try:
        return getattr(Body.model_validate({"prompt": [0], key: value}), key)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise JobError(ErrorCode.INVALID_REQUEST, _explain(details)) from None


def _decode(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        wrong = JobError(ErrorCode.INVALID_JSON, f"body: {clean(error.msg, 120)} at {error.pos}")
    # NaN, Infinity and 1e400 get an error that names their key, unlike other texts that are no JSON.
    found = False

    def number(text: str) -> float:
        nonlocal found
        value = float(text)
        found = found or not math.isfinite(value)
        return value

    try:
        data = json.loads(raw.decode(), parse_float=number, parse_int=number, parse_constant=number)
    except (ValueError, RecursionError):
        raise wrong from None
    if not found or not isinstance(data, dict):
        raise wrong
    for key, value in data.items():
        if _holds_infinite(value):
            raise _not_finite(key)
    raise wrong


def _not_finite(key: str) -> JobError:
    field = Body.model_fields.get(key)
    also = f": {field.description}" if field and field.description else ""
    return JobError(ErrorCode.INVALID_REQUEST, f"{clean(key, 64)}: must be finite{also}")


def _holds_infinite(value: Any) -> bool:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, float):
            if not math.isfinite(item):
                return True
        elif isinstance(item, (dict, list)):
            todo.extend(item.values() if isinstance(item, dict) else item)
    return False


def encode_body(params: Mapping[str, Any], max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Encode `params` as JSON, without those that are None, and check it as a worker does.

    Raises:
        JobError: as `parse_body`; or `invalid_request` for a value that JSON cannot hold.
    """
    present = {key: value for key, value in params.items() if value is not None}
    try:
        raw = orjson.dumps(present, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError) as error:
        raise JobError(ErrorCode.INVALID_REQUEST, f"body: {error}") from None
    for key, value in present.items():
        # orjson writes NaN and infinity as null, which would mean absent.
        if _holds_infinite(value):
            raise _not_finite(key)
    parse_body(raw, max_bytes)
    return raw


def _present(value: Any, key: str) -> Any:
    """Return the value of a key without the nulls in it. `value` is at most `MAX_DEPTH` levels deep."""
    if key in _FREE:
        return value
    if isinstance(value, dict):
        return {name: _present(item, name) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_present(item, "") for item in value] if value and isinstance(value[0], (dict, list)) else value
    return value


def _check_depth(data: Json) -> None:
    for key, value in data.items():
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [item for outer in level for item in _nested(outer)]
            if not level:
                break
        else:
            raise JobError(ErrorCode.INVALID_REQUEST, f"{clean(key, 64)}: nested deeper than {MAX_DEPTH}")


def _nested(value: Any) -> list[Any]:
    if not isinstance(value, (dict, list)):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if item and isinstance(item, (dict, list))]


def _explain(details: list[ErrorDetails]) -> str:
    first = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    where = first["loc"]
    if first["type"] == "body" or not where:
        return str(first["ctx"]["message"]) if "ctx" in first else first["msg"]
    key = clean(str(where[0]), 64)
    if first["type"] == "extra_forbidden":
        path = ".".join(clean(str(part), 64) for part in where if not _is_union_arm(part))
        return f"unknown key {path!r}"
    field = Body.model_fields.get(key)
    return f"{key}: must be {field.description}" if field and field.description else f"{key}: {first['msg']}"


def _is_union_arm(part: int | str) -> bool:
    return isinstance(part, str) and part.startswith(("list[", "function-"))
