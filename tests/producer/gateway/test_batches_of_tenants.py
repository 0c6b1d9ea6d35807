"""Batches of several tenants over two gateways and two clerks: each tenant's files and batches are its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.producer.gateway.harness import Stack, client_of
from tests.support import eventually

pytestmark = [pytest.mark.redis_server, pytest.mark.timeout(300)]
URL = "/v1/chat/completions"
TENANTS = {".": "", "..": "priority=low", "open": ""}
COUNT = 20


def lines(tenant: str) -> bytes:
    def line(number: int) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": str(number)}], "max_tokens": 3}
        return {"custom_id": f"{tenant}/{number}", "method": "POST", "url": URL, "body": body}

    return "".join(json.dumps(line(number)) + "\n" for number in range(COUNT)).encode()


def create(client: openai.OpenAI, file_id: str) -> Any:
    key = {"Idempotency-Key": "the same of all"}
    return client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h", extra_headers=key)


def trespasses(client: openai.OpenAI, file_id: str, batch_id: str) -> list[Callable[[], object]]:
    """What a tenant may try with the ids of another."""
    return [
        lambda: client.files.retrieve(file_id),
        lambda: client.files.content(file_id),
        lambda: client.files.delete(file_id),
        lambda: client.batches.retrieve(batch_id),
        lambda: client.batches.cancel(batch_id),
        lambda: client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h"),
    ]


def test_tenants_with_any_name_run_batches_at_once_and_reach_nothing_of_each_other(own_stack: Stack) -> None:
    path, keys = own_stack.keys_file(**TENANTS)
    gateways = [own_stack.gateway(api_keys=str(path), wait=False) for _ in range(2)]
    own_stack.worker()
    own_stack.clerk()
    own_stack.clerk()
    for gateway in gateways:
        gateway.wait_until_it_answers()
    clients = {tenant: [client_of(gateway, key) for gateway in gateways] for tenant, key in keys.items()}
    made = {}
    for tenant, (first, second) in clients.items():
        file = first.files.create(file=("in.jsonl", lines(tenant)), purpose="batch")
        batch = create(first, file.id)
        assert create(second, file.id).id == batch.id
        made[tenant] = (file.id, batch.id)
    for tenant, (client, _) in clients.items():
        file_id, batch_id = made[tenant]
        eventually(lambda c=client, b=batch_id: c.batches.retrieve(b).status == "completed", 120, 0.1)  # type: ignore[misc]
        output = client.batches.retrieve(batch_id).output_file_id
        assert output is not None
        ids = [json.loads(line)["custom_id"] for line in client.files.content(output).text.splitlines()]
        assert sorted(ids) == sorted(f"{tenant}/{number}" for number in range(COUNT))
        for other in clients.keys() - {tenant}:
            for file in (file_id, output):
                for trespass in trespasses(clients[other][0], file, batch_id):
                    with pytest.raises(openai.NotFoundError):
                        trespass()
        assert {one.id for one in client.files.list()} == {file_id, output}
        assert [one.id for one in client.batches.list()] == [batch_id]
