"""The OpenAPI document: it is valid, complete, and what it says is so."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

import prefixwise
from prefixwise.backends.fake import FakeBackend
from prefixwise.server.app import ROUTES
from prefixwise.server.middleware import needs_key
from prefixwise.server.openapi import openapi_document
from prefixwise.server.openapi_errors import ERROR_TABLE
from tests.server.app_client import AppClient, app_client
from tests.server.server_process import SCHEMATHESIS, server_process
from tests.server.word_tokenizer import word_tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENT = openapi_document()
WHOLE_INPUTS = ("/classify", "/v1/embeddings", "/v1/judge")  # in the group of scores
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]

# What a command line or Python caller can get wrong, not a request; and what nobody receives.
NOT_OVER_HTTP = {"invalid_delimiter_token_id", "cancelled", "too_many_pipelined"}


def test_it_is_served(client: AppClient) -> None:
    assert client.get("/openapi.json").json() == DOCUMENT


def test_its_schemas_are_valid_and_its_references_lead_somewhere() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert jsonschema_rs.meta.is_valid({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}), name
    references = set(re.findall(r"'\$ref': '([^']+)'", str(DOCUMENT)))
    assert references == {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}


def test_it_names_every_route_and_method_and_no_other() -> None:
    served = {(each.path, method.lower()) for each in ROUTES for method in each.handlers}
    assert served == set(OPERATIONS), "see OPERATIONS of prefixwise/server/openapi_operations.py"


def test_every_operation_is_in_a_group_of_the_page() -> None:
    groups = [tag["name"] for tag in DOCUMENT["tags"]]
    assert groups == ["Score", "Complete", "Rerank", "Prefix", "LoRA", "Server", "Reports"]
    of = {
        path: {tag for each in methods.values() for tag in each["tags"]} for path, methods in DOCUMENT["paths"].items()
    }
    assert set().union(*of.values()) == set(groups)
    for path, group in (("scor", "Score"), ("rank", "Rerank"), ("prefix", "Prefix"), ("/reports", "Reports")):
        assert all((path in each) == (found == {group}) for each, found in of.items() if each not in WHOLE_INPUTS)


def test_operation_ids_are_unique() -> None:
    ids = [DOCUMENT["paths"][path][method]["operationId"] for path, method in OPERATIONS]
    assert len(set(ids)) == len(ids)


def test_every_error_code_in_the_source_is_in_the_table_of_errors() -> None:
    listed = {code for row in ERROR_TABLE for code in row.codes}
    root = Path(prefixwise.__file__).parent
    rooms = [root / room for room in ("contract", "prompts", "plan", "engine", "server/routes", "server/dialects")]
    files = [*(path for room in rooms for path in room.rglob("*.py")), *(root / "server").glob("*.py")]
    written = {code for path in files for code in re.findall(r'code="([a-z_]+)"', path.read_text("utf-8"))}
    assert "queue_full" in written
    assert written - listed <= NOT_OVER_HTTP
    # The rest is put together from the field's name.
    assert all(code.startswith(("invalid_", "missing_", "empty_")) for code in listed - written)


@pytest.mark.parametrize("has_key", [True, False])
def test_a_key_is_mentioned_only_where_one_is_asked_for(has_key: bool) -> None:
    document = openapi_document(has_key=has_key)
    assert ("security" in document) == has_key
    for path, method in OPERATIONS:
        operation = document["paths"][path][method]
        assert ("401" in operation["responses"]) == (has_key and needs_key(path))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path, methods in DOCUMENT["paths"].items()
        for name in methods.get("post", {})
        .get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("examples", ())
    ],
)
def test_examples_work(path: str, name: str) -> None:
    content: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    body = content["examples"][name]["value"]
    schema = {**content["schema"], "components": DOCUMENT["components"]}
    assert jsonschema_rs.validator_for(schema).is_valid(body)
    backend = FakeBackend()
    if path == "/classify":
        backend.config = replace(backend.config, num_classes=3)
    with app_client(backend=backend, tokenizer=word_tokenizer()) as client:
        # No folder of an adapter is there, and loading one is not allowed: test_loras.py does it.
        assert client.post(path, body).status_code == (403 if "lora" in path else 200)


# All values that a schema makes special, and what one response leads to. Random requests take long to make.
DAILY = "--phases=examples,coverage,stateful"


@pytest.mark.parametrize(
    "options",
    [[DAILY, "--max-examples=4"], pytest.param(["--max-examples=60"], marks=pytest.mark.slow)],
    ids=["daily", "all phases"],
)
def test_the_server_does_what_the_document_says(tmp_path: Path, options: list[str]) -> None:
    """More than 2,000 requests, good and bad: no 5xx, no status, type or body that is not in the document."""
    options = [*options, "--exclude-path=/classify"]
    assert run_schemathesis(tmp_path, options, "--tokenizer") >= 2000


@pytest.mark.slow
def test_a_classifier_does_what_the_document_says(tmp_path: Path) -> None:
    options = [DAILY, "--max-examples=4", "--include-path=/classify"]
    assert run_schemathesis(tmp_path, options, "--tokenizer", "--num-classes=3") >= 50


def run_schemathesis(folder: Path, options: list[str], *server_options: str) -> int:
    """How many requests it has sent, all of which got what the document says."""
    # A second, the shortest X-Request-Timeout, may be too short on a busy machine.
    (folder / "schemathesis.toml").write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", 504]\n'
    )
    fixed = ("--seed=7", "--generation-database=none")  # nothing that an earlier run found
    with server_process(*server_options) as server:
        done = subprocess.run(
            [*SCHEMATHESIS, *fixed, "--continue-on-failure", *options, f"{server.url}/openapi.json"],
            cwd=folder,
            # Hypothesis keeps its table of characters where all our tests have it: to make it takes seconds.
            env={**os.environ, "NO_COLOR": "1", "HYPOTHESIS_STORAGE_DIRECTORY": str(ROOT / ".hypothesis")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    cases = re.search(r"(\d+) generated", done.stdout)
    assert cases is not None, done.stdout
    return int(cases[1])
