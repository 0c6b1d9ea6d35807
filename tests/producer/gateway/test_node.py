"""The official `openai` package for Node, unmodified: chat, streaming, batches and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.node.run import run_module
from tests.producer.gateway.harness import GatewayProcess
from tests.producer.gateway.test_openai_batches import line, text

pytestmark = [pytest.mark.redis_server, pytest.mark.timeout(300)]
START = """
import fs from "node:fs";
import OpenAI, { toFile } from "openai";
const client = new OpenAI({ baseURL: "%s/v1", apiKey: "none", maxRetries: 0, timeout: 60_000 });
const question = (n, more = {}) => ({
  model: "fake", messages: [{ role: "user", content: `Question ${n}` }], max_tokens: 3, ...more,
});
const ended = async (id) => {
  for (;;) {
    const batch = await client.batches.retrieve(id);
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
};
const lines = async (id) => {
  const text = await (await client.files.content(id)).text();
  return text.trim().split("\\n").map((one) => JSON.parse(one));
};
const show = (value) => console.log(JSON.stringify(value));
"""


def shown(code: str, gateway: GatewayProcess, folder: Path) -> Any:
    """Run JavaScript after `START`, and return the value that it shows."""
    done = run_module(START % gateway.url + code, folder)
    assert done.returncode == 0, done.stdout + done.stderr + gateway.log
    return json.loads(done.stdout)


def test_chat_returns_the_text_and_the_usage(gateway: GatewayProcess, tmp_path: Path) -> None:
    answer = shown("show(await client.chat.completions.create(question(1)))", gateway, tmp_path)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text(1)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_the_chunks_of_a_stream_join_to_the_text_and_end_with_the_usage(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    code = """
    const stream = await client.chat.completions.create(
      question(2, { max_tokens: 20, n: 2, stream: true, stream_options: { include_usage: true } }));
    const chunks = [];
    for await (const chunk of stream) chunks.push(chunk);
    show(chunks);
    """
    chunks = shown(code, gateway, tmp_path)
    joined, reasons = {0: "", 1: ""}, {}
    for choice in [choice for chunk in chunks for choice in chunk["choices"]]:
        joined[choice["index"]] += choice["delta"].get("content") or ""
        reasons |= {choice["index"]: choice["finish_reason"]} if choice["finish_reason"] else {}
    assert joined[0] == text(2, 20)
    assert len(joined[1].split()) == 20
    assert reasons == {0: "length", 1: "length"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 40


def test_the_streaming_helper_gives_the_final_message_and_completions_stream_too(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    code = """
    const helper = client.chat.completions.stream(question(3, { max_tokens: 10 }));
    const message = await helper.finalContent();
    let joined = "";
    for await (const chunk of await client.completions.create(
      { model: "fake", prompt: "Once", max_tokens: 10, stream: true })) joined += chunk.choices[0]?.text ?? "";
    const whole = await client.completions.create({ model: "fake", prompt: "Once", max_tokens: 10 });
    show({ message, joined, whole: whole.choices[0].text });
    """
    found = shown(code, gateway, tmp_path)
    assert found["message"] == text(3, 10)
    assert found["joined"] == found["whole"] != ""


def test_leaving_a_stream_cancels_its_job(gateway: GatewayProcess, tmp_path: Path) -> None:
    code = """
    const { data: stream, response } = await client.chat.completions.create(
      question(4, { max_tokens: 5000, stream: true })).withResponse();
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    const id = response.headers.get("x-request-id");
    const job = await fetch(`${client.baseURL}/jobs/${id}?wait=30`);
    show(await job.json());
    """
    assert shown(code, gateway, tmp_path)["status"] == "cancelled"


@pytest.mark.parametrize("source", ["fs.createReadStream('in.jsonl')", "await toFile(fs.readFileSync('in.jsonl'))"])
def test_a_batch_is_uploaded_run_and_read(gateway: GatewayProcess, tmp_path: Path, source: str) -> None:
    requests = [line(n) for n in range(5)] + [line(5, temperature=-1)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    code = f"""
    const file = await client.files.create({{ file: {source}, purpose: "batch" }});
    const made = await client.batches.create(
      {{ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h", metadata: {{ a: "b" }} }});
    const batch = await ended(made.id);
    const ids = [];
    for await (const one of client.batches.list({{ limit: 1 }})) ids.push(one.id);
    show({{ made, batch, ids, output: await lines(batch.output_file_id), errors: await lines(batch.error_file_id) }});
    """
    found = shown(code, gateway, tmp_path)
    assert found["batch"]["status"] == "completed"
    assert found["batch"]["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
    assert found["batch"]["metadata"] == {"a": "b"}
    assert found["made"]["id"] in found["ids"]
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in found["output"]}
    assert texts == {f"q-{n}": text(n) for n in range(5)}
    assert [one["custom_id"] for one in found["errors"]] == ["q-5"]


def test_a_batch_is_cancelled_and_every_line_has_its_end(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line(n, max_tokens=2000)) + "\n" for n in range(20)))
    code = """
    const file = await client.files.create({ file: fs.createReadStream("in.jsonl"), purpose: "batch" });
    const made = await client.batches.create(
      { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
    const asked = await client.batches.cancel(made.id);
    const batch = await ended(made.id);
    const files = [batch.output_file_id, batch.error_file_id].filter((id) => id);
    show({ asked, batch, lines: (await Promise.all(files.map(lines))).flat() });
    """
    found = shown(code, gateway, tmp_path)
    assert found["asked"]["status"] in ("cancelling", "cancelled")
    assert found["batch"]["status"] == "cancelled"
    assert sorted(one["custom_id"] for one in found["lines"]) == sorted(f"q-{n}" for n in range(20))


def test_errors_are_of_the_packages_classes(gateway: GatewayProcess, tmp_path: Path) -> None:
    code = """
    const attempts = {
      model: () => client.chat.completions.create(question(1, { model: "other" })),
      range: () => client.chat.completions.create(question(1, { temperature: -1 })),
      stream: () => client.chat.completions.create(question(1, { temperature: -1, stream: true })),
      file: () => client.files.retrieve("file-unknown"),
      batch: () => client.batches.create(
        { input_file_id: "file-unknown", endpoint: "/v1/chat/completions", completion_window: "24h" }),
    };
    const found = {};
    for (const [name, attempt] of Object.entries(attempts)) {
      found[name] = await attempt().then(
        () => "no error", (error) => [error.constructor.name, error.status, error.code, error.param]);
    }
    show(found);
    """
    found = shown(code, gateway, tmp_path)
    assert found["model"][:3] == ["NotFoundError", 404, "model_not_found"]
    assert found["range"][:2] == ["BadRequestError", 400]
    assert found["range"][3] == "temperature"
    assert found["stream"] == found["range"]
    assert found["file"][:3] == ["NotFoundError", 404, "not_found"]
    assert found["batch"][:2] == ["NotFoundError", 404]
