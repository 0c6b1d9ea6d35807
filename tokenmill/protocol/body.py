"""The JSON body of a job, OpenAI-shaped and strict.

    parse_body(raw: bytes, max_bytes: int = MAX_BODY_BYTES) -> Body     # raises JobError
    encode_body(params: Mapping[str, Any]) -> bytes                     # a producer's side, checked by the same rules

Absent and null are the same, in nested objects too; only inside what users define (`_FREE`) null is a value. `Body`
holds what was asked; defaults come from the model later: an absent value is None.
Derived readings: `Body.output_limit`, `.stops`, `.bias`, `.top_logprobs_count`, `.structure`, `.chat`.

A field's description completes the sentence "<key>: must be …" that its sender reads when the value is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from tokenmill.protocol.errors import ErrorCode, JobError, clean
from tokenmill.protocol.keys import MAX_BODY_BYTES

MAX_DEPTH: Final = 64
"""Nesting of objects and lists; templates and schema compilers recurse over what we let through."""
MAX_BIAS: Final = 1024
MAX_REPETITION: Final = 1e6
"""Bound of a repetition penalty, and of its inverse: fp32 holds what it makes of any logit."""
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_ID = 2**31 - 1

_FREE = frozenset({"arguments", "parameters", "schema", "json", "metadata"})
"""Keys whose values users define: null in a schema or in an argument is a value, not an absent one."""
OPERATORS: Final = frozenset(
    {"chat_template", "tokenize", "tokenizer", "conversation", "messages", "tools", "return_dict", "return_tensors"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask", "documents"}
    | {"add_generation_prompt", "continue_final_message", "sanitize_control_tokens"}
)
"""Arguments of the template machinery that a job must not reach through `chat_template_kwargs`."""

Json = dict[str, Any]


class _First(FailFast):
    """Stop at a list's first fault: a million wrong items make one error. Hashable, so that unions can hold it."""

    def __hash__(self) -> int:
        return hash(_First)


TokenId = Annotated[int, Field(ge=0, le=_MAX_ID)]
TokenIds = Annotated[list[TokenId], _First()]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a chat; the model's template decides which roles it knows."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], _First()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Json], _First()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Json] | None, _First()] = None
    """Of an answer of OpenAI's that is sent back; no template reads them."""
    refusal: str | None = None
    """Of an assistant's answer that is sent back, where OpenAI's has it in place of content."""

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.refusal is not None and self.role != "assistant":
            raise _wrong("messages: refusal is for the role assistant only")
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise _wrong("messages: must have content, each; only one with tool_calls or a refusal may do without")
        return self


class JsonSchema(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _wrong("response_format: json_schema goes with type json_schema, and only with it")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise _wrong("response_format.json_schema: schema is missing")
        return self


class StructuredOutputs(_Strict):
    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1), _First()] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len([kind for kind in (self.json_, self.regex, self.choice, self.grammar) if kind is not None]) != 1:
            raise _wrong("structured_outputs: must have exactly one of json, regex, choice, grammar")
        return self


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("body", "{message}", {"message": message})


def _check_stop(value: str | list[str] | None) -> str | list[str] | None:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if len(stops) > 16 or not all(1 <= len(stop) <= 256 for stop in stops):
        raise ValueError("stop")
    return value


def _check_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    if value and not all(_TOKEN_KEY.fullmatch(key) and int(key) <= _MAX_ID for key in value):
        raise ValueError("logit_bias")
    return value


def _number(low: float, high: float) -> Any:
    """A number in a range, both ends included."""
    return Field(ge=low, le=high, description=f"a number from {_plain(low)} to {_plain(high)}")


def _plain(number: float) -> str:
    return f"{number:f}".rstrip("0").rstrip(".")


def _integer(low: int, high: int, note: str = "") -> Any:
    """An integer in a range, both ends included."""
    return Field(ge=low, le=high, description=f"an integer from {low} to {high}{note}")


class Body(_Strict):
    """What a job asks for. Attributes are as sent; None where absent."""

    prompt: Annotated[
        str | TokenIds | None, Field(description=f"a string or a list of token ids, integers from 0 to {_MAX_ID}")
    ] = None
    messages: Annotated[
        list[Message] | None,
        _First(),
        Field(min_length=1, description="a list of messages, each with a role of 1 to 64 characters and text content"),
    ] = None
    tools: Annotated[list[Json] | None, _First(), Field(description="a list of objects")] = None
    chat_template_kwargs: Annotated[Json | None, Field(description="an object")] = None

    max_tokens: Annotated[int | None, _integer(1, _MAX_ID)] = None
    max_completion_tokens: Annotated[int | None, _integer(1, _MAX_ID)] = None
    min_tokens: Annotated[int | None, _integer(0, _MAX_ID)] = None
    temperature: Annotated[float | None, _number(0, 2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1, description="a number above 0 and at most 1")] = None
    top_k: Annotated[int | None, _integer(-1, _MAX_ID, " (0 and -1: off)")] = None
    min_p: Annotated[float | None, _number(0, 1)] = None
    presence_penalty: Annotated[float | None, _number(-2, 2)] = None
    frequency_penalty: Annotated[float | None, _number(-2, 2)] = None
    repetition_penalty: Annotated[float | None, _number(1 / MAX_REPETITION, MAX_REPETITION)] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None,
        AfterValidator(_check_bias),
        Field(
            max_length=MAX_BIAS,
            description=f"an object of at most {MAX_BIAS} token ids, 0 to {_MAX_ID}, with numbers from -100 to 100",
        ),
    ] = None
    seed: Annotated[int | None, _integer(-(2**63), 2**63 - 1)] = None
    n: Annotated[int | None, _integer(1, 64)] = None
    stop: Annotated[
        str | Annotated[list[str], _First()] | None,
        AfterValidator(_check_stop),
        Field(description="a string or a list of at most 16, each of 1 to 256 characters"),
    ] = None
    stop_token_ids: Annotated[
        TokenIds | None, Field(description=f"a list of token ids, integers from 0 to {_MAX_ID}")
    ] = None
    ignore_eos: Annotated[bool | None, Field(description="true or false")] = None

    logprobs: Annotated[
        bool | Annotated[int, Field(ge=0, le=20)] | None, Field(description="true, false or 0 to 20")
    ] = None
    top_logprobs: Annotated[int | None, _integer(0, 20)] = None
    prompt_logprobs: Annotated[int | None, _integer(0, 20)] = None
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
            raise _wrong("prompt: must be given, or messages, and not both")
        if self.prompt is not None and not self.prompt:
            raise _wrong("prompt: must not be empty")
        for name in self.chat_template_kwargs or {}:
            if name in OPERATORS:
                raise _wrong(f"chat_template_kwargs: {name} cannot be set by a job")
        if self.messages is None and (self.tools is not None or self.chat_template_kwargs is not None):
            key = "tools" if self.tools is not None else "chat_template_kwargs"
            raise _wrong(f"{key}: needs messages")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) == 2:
            raise _wrong("max_completion_tokens: differs from max_tokens, of which it is an alias")
        if self.output_limit is not None and (self.min_tokens or 0) > self.output_limit:
            raise _wrong("min_tokens: must be at most max_tokens")
        self._check_logprobs()
        if self.structured_outputs is not None and self.response_format and self.response_format.type != "text":
            raise _wrong("structured_outputs: cannot be combined with response_format")
        return self

    def _check_logprobs(self) -> None:
        if self.top_logprobs is None:
            return
        if self.logprobs is None or self.logprobs is False:
            raise _wrong("top_logprobs: needs logprobs")
        if self.logprobs is not True and self.logprobs != self.top_logprobs:
            raise _wrong("top_logprobs: differs from the count given as logprobs")

    @property
    def output_limit(self) -> int | None:
        """`max_tokens` under either name."""
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
        """How many alternatives to report beside each sampled token; None: no log-probabilities at all."""
        if self.logprobs is None or self.logprobs is False:
            return None
        return self.top_logprobs or 0 if self.logprobs is True else self.logprobs

    @property
    def structure(self) -> tuple[str, Any] | None:
        """The output's constraint: (`json_object`, None), or `json`, `regex`, `choice`, `grammar` with its value."""
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
                plain.pop("tool_calls", None)  # templates ask whether there are any by the key alone
            if isinstance(message.content, list):
                plain["content"] = "".join(part.text for part in message.content)
            elif message.content is None:
                # "" beside tool calls, since templates that know none of those still join it.
                plain["content"] = message.refusal or ""
            chat.append(plain)
        return chat


def parse_body(raw: bytes, max_bytes: int = MAX_BODY_BYTES) -> Body:
    """Read and check a body.

    Raises:
        JobError: `too_large` before anything is parsed, `invalid_json`, or `invalid_request` naming the key.
    """
    if len(raw) > max_bytes:
        raise JobError(ErrorCode.TOO_LARGE, f"body: {len(raw)} bytes, at most {max_bytes} are accepted")
    data = _decode(raw)
    if not isinstance(data, dict):
        raise JobError(ErrorCode.INVALID_REQUEST, "body: must be an object")
    data = {key: value for key, value in data.items() if value is not None}
    # What pydantic would say too, but one fault at a time: a body of 80,000 of them must not take a second to refuse.
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
    """Check one value by the rules of a key of the body, wherever it comes from.

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
    # NaN, Infinity and 1e400 have a key to name, so they are told apart from what is no JSON at all.
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
    """The JSON of `params` without the absent, checked as a worker checks it.

    Raises:
        JobError: as `parse_body`.
    """
    present = {key: value for key, value in params.items() if value is not None}
    try:
        raw = orjson.dumps(present, option=orjson.OPT_NON_STR_KEYS)
    except (TypeError, RecursionError) as error:
        raise JobError(ErrorCode.INVALID_REQUEST, f"body: {error}") from None
    for key, value in present.items():
        # orjson wrote NaN and infinity as null, which would read as "absent".
        if _holds_infinite(value):
            raise _not_finite(key)
    parse_body(raw, max_bytes)
    return raw


def _present(value: Any, key: str) -> Any:
    """The value of a key without what is null in it; at most `MAX_DEPTH` levels deep."""
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
