"""`prefixwise serve` without any option but a port: a newcomer's first server, with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from prefixwise.models.sources import embedded_model_path
from tests.server.app_client import error_of
from tests.server.real_requests import fetch
from tests.server.server_process import ServerProcess, server_process
from tests.warm_program import FRESH

# The examples of the README and of docs/reranking.md, with their scores in float32, to which
# tests/docs/test_examples.py holds them to the printed digit; bfloat16, the default on some CPUs, moves the third.
EXAMPLE: dict[str, Any] = {
    "query": "Review: ",
    "items": ["I loved every minute of it.", "It broke after two days.", "Wonderful service, friendly people."],
    "suffix": " Sentiment:",
    "labels": [" positive", " negative"],
    "apply_softmax": True,
}
POSITIVE = [0.9510, 0.2121, 0.9990]
RERANK_EXAMPLE: dict[str, Any] = {
    "query": "When does the train to Berlin leave?",
    "documents": [
        "Trains are a safe way to travel.",
        "The train to Berlin leaves at 10:15 from platform 4.",
        "Berlin has a large central station.",
        "The shop sells keys and locks.",
    ],
}
RELEVANCE = {1: 0.4984, 2: 0.4755, 3: 0.4453, 0: 0.3946}


@pytest.fixture(scope="module")
def starting() -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FRESH, "1")  # as a newcomer starts it
        with server_process(program=("prefixwise", "serve"), wait=False) as server:
            server.wait_until_listening()
            yield server


@pytest.fixture(scope="module")
def server(starting: ServerProcess) -> ServerProcess:
    starting.wait_for_line("ready on http")
    return starting


def test_it_says_that_it_is_not_ready_while_it_loads(starting: ServerProcess) -> None:
    """The first test of this module: the model takes seconds."""
    for path in ("/health", "/health_generate", "/v1/prefix"):
        response = fetch("GET", f"{starting.url}{path}")
        assert error_of(response) == (503, "server_error", "not_ready", None)
    assert fetch("GET", f"{starting.url}/server_info").json()["status"] == "starting"


def test_the_example_of_the_readme_works(server: ServerProcess) -> None:
    answer = fetch("POST", f"{server.url}/v1/score", json=EXAMPLE).json()
    positive = [row[0] for row in answer["scores"]]
    assert sorted(range(3), key=positive.__getitem__) == [1, 0, 2]
    assert positive == pytest.approx(POSITIVE, abs=0.01)
    assert [sum(row) for row in answer["scores"]] == pytest.approx([1] * 3)
    assert answer["model"] == embedded_model_path().stem


def test_the_example_of_reranking_works(server: ServerProcess) -> None:
    answer = fetch("POST", f"{server.url}/v1/rerank", json=RERANK_EXAMPLE).json()
    ranked = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert list(ranked) == list(RELEVANCE)
    assert ranked == pytest.approx(RELEVANCE, abs=0.02)
    assert "no reranker profile is known" in answer["meta"]["warnings"][0]


def test_it_is_healthy(server: ServerProcess) -> None:
    assert fetch("GET", f"{server.url}/health").json() == {"status": "ok"}
    answer = fetch("GET", f"{server.url}/health_generate")
    assert answer.status_code == 200
    assert answer.json()["milliseconds"] > 0


def test_it_shows_its_model(server: ServerProcess) -> None:
    (entry,) = fetch("GET", f"{server.url}/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (embedded_model_path().stem, 8192)


def test_it_tokenizes(server: ServerProcess) -> None:
    answer = fetch("POST", f"{server.url}/tokenize", json={"text": [" positive", "🙂 naïve"]}).json()
    (label, *rest), text = answer["tokens"]
    assert not rest
    assert len(text) > 1
    url, body = f"{server.url}/v1/score", {**EXAMPLE, "apply_softmax": False}
    by_name = fetch("POST", url, json={**body, "labels": [" positive"]}).json()["scores"]
    by_id = fetch("POST", url, json={**body, "labels": None, "label_token_ids": [label]}).json()["scores"]
    assert by_id == by_name
