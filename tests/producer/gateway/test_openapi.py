"""The OpenAPI document is valid, describes every route that is served, and no request that follows it is a 500."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from producer.gateway.app import build
from producer.gateway.openapi import document
from producer.gateway.openapi_schemas import REF
from producer.gateway.settings import GatewaySettings
from tests.producer.gateway.harness import GatewayProcess, ask, get, post
from tokenmill.protocol.body import Body, encode_body
from tokenmill.protocol.errors import JobError

METHODS = {"get", "post", "put", "delete", "patch"}


def described() -> set[tuple[str, str]]:
    return {
        (method, re.sub(r"{[^}]*}", "{}", path))
        for path, operations in document()["paths"].items()
        for method in operations
        if method in METHODS
    }


def served(app: Starlette) -> set[tuple[str, str]]:
    routes = [route for route in app.routes if isinstance(route, Route) and route.methods]
    assert len(routes) == len(app.routes)
    return {
        (method.lower(), re.sub(r"{[^}]*}", "{}", route.path))
        for route in routes
        for method in route.methods or ()
        if method != "HEAD"
    }


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_every_description_is_served() -> None:
    assert described() == served(build(GatewaySettings()))


def test_every_reference_has_a_target_that_is_a_valid_schema() -> None:
    components = document()["components"]
    for reference in references(document()):
        kind, name = reference.removeprefix("#/components/").split("/")
        assert name in components[kind], reference
    for schema in components["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for path in document()["paths"].values() for operation in path.values()]
    assert len(names) == len({*names})


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "max_tokens": 3},
        {"prompt": [1, 2], "n": 65},
        {"messages": [{"role": "user", "content": "x"}], "temperature": 3},
        {"messages": [{"role": "user", "content": "x", "refusal": None}], "top_logprobs": None},
        {"prompt": "x", "temprature": 1},
        {"prompt": "x", "stop": ["a"], "response_format": {"type": "json_object"}},
        {"messages": []},
    ],
)
def test_the_schema_of_a_job_accepts_what_the_worker_accepts(body: dict[str, Any]) -> None:
    schema = {**Body.model_json_schema(), "$defs": Body.model_json_schema()["$defs"]}
    assert REF.format(model="JobBody") in references(document())
    try:
        encode_body(body)
        legal = True
    except JobError:
        legal = False
    assert Draft202012Validator(schema).is_valid(body) == legal


@pytest.mark.redis_server
def test_the_document_is_served_without_a_key(gateway: GatewayProcess) -> None:
    answer = get(f"{gateway.url}/openapi.json")
    assert answer.status == 200
    assert answer.json == json.loads(json.dumps(document()))
    assert post(f"{gateway.url}/openapi.json", {}).status == 405


@pytest.mark.redis_server
def test_the_answer_to_a_wrong_method_names_the_methods_of_its_path(gateway: GatewayProcess) -> None:
    answer = ask("PUT", f"{gateway.url}/v1/files", {})
    assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, POST"
