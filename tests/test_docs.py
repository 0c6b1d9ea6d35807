"""The documents are true: links lead to a file and a heading, tables match the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo

from engine.models.generation import GenerationDefaults
from producer.gateway.metrics import Metrics
from producer.gateway.settings import GatewaySettings
from tokenmill.cli.console import Exit as Ends
from tokenmill.cli.settings import CommandSettings, option, variable
from tokenmill.protocol.body import Body
from worker.ops.exits import Exit
from worker.ops.telemetry import Telemetry
from worker.settings import Settings

ROOT = Path(__file__).parent.parent
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")])
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
FAILURES = (ROOT / "docs" / "failures.md").read_text()
WORKER_STATUSES = REFERENCE.partition("### Of a worker")[2].partition("\n### ")[0]


def anchors(page: Path) -> set[str]:
    """The anchors that headings get on the usual forges."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name}: {target} leads nowhere"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target} names no heading"


def default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value: Any = info.default
    if info.default_factory is not None or value is None or value == ():
        return ""
    return f"`{'on' if value is True else 'off' if value is False else value}`"


def settings_table(kind: type[CommandSettings]) -> str:
    rows = ["| option | variable | default | meaning |", "|---|---|---|---|"]
    for name, info in kind.model_fields.items():
        meaning = (info.description or "").replace("|", "\\|")
        rows.append(f"| `{option(name)}` | `{variable(name)}` | {default(info)} | {meaning} |")
    return "\n".join(rows)


@pytest.mark.parametrize("kind", [Settings, GatewaySettings])
def test_the_settings_table_is_what_the_code_has(kind: type[CommandSettings]) -> None:
    table = settings_table(kind)
    assert table in REFERENCE, f"docs/reference.md has another table of settings; it should be:\n\n{table}\n"


@pytest.mark.parametrize("name", Body.model_fields)
def test_every_key_of_a_body_is_documented(name: str) -> None:
    assert f"`{name}`" in PROTOCOL.partition("### Body")[2].partition("\n## ")[0]
    assert re.search(rf"`{name}[`:]", (ROOT / "docs" / "requests.md").read_text())


@pytest.mark.parametrize("name", [name for name, info in Body.model_fields.items() if "float" in str(info.annotation)])
def test_every_number_that_steers_sampling_has_its_place_in_the_order_and_its_range(name: str) -> None:
    requests = (ROOT / "docs" / "requests.md").read_text()
    for heading in ("How an id is chosen", "Limits"):
        assert f"`{name}`" in requests.partition(f"## {heading}\n")[2].partition("\n## ")[0], heading


def test_every_default_that_a_model_can_give_is_documented() -> None:
    section = (ROOT / "docs" / "models.md").read_text().partition("## Defaults of sampling")[2]
    names = {field.name for field in dataclasses.fields(GenerationDefaults) if field.default is None}
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_every_exit_status_is_explained() -> None:
    for status in Exit:
        assert re.search(rf"^\| {status.value} \|", WORKER_STATUSES, re.MULTILINE), (
            f"exit status {status!r} is not documented"
        )


def test_every_variable_of_the_clerk_is_documented() -> None:
    sources = [ROOT / "producer" / name for name in ("jobs.py", "clerk.py", "webhook.py")]
    for name in {name for path in sources for name in re.findall(r"TOKENMILL_[A-Z_]+", path.read_text())}:
        assert f"| `{name}` |" in REFERENCE, f"docs/reference.md lacks {name}"


def test_every_exit_status_of_the_producers_commands_is_explained() -> None:
    table = REFERENCE.partition("### Of the commands")[2].partition("\n## ")[0]
    assert [int(status) for status in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == [int(e) for e in Ends]


def test_no_document_names_a_private_path() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(work|home|root)/", page.read_text()), (
            f"{page.name} names a path of one machine"
        )


@pytest.mark.parametrize("registry", [Telemetry().registry, Metrics().registry], ids=["worker", "gateway"])
def test_every_metric_is_documented_with_its_labels_and_its_help(registry: CollectorRegistry) -> None:
    for family in registry.collect():
        labels = sorted({key for sample in family.samples for key in sample.labels if key != "le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        row = f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels)} | {family.documentation} |"
        assert row in REFERENCE, f"docs/reference.md lacks {row}"


def test_every_log_event_is_documented() -> None:
    call = re.compile(r"\blog\.(?:debug|info|warning|error|exception)\(\s*\"([a-z_]+)\"")
    found = {
        name
        for folder in ("worker", "engine", "producer/gateway", "producer/files")
        for p in (ROOT / folder).rglob("*.py")
        for name in call.findall(p.read_text())
    }
    assert len(found) > 30
    assert {name for name in found if f"`{name}`" not in REFERENCE} == set()


def test_every_failure_names_tests_that_exist_or_its_limit() -> None:
    section = FAILURES.partition("## Failures, one by one")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|(.+)\|$", section, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert len(rows) >= 50
    written = {name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    for number, text in rows:
        named = re.findall(r"`(test_\w+)`", text)
        assert named or "Limit:" in text, f"row {number} shows nothing"
        assert set(named) <= written, f"row {number} names {set(named) - written}"


def test_every_test_that_the_page_on_failures_names_exists() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", FAILURES))
    assert len(named) > 40
    assert {name for name in named if f"def {name}(" not in code} == set()
