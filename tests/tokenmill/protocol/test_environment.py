"""For an unknown environment variable a warning names the most similar known variable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from producer.gateway.settings import VARIABLES as OF_THE_GATEWAY
from tokenmill.protocol.environment import COMMANDS, GATEWAY, misspelt
from tokenmill.protocol.environment import KNOWN as WITHOUT_WORKER
from worker.settings import VARIABLES

KNOWN = WITHOUT_WORKER | VARIABLES
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("TOKENMILL_MAX_NUM_SEQ", "TOKENMILL_MAX_NUM_SEQS"),
        ("TOKENMILL_MODLE", "TOKENMILL_MODEL"),
        ("TOKENMILL_QUEU", "TOKENMILL_QUEUE"),
        ("TOKENMILL_REDIS_URL", "TOKENMILL_REDIS"),
        ("TOKENMILL_CALLBACK_HOST", "TOKENMILL_CALLBACK_HOSTS"),
        ("TOKENMILL_queue", "TOKENMILL_QUEUE"),
        ("TOKENMIL_QUEUE", "TOKENMILL_QUEUE"),
        ("tokenmill_redis", "TOKENMILL_REDIS"),
        ("TOKENMILL_SOMETHING_ELSE_ENTIRELY", None),
    ],
)
def test_a_misspelt_variable_is_reported_with_the_right_name(name: str, nearest: str | None) -> None:
    (found,) = misspelt({name: "secret"}, KNOWN)
    assert (found.name, found.nearest) == (name, nearest)
    assert name in str(found)
    assert "secret" not in str(found)


def test_variables_of_other_programs_are_ignored() -> None:
    environ = dict.fromkeys((*KNOWN, "PATH", "TOKENIZERS_PARALLELISM", "TOKEN", "TOKENMILL_TEST_NO_SKIP"), "x")
    # Kubernetes sets these for a service called tokenmill.
    environ |= {
        "TOKENMILL_SERVICE_HOST": "10.0.0.1",
        "TOKENMILL_SERVICE_PORT_HTTP": "80",
        "TOKENMILL_PORT": "tcp://x:1",
    }
    environ |= {"TOKENMILL_PORT_80_TCP_ADDR": "10.0.0.1", "TOKENMILL_REDIS_SERVICE_PORT": "6379"}
    assert not list(misspelt(environ, KNOWN))


@pytest.mark.parametrize("folder", ["producer", "worker", "docs"])
def test_every_variable_that_code_or_docs_name_is_known(folder: str) -> None:
    named = {
        name
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md")
        for name in re.findall(r"\bTOKENMILL_[A-Z][A-Z_]+[A-Z]\b", path.read_text())
    }
    assert named - {"TOKENMILL_SOME_NAME", "TOKENMILL_QUEU"} <= KNOWN


def test_the_names_of_the_gateways_settings_are_those_of_its_fields() -> None:
    assert COMMANDS | GATEWAY == OF_THE_GATEWAY
