"""Both clients have one typed API: the same methods and parameters, request keys as keyword arguments."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill
from tokenmill import AsyncClient, AsyncGroup, AsyncJob, Client, Group, Job, batch
from tokenmill.client.params import RequestParams
from tokenmill.protocol.body import Body

ROOT = Path(__file__).parents[3]
SNIPPET = """
from tokenmill import AsyncClient, Client

def call(client: Client) -> None:
    client.submit("x", temperature=0.5, max_tokens=3, stop=["a"], priority="high")
    client.submit("x", temprature=0.5)  # sync submit
    client.submit("x", max_tokens="many")  # sync type
    list(client.map(["x"], temprature=0.5))  # sync map
    client.group("g").submit("x", temprature=0.5)  # sync group
    print([(result.index, result.prompt) for result in client.map(["x"], tenant="t", top_p=0.9)])

async def call_async(client: AsyncClient) -> None:
    await client.submit("x", temperature=0.5, max_tokens=3)
    await client.submit("x", temprature=0.5)  # async submit
    client.map(["x"], temprature=0.5)  # async map
"""


def public(kind: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in found if not name.startswith("_")}


@pytest.mark.parametrize(("sync", "aio"), [(Client, AsyncClient), (Job, AsyncJob), (Group, AsyncGroup)])
def test_both_clients_have_the_same_methods_with_the_same_parameters(sync: type, aio: type) -> None:
    assert public(sync).keys() == public(aio).keys()
    own = {"__init__": inspect.signature(sync)}, {"__init__": inspect.signature(aio)}
    for name, signature in (public(sync) | own[0]).items():
        other = (public(aio) | own[1])[name]
        assert list(signature.parameters) == list(other.parameters), name
        for parameter, twin in zip(signature.parameters.values(), other.parameters.values(), strict=True):
            assert parameter.kind == twin.kind, f"{name}({parameter.name})"
            if parameter.name in ("client", "call", "pause"):  # functions, and asyncio's counterparts of them
                continue
            assert parameter.default == twin.default, f"{name}({parameter.name})"
            assert parameter.annotation == twin.annotation, f"{name}({parameter.name})"


@pytest.mark.parametrize("kind", [Client, AsyncClient, Job, AsyncJob, Group, AsyncGroup])
def test_every_public_method_has_a_docstring(kind: type) -> None:
    assert not [name for name in public(kind) if not getattr(kind, name).__doc__]


def test_the_request_parameters_are_the_keys_of_a_body() -> None:
    arguments = {"prompt", "messages", "stream"}  # parameters of `submit` in their own right
    assert set(RequestParams.__annotations__) == set(Body.model_fields) - arguments


def test_every_exported_name_exists_and_errors_of_the_library_share_a_base() -> None:
    for module in (tokenmill, batch):
        for name in module.__all__:
            found = getattr(module, name)
            if isinstance(found, type) and issubclass(found, Exception):
                assert issubclass(found, tokenmill.TokenmillError), name
    assert issubclass(tokenmill.WaitTimeout, TimeoutError)


def test_a_type_checker_finds_misspelt_and_mistyped_parameters(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", str(snippet)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=170).stdout
    lines = {int(line.split(":")[1]) for line in told.splitlines() if ": error:" in line}
    wrong = {at for at, line in enumerate(SNIPPET.splitlines(), 1) if "# sync" in line or "# async" in line}
    assert lines == wrong, told
    assert told.count('Unexpected keyword argument "temprature"') == len(wrong) - 1
