"""The nested objects of a body, and the types that bound its values.

A field's description completes the sentence "<key>: must be …" that the sender reads when the value is wrong.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_BIAS: Final = 1024
MAX_REPETITION: Final = 1e6
"""Largest repetition penalty, and the largest inverse of one: logits multiplied by it stay finite in fp32."""
MAX_ID: Final = 2**31 - 1
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")

OPERATORS: Final = frozenset(
    {"chat_template", "tokenize", "tokenizer", "conversation", "messages", "tools", "return_dict", "return_tensors"}
    | {"padding", "truncation", "max_length", "tokenizer_kwargs", "return_assistant_tokens_mask", "documents"}
    | {"add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "conversations", "self"}
)
"""Arguments of transformers' `apply_chat_template` that a job must not set through `chat_template_kwargs`."""

Json = dict[str, Any]


class FirstError(FailFast):
    """Stop at the first wrong item of a list, so that a million wrong items make one error. Hashable, for unions."""

    def __hash__(self) -> int:
        return hash(FirstError)


TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]
TokenIds = Annotated[list[TokenId], FirstError()]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a chat; the model's template decides which roles it knows."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[TextPart], FirstError()] | None = None
    name: str | None = None
    tool_calls: Annotated[list[Json], FirstError()] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Json] | None, FirstError()] = None
    """Part of OpenAI's answers, which clients send back in the next request; no template reads it."""
    refusal: str | None = None
    """Part of OpenAI's answers in place of content, which clients send back in the next request."""

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.refusal is not None and self.role != "assistant":
            raise invalid("messages: refusal is for the role assistant only")
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise invalid("messages: each message must have content, tool_calls or refusal")
        return self


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("response_format: json_schema must be given with type json_schema, and only with it")
        if self.json_schema is not None and self.json_schema.schema_ is None:
            raise invalid("response_format.json_schema: schema is missing")
        return self


class StructuredOutputs(Strict):
    json_: Annotated[Json | str | None, Field(alias="json")] = None
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1), FirstError()] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if len([kind for kind in (self.json_, self.regex, self.choice, self.grammar) if kind is not None]) != 1:
            raise invalid("structured_outputs: must have exactly one of json, regex, choice, grammar")
        return self


def invalid(message: str) -> PydanticCustomError:
    """Return the error of a validator. The sender reads `message` as it is."""
    return PydanticCustomError("body", "{message}", {"message": message})


def check_stop(value: str | list[str] | None) -> str | list[str] | None:
    """Check `stop`: at most 16 strings of 1 to 256 characters.

    Raises:
        ValueError: `value` is not valid; the sender reads the field's description.
    """
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if len(stops) > 16 or not all(1 <= len(stop) <= 256 for stop in stops):
        raise ValueError("stop")
    return value


def check_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    """Check the keys of `logit_bias`: token ids in decimal, without leading zeros.

    Raises:
        ValueError: a key is not such an id; the sender reads the field's description.
    """
    if value and not all(_TOKEN_KEY.fullmatch(key) and int(key) <= MAX_ID for key in value):
        raise ValueError("logit_bias")
    return value


def number(low: float, high: float) -> Any:
    """Bound a number; both ends are included."""
    return Field(ge=low, le=high, description=f"a number from {_plain(low)} to {_plain(high)}")


def _plain(number: float) -> str:
    return f"{number:f}".rstrip("0").rstrip(".")


def integer(low: int, high: int, note: str = "") -> Any:
    """Bound an integer; both ends are included. `note` ends the description."""
    return Field(ge=low, le=high, description=f"an integer from {low} to {high}{note}")
