"""`--url`: a server that is running scores, with the answers that a model in this process gives."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixwise.client.client import Client
from tests.batch.inputs import read_jsonl, rows, write_jsonl
from tests.cli.conftest import RunMain
from tests.cli.fake_program import NO_PROFILE, fake_engine
from tests.cli.sample_request import INPUT, TOO_LONG, WITH_LABELS
from tests.cli.sample_rerank import WITH_DOCUMENTS
from tests.server.server_process import server_process

KEY = "a-key"
FAKE_SERVER = ("tests.cli.fake_program", "serve", f"--api-key={KEY}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process(program=FAKE_SERVER) as server:
        yield server.url


@pytest.fixture
def ask(run_main: RunMain, url: str) -> RunMain:
    """Run a verb against the server."""
    return lambda *args, **given: run_main(*args, "--url", url, "--api-key", KEY, **given)


def scored(ran: Any) -> Any:
    """The JSON without the tokens that were cached, of which a server has more."""
    body = json.loads(ran.out)
    del body["usage"]["prompt_tokens_details"]
    return body


@pytest.mark.parametrize(
    "command",
    [
        ("score", *WITH_LABELS),
        ("score", *WITH_LABELS, "--softmax", "--top", "1", "--suffix", " Answer: "),
        ("score", *INPUT, "--label-token-id", "7", "--score-mode", "logit", "--max-tokens-per-item", "2"),
        ("score", *WITH_LABELS, "--item", TOO_LONG, "--on-item-error", "report"),
        ("rerank", *WITH_DOCUMENTS),
        ("rerank", *WITH_DOCUMENTS, "--top", "1", "--instruction", "Is it a dog?"),
    ],
)
def test_a_server_gives_the_answer_of_this_process(ask: RunMain, run_main: RunMain, command: tuple[str, ...]) -> None:
    asked, local = ask(*command, "--json", "--quiet"), run_main(*command, "--json", "--quiet")
    assert (asked.status, local.status) == (0, 0), asked.err + local.err
    assert scored(asked) == scored(local)
    assert asked.err == local.err  # what was cut, what has no score, which profile was used


def test_an_address_with_v1(run_main: RunMain, url: str) -> None:
    ran = run_main("score", *WITH_LABELS, "--url", f"{url}/v1/", "--api-key", KEY)
    assert (ran.status, ran.err.startswith(f"fake-model at {url}: ")) == (0, True), ran.err


def test_the_summary_names_the_server(ask: RunMain, url: str) -> None:
    ran = ask("score", *WITH_LABELS)
    assert ran.err.startswith(f"fake-model at {url}: 3 items, ")
    assert "loaded" not in ran.err
    assert ask("rerank", *WITH_DOCUMENTS).err.splitlines()[0] == f"warning: {NO_PROFILE}"


def test_debug_comes_from_the_server(ask: RunMain) -> None:
    assert "debug" in json.loads(ask("score", *WITH_LABELS, "--json", "--debug").out)
    assert "debug" not in json.loads(ask("score", *WITH_LABELS, "--json").out)


def test_a_profile_is_the_request_s(ask: RunMain) -> None:
    ran = ask("rerank", *WITH_DOCUMENTS, "--profile", "qwen3-reranker")
    assert (ran.status, "qwen3-reranker" in ran.err.splitlines()[0]) == (1, True), ran.err


def test_errors_of_the_server_have_the_hints_of_the_command_line(ask: RunMain) -> None:
    ran = ask("score", *WITH_LABELS, "--item", TOO_LONG)
    first, second = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert first.startswith("error: items[3] must fit the model's 64 tokens")
    assert "--max-tokens-per-item" in second


def test_labels_that_are_missing_are_the_same_error_with_a_server(ask: RunMain, run_main: RunMain) -> None:
    """The server alone knows whether its model is a classifier, which needs none."""
    asked, local = ask("score", *INPUT), run_main("score", *INPUT)
    assert (asked.status, asked.err) == (local.status, local.err) == (2, local.err)
    assert local.err.startswith("error: expected --label or --label-token-id, got neither")


@pytest.mark.parametrize(
    ("args", "status", "error"),
    [
        (("--api-key", "k"), 2, "error: --api-key is for --url, which was not given"),
        (("--timeout-sec", "9"), 2, "error: --timeout-sec is for --url, which was not given"),
        (("--url", "http://127.0.0.1:9", "--timeout-sec", "inf"), 2, "error: expected a time limit above 0"),
        (
            ("--url", "http://127.0.0.1:9", "--model", "m", "--dtype", "float32"),
            2,
            "error: expected --url without --model, --dtype: the server has its own model and engine",
        ),
        (("--url", "127.0.0.1:30000"), 2, "error: expected an address like http://127.0.0.1:30000"),
    ],
)
def test_options_that_do_not_go_together_are_a_usage_error(
    run_main: RunMain, args: tuple[str, ...], status: int, error: str
) -> None:
    ran = run_main("score", *WITH_LABELS, *args)
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.splitlines()[0].startswith(error)


@pytest.mark.parametrize("verb", ["score", "rerank", "batch"])
@pytest.mark.parametrize(("given", "seconds"), [((), 180.0), (("--timeout-sec", "600"), 600.0)])
def test_a_request_has_the_time_that_was_given(
    ask: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, given: tuple[str, ...], seconds: float
) -> None:
    opened: list[float] = []

    class Recorded(Client):
        def __init__(self, url: str, **settings: Any) -> None:
            opened.append(settings["timeout"])
            super().__init__(url, **settings)

    monkeypatch.setattr("prefixwise.client.client.Client", Recorded)
    files = ("--input", str(write_jsonl(tmp_path / "in.jsonl", rows(1))), "--output", str(tmp_path / "out.jsonl"))
    args = {"score": WITH_LABELS, "rerank": WITH_DOCUMENTS, "batch": (*files, "--label", "y")}[verb]
    assert (ask(verb, *args, *given).status, opened) == (0, [seconds])


def test_a_server_that_does_not_run_is_one_clear_line(run_main: RunMain) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    first, second = run_main("score", *WITH_LABELS, "--url", url).err.splitlines()
    assert first.startswith(f"error: cannot reach {url}: ")
    assert second.startswith("hint: --url names a running server")


def test_a_wrong_key_is_one_clear_line(run_main: RunMain, url: str) -> None:
    ran = run_main("score", *WITH_LABELS, "--url", url, "--api-key", "wrong")
    assert ran.status == 1
    assert ran.err.startswith("error: ")
    assert "key" in ran.err.splitlines()[0]


def test_a_key_of_the_environment_is_for_servers_alone(
    run_main: RunMain, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXWISE_API_KEY", KEY)
    assert run_main("score", *WITH_LABELS).status == 0
    assert run_main("score", *WITH_LABELS, "--url", url).status == 0


class TestBatch:
    BAD = ({"id": "bad", "query": 5, "items": ["a"]}, {"id": "long", "query": "q", "items": [TOO_LONG]})

    def test_rows_get_the_scores_of_this_process(
        self, ask: RunMain, run_main: RunMain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("prefixwise.batch.worker.open_engine", fake_engine)
        documents = {"id": "documents", "query": "fox?", "documents": ["a fox", "a dog"]}
        surrogate = {"id": "\ud800", "query": "q", "items": ["\udc00", "a"], "on_item_error": "report"}
        path = write_jsonl(tmp_path / "in.jsonl", [*rows(40), *self.BAD, documents, surrogate])
        files = ("batch", "--input", str(path), "--label", "y", "--label", "z", "--part-rows", "9", "--output")
        asked = ask(*files, str(tmp_path / "asked.jsonl"))
        local = run_main(*files, str(tmp_path / "local.jsonl"))
        assert (asked.status, local.status) == (0, 0), asked.err + local.err
        assert (tmp_path / "asked.jsonl").read_bytes() == (tmp_path / "local.jsonl").read_bytes()
        last = read_jsonl(tmp_path / "asked.jsonl")[-1]
        assert (last["id"], last["item_errors"][0]["code"]) == ("\ud800", "invalid_unicode")
        failed = [(row["id"], row["code"]) for row in read_jsonl(tmp_path / "asked.jsonl.errors.jsonl")]
        assert failed == [("bad", "invalid_query_type"), ("long", "context_too_long")]
        assert asked.err == local.err.replace("local.jsonl", "asked.jsonl")

    def test_an_error_of_every_row_ends_the_job_and_leaves_nothing(
        self, ask: RunMain, run_main: RunMain, url: str, tmp_path: Path
    ) -> None:
        path = write_jsonl(tmp_path / "in.jsonl", rows(40))
        files = ("batch", "--input", str(path), "--output", str(tmp_path / "out.jsonl"), "--label", "y")
        ran = run_main(*files, "--url", url, "--api-key", "wrong")
        assert ran.status == 1
        assert ran.err.startswith(f"error: the server at {url} failed at the row of line ")
        assert ask(*files).status == 0
        assert len(read_jsonl(tmp_path / "out.jsonl")) == 40

    def test_a_cluster_or_a_model_of_one_s_own_does_not_go_with_a_server(self, ask: RunMain) -> None:
        ran = ask("batch", "--input", "in.jsonl", "--output", "out.jsonl", "--cluster", "auto", "--dtype", "float32")
        assert ran.status == 2
        assert ran.err.startswith("error: expected --url without --dtype, --cluster: the server has its own model")
