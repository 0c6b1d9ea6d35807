"""The schemas of the OpenAPI document: bodies of requests and answers."""

from __future__ import annotations

from typing import Any, Final

from producer.files.objects import EXPIRY_S, MOMENTS
from tokenmill.openai.request import OPENAI_KEYS, URLS
from tokenmill.protocol.body import Body
from tokenmill.protocol.replies import CancelReply
from tokenmill.protocol.state import JobStatus

Json = dict[str, Any]

REF: Final = "#/components/schemas/{model}"


def schemas() -> Json:
    """Return the named schemas; those of a job's body come from the class that checks it."""
    body = Body.model_json_schema(ref_template=REF)
    parts: Json = body.pop("$defs")
    return {
        "JobBody": body,
        **parts,
        "ChatRequest": _request(body, "messages", "prompt"),
        "CompletionRequest": _request(body, "prompt", "messages", "tools", "chat_template_kwargs"),
        **_REQUESTS,
        **_ANSWERS,
    }


def _request(body: Json, required: str, *without: str) -> Json:
    """Return the schema of a request in OpenAI's format: a job's keys without some, and OpenAI's own."""
    properties = {name: schema for name, schema in body["properties"].items() if name not in without}
    for name in sorted(OPENAI_KEYS):
        properties[name] = {"description": "As OpenAI's; a value that tokenmill does not support gets status 400."}
    properties["stream"] = {"type": ["boolean", "null"], "description": "Answer with server-sent events."}
    properties["stream_options"] = _nullable(_object({"include_usage": {"type": ["boolean", "null"]}}))
    properties[required] = _without_null(properties[required])
    return _object(properties, [required])


def _without_null(schema: Json) -> Json:
    kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
    return {**{key: value for key, value in schema.items() if key not in ("anyOf", "default")}, "anyOf": kinds}


def _object(properties: Json, required: list[str] | None = None, *, more: bool = False) -> Json:
    found: Json = {"type": "object", "properties": properties, "additionalProperties": more}
    return {**found, "required": required} if required else found


def _answer(properties: Json, *optional: str) -> Json:
    """Return the schema of an answer: all keys but the optional ones are there; later versions may add keys."""
    return _object(properties, [name for name in properties if name not in optional], more=True)


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Json:
    return {"$ref": REF.format(model=name)}


def _list_of(name: str, *, paged: bool = True) -> Json:
    found: Json = {"object": {"const": "list"}, "data": {"type": "array", "items": _ref(name)}}
    if paged:
        found |= {"first_id": _TEXT_OR_NULL, "last_id": _TEXT_OR_NULL, "has_more": {"type": "boolean"}}
    return _answer(found)


def _usage(*names: str) -> Json:
    return _answer({name: {"type": "integer", "minimum": 0} for name in names})


_TEXT: Json = {"type": "string"}
_TEXT_OR_NULL: Json = {"type": ["string", "null"]}
_TIME: Json = {"type": "integer", "description": "Seconds since 1970."}
_TIME_OR_NULL: Json = {"type": ["integer", "null"], "description": "Seconds since 1970."}
_NAME: Json = {"type": ["string", "null"], "pattern": "^[A-Za-z0-9_.-]{1,128}$"}
_LIST: Json = {"type": "array", "items": {"type": "object"}}
_METADATA: Json = {
    "type": ["object", "null"],
    "additionalProperties": {"type": "string", "maxLength": 512},
    "maxProperties": 16,
}

_REQUESTS: Json = {
    "EmbeddingRequest": _object(
        {
            "input": {"anyOf": [_TEXT, {"type": "array"}]},
            "model": _TEXT_OR_NULL,
            "dimensions": {"type": ["integer", "null"], "minimum": 1},
            "encoding_format": {"enum": ["float", "base64", None]},
            "user": _TEXT_OR_NULL,
        },
        ["input"],
    ),
    "JobRequest": _object(
        {
            "body": _ref("JobBody"),
            "id": {**_NAME, "description": "Id of the job; without one the gateway makes one."},
            "priority": {"enum": ["high", "normal", "low", None], "description": "Default: that of the API key."},
            "ttl": {"type": ["number", "null"], "exclusiveMinimum": 0, "description": "Seconds until it expires."},
            "delay": {"type": ["number", "null"], "minimum": 0, "description": "Seconds until it joins the queue."},
            "group": {**_NAME, "description": "Group whose ends can be followed together."},
            "tenant": {**_NAME, "description": "Without API keys only; with them it is the key's tenant."},
            "callback": {"type": ["string", "null"], "description": "https URL that gets the result."},
            "max_attempts": {"type": ["integer", "null"], "minimum": 1, "description": "Attempts before it fails."},
        },
        ["body"],
    ),
    "FileUpload": _object(
        {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
            "expires_after[anchor]": {"const": "created_at"},
            "expires_after[seconds]": {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
        },
        ["file", "purpose"],
    ),
    "BatchRequest": _object(
        {
            "input_file_id": _TEXT,
            "endpoint": {"enum": [*URLS]},
            "completion_window": {"type": "string", "pattern": "^[0-9]{1,9}[smhd]$", "examples": ["24h"]},
            "metadata": _METADATA,
            "output_expires_after": _nullable({"type": "object"}),
        },
        ["input_file_id", "endpoint", "completion_window"],
    ),
}

_TOKENS: Json = _usage("prompt_tokens", "completion_tokens", "total_tokens")
_COUNTS: Json = _usage("total", "completed", "failed")
_STATES: Final = [
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
_TIMES: Final = ("expires_at", *MOMENTS)

_ANSWERS: Json = {
    "Error": _answer(
        {"error": _answer({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL})}
    ),
    "Model": _answer({"id": _TEXT, "object": {"const": "model"}, "created": _TIME, "owned_by": _TEXT}),
    "Models": _list_of("Model", paged=False),
    "ChatCompletion": _answer(
        {
            "id": _TEXT,
            "object": {"const": "chat.completion"},
            "created": _TIME,
            "model": _TEXT_OR_NULL,
            "choices": _LIST,
            "usage": _TOKENS,
        }
    ),
    "Completion": _answer(
        {
            "id": _TEXT,
            "object": {"const": "text_completion"},
            "created": _TIME,
            "model": _TEXT_OR_NULL,
            "choices": _LIST,
            "usage": _TOKENS,
        }
    ),
    "Embeddings": _answer({"object": {"const": "list"}, "data": _LIST, "model": _TEXT_OR_NULL, "usage": {}}),
    "JobAccepted": _answer({"id": _TEXT, "status": {"const": "queued"}}),
    "Job": _answer({"id": _TEXT, "status": {"enum": [*JobStatus]}, "result": {"type": ["object", "null"]}}),
    "JobCancelled": _answer({"id": _TEXT, "status": {"enum": [*CancelReply]}}),
    "File": _answer(
        {
            "id": _TEXT,
            "object": {"const": "file"},
            "bytes": {"type": "integer", "minimum": 0},
            "created_at": _TIME,
            "expires_at": _TIME_OR_NULL,
            "filename": _TEXT,
            "purpose": {"enum": ["batch", "batch_output"]},
            "status": _TEXT,
        },
        "expires_at",
    ),
    "Files": _list_of("File"),
    "FileDeleted": _answer({"id": _TEXT, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": _answer(
        {
            "id": _TEXT,
            "object": {"const": "batch"},
            "endpoint": _TEXT,
            "input_file_id": _TEXT,
            "completion_window": _TEXT,
            "status": {"enum": _STATES},
            "created_at": _TIME,
            **dict.fromkeys(_TIMES, _TIME_OR_NULL),
            "output_file_id": _TEXT_OR_NULL,
            "error_file_id": _TEXT_OR_NULL,
            "errors": _nullable(_answer({"object": {"const": "list"}, "data": _LIST})),
            "request_counts": _nullable(_COUNTS),
            "metadata": _METADATA,
        },
        *_TIMES,
        "output_file_id",
        "error_file_id",
        "errors",
        "metadata",
    ),
    "Batches": _list_of("Batch"),
}
