"""What a client can do with the body of a request: maximal texts in every text field of every route, small bodies that
grow, and JSON that costs more than text.

The server may have 2 GB. Before it had limits, a query of 16 MiB took more and ended it. The tests that are marked slow
also send what takes long, and judge by the time that `/health` took: run them on a quiet machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from prefixwise.server.app import ROUTES
from prefixwise.server.config import DEFAULT_MAX_REQUEST_BYTES
from tests.hostile.attacks import MB, Cost, cost_of
from tests.server.server_process import ServerProcess, server_process

PATIENCE = 300  # seconds for requests that a busy machine may take a minute for
LIMIT = 2 * 10**9  # bytes of memory that the server may have, which is 100 MB when idle
SPENT = 400 * MB  # of memory above the idle server, for one body: the promise is 1.5 GB
MAX_STALL = 0.25  # seconds

TEXT = "@"  # in a body: where the text goes
SCORED = {"query": "a", "items": ["b"], "labels": ["y"]}
RANKED = {"query": "a", "documents": ["b"]}
JUDGED = {"messages": [{"role": "user", "content": "a {item}"}], "items": ["b"], "answers": "1-5"}
TOO_LONG = "context_too_long"
SERVED = None

# Path, fields with one text that fills the body, and the error's code.
TEXTS: list[tuple[str, dict[str, Any], str | int | None]] = [
    ("/v1/score", {**SCORED, "query": TEXT}, TOO_LONG),
    ("/v1/score", {**SCORED, "query": TEXT, "tokenization": "joint"}, TOO_LONG),
    ("/v1/score", {**SCORED, "items": [TEXT]}, TOO_LONG),
    ("/v1/score", {**SCORED, "items": TEXT}, TOO_LONG),
    ("/v1/score", {**SCORED, "items": ["b", TEXT], "on_item_error": "report"}, SERVED),
    ("/v1/score", {**SCORED, "items": [TEXT], "max_tokens_per_item": 8}, SERVED),
    ("/v1/score", {**SCORED, "items": [TEXT], "max_tokens_per_item": 8, "tokenization": "joint"}, SERVED),
    ("/v1/score", {**SCORED, "labels": [TEXT]}, TOO_LONG),
    ("/v1/score", {**SCORED, "labels": [TEXT], "label_scoring": "sequence", "score_mode": "prob"}, TOO_LONG),
    ("/v1/score", {**SCORED, "suffix": TEXT}, TOO_LONG),
    ("/v1/score", {**SCORED, "model": TEXT}, "model_not_found"),
    ("/v1/score", {"requests": [{**SCORED, "query": TEXT}, SCORED]}, SERVED),
    ("/score", {"text_1": TEXT, "text_2": "b"}, TOO_LONG),
    ("/score", {"text_1": "a", "text_2": [TEXT]}, TOO_LONG),
    ("/generative_scoring", {"query": TEXT, "items": ["b"], "label_token_ids": [1]}, TOO_LONG),
    (
        "/generative_scoring",
        {"query": "a", "items": [TEXT], "label_token_ids": [1], "add_special_tokens": False},
        TOO_LONG,
    ),
    ("/v1/rerank", {**RANKED, "query": TEXT}, TOO_LONG),
    ("/v1/rerank", {**RANKED, "instruction": TEXT}, TOO_LONG),
    ("/v1/rerank", {**RANKED, "instruct": TEXT}, 400),  # SGLang's error has the status as its code
    ("/v1/rerank", {**RANKED, "documents": ["b", {"text": TEXT}]}, SERVED),
    ("/v1/rerank", {**RANKED, "documents": [TEXT], "truncation_side": "left"}, SERVED),
    ("/v1/rerank", {**RANKED, "documents": [TEXT], "max_chunks_per_doc": 4}, SERVED),
    ("/v1/rerank", {**RANKED, "documents": [TEXT], "truncation": False}, TOO_LONG),
    ("/v2/rerank", {**RANKED, "documents": [TEXT], "max_tokens_per_doc": 9}, SERVED),
    ("/v1/reranking", {"query": "a", "input": [TEXT]}, SERVED),
    ("/v1/ranking", {"query": {"text": TEXT}, "passages": [{"text": "b"}]}, TOO_LONG),
    ("/v1/ranking", {"query": {"text": "a"}, "passages": [{"text": TEXT}]}, TOO_LONG),
    ("/rerank", {"query": "a", "texts": [TEXT]}, SERVED),
    ("/tokenize", {"text": TEXT}, TOO_LONG),
    ("/tokenize", {"prompt": ["a", TEXT]}, TOO_LONG),
    ("/v1/prefix", {"query": TEXT}, TOO_LONG),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": TEXT}, "lora_updating_disabled"),
    ("/v1/unload_lora_adapter", {"lora_name": TEXT}, "lora_updating_disabled"),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": TEXT}, "lora_updating_disabled"),
    ("/unload_lora_adapter", {"lora_name": TEXT}, "lora_updating_disabled"),
    ("/v1/prefix", {"query": "a", "profile": "default", "instruction": TEXT}, TOO_LONG),
    ("/v1/judge", {**JUDGED, "messages": [{"role": "user", "content": "{item}" + TEXT}]}, TOO_LONG),
    ("/v1/judge", {**JUDGED, "items": [TEXT]}, TOO_LONG),
    ("/v1/judge", {**JUDGED, "items": [TEXT], "max_tokens_per_item": 8}, SERVED),
    ("/v1/judge", {**JUDGED, "answers": ["b", TEXT]}, TOO_LONG),
    ("/v1/judge", {**JUDGED, "answers": TEXT}, "invalid_answers"),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}, TOO_LONG),
    ("/v1/completions", {"prompt": ["a", TEXT], "max_tokens": 0, "echo": True, "logprobs": 5}, TOO_LONG),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}, TOO_LONG),
    ("/detokenize", {"tokens": TEXT}, "invalid_tokens_type"),
    ("/classify", {"input": TEXT}, TOO_LONG),
    ("/classify", {"input": ["a", TEXT], "truncate_prompt_tokens": -1}, SERVED),
    ("/classify", {"input": [TEXT], "truncate_prompt_tokens": 9, "truncation_side": "left"}, SERVED),
    ("/v1/embeddings", {"input": TEXT}, TOO_LONG),
    ("/v1/embeddings", {"input": ["a", TEXT], "truncate_prompt_tokens": -1}, SERVED),
]  # fmt: skip
IDS = {"label_token_ids": [1], "score_mode": "prob"}
WORDS = "word " * 6000  # about as many tokens

# Small bodies whose tokens are many: what every item repeats.
GROWING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/score", {**SCORED, "items": [""] * 100_000, "suffix": WORDS}),
    ("/v1/score", {**SCORED, "items": [""] * 100_000, "query": WORDS, "tokenization": "joint"}),
    ("/v1/score", {**SCORED, "items": [""] * 100_000, "query": WORDS, "item_first": True}),
    ("/v1/score", {**IDS, "query": [1], "items": [[]] * 100_000, "suffix": [1] * 8000}),
    ("/v1/score", {"requests": [{**SCORED, "items": [""] * 1000, "suffix": WORDS}] * 5}),
    ("/v1/rerank", {"query": "a" * 60_000, "documents": [""] * 100_000}),  # no place to cut: 6 GB of text
    ("/v1/judge", {**JUDGED, "messages": [{"role": "user", "content": "{item}" + WORDS}], "items": [""] * 100_000}),
]  # fmt: skip


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, ServerProcess]]:
    """By whether the model is a classifier."""
    common = ("--embedded-tokenizer", f"--memory-limit={LIMIT}")
    with ExitStack() as stack:
        found = {
            is_classifier: stack.enter_context(server_process(*common, *more, wait=False))
            for is_classifier, more in ((False, ()), (True, ("--num-classes=3",)))
        }
        for server in found.values():
            server.wait_until_ready()
        yield found


def filled(fields: dict[str, Any], text: bytes = b"x ", size: int = DEFAULT_MAX_REQUEST_BYTES) -> bytes:
    """The body, as large as the server takes it."""
    before, after = json.dumps(fields).encode().split(TEXT.encode())
    return before + text * ((size - len(before) - len(after)) // len(text)) + after


def send(server: ServerProcess, path: str, body: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=PATIENCE)


def code_of(response: httpx.Response) -> object:
    if response.status_code == 200:
        return None
    answer = response.json()
    return answer["error"]["code"] if "error" in answer else answer["code"]


def attack(server: ServerProcess, path: str, body: bytes) -> tuple[object, Cost]:
    """The error's code, and what the answer cost. Prints it: `pytest -rP`."""
    with cost_of(server) as cost:
        code = code_of(send(server, path, body))
    print(f"{path} {len(body):,} bytes: {code}; {cost.bytes / MB:.0f} MB, stall {cost.stall * 1000:.0f} ms")
    assert server.process.poll() is None
    return code, cost


def test_every_route_that_takes_text_is_attacked() -> None:
    posts = {route.path for route in ROUTES if "POST" in route.handlers}
    assert {path for path, *_ in TEXTS} == posts - {"/reports/view", "/ping"}  # which take artifacts, and no body


@pytest.mark.parametrize(
    ("path", "fields", "code"), TEXTS, ids=lambda value: None if value is None else str(value)[:60]
)
def test_a_text_that_fills_the_body(
    servers: dict[bool, ServerProcess], path: str, fields: dict[str, Any], code: object
) -> None:
    """Tokenized, so much text would take about 20 s of the processor."""
    found, cost = attack(servers[path == "/classify"], path, filled(fields))
    assert found == code
    assert cost.bytes < SPENT
    assert cost.cpu_seconds < 10


@pytest.mark.parametrize(("path", "fields", "code"), TEXTS, ids=lambda value: None)
def test_a_lone_surrogate_is_a_fault_of_its_text(
    servers: dict[bool, ServerProcess], path: str, fields: dict[str, Any], code: object
) -> None:
    """It is JSON, and UTF-8 cannot encode it."""
    body = json.dumps(fields).replace(TEXT, "\\ud800").encode()
    response = send(servers[path == "/classify"], path, body)
    assert response.status_code < 500
    assert "must be valid Unicode" in response.text or code_of(response) == code


@pytest.mark.parametrize(
    ("path", "fields"), GROWING, ids=["suffix", "joint", "item_first", "ids", "requests", "rerank", "judge"]
)
def test_a_small_body_that_grows(servers: dict[bool, ServerProcess], path: str, fields: dict[str, Any]) -> None:
    """Its items repeat a text, 4 to 800 million tokens in all."""
    found, cost = attack(servers[False], path, json.dumps(fields).encode())
    assert found == "too_many_tokens"
    assert cost.bytes < SPENT
    assert cost.cpu_seconds < 10


@pytest.mark.parametrize(
    ("start", "part", "end", "code"),
    [
        (b'{"query":[', b"1,", b"1]}", "too_many_values"),
        (b'{"query":[', b'{"":0},', b"1]}", "too_many_values"),
        (b'{"query":[', b"[],", b"1]}", "too_many_values"),
        (b"", b"[", b"", "too_many_values"),
        (b'{"query":"', b'{[,:\\"', b'"}', "missing_items"),  # one string
    ],
    ids=["ints", "objects", "lists", "nested", "string"],
)
def test_json_that_costs_more_than_text(
    servers: dict[bool, ServerProcess], start: bytes, part: bytes, end: bytes, code: str
) -> None:
    body = start + part * ((DEFAULT_MAX_REQUEST_BYTES - len(start) - len(end)) // len(part)) + end
    found, cost = attack(servers[False], "/v1/score", body)
    assert found == code
    assert cost.bytes < SPENT


def test_a_deadline_is_kept_while_text_is_tokenized(servers: dict[bool, ServerProcess]) -> None:
    """Before: answered after 20 s. Here all texts would take as long; their tokenization ends with the request."""
    documents = ["some words and more words " * 20] * 20_000
    body = json.dumps({"query": "a", "documents": documents}).encode()
    with cost_of(servers[False]) as cost:
        response = send(servers[False], "/v1/rerank", body, **{"X-Request-Timeout": "1"})
        assert (response.status_code, code_of(response)) == (504, "deadline_exceeded")
        assert send(servers[False], "/tokenize", b'{"text": "a b"}').json()["count"] == 2
    assert cost.bytes < SPENT


@pytest.mark.slow
class TestQuietMachine:
    """Judged by time, and longer."""

    @pytest.mark.parametrize(("path", "fields", "code"), TEXTS, ids=lambda value: None)
    @pytest.mark.parametrize("text", ["🙂", "\\n", "7"], ids=["emoji", "escaped", "digits"])
    def test_no_text_freezes_the_server(
        self, servers: dict[bool, ServerProcess], path: str, fields: dict[str, Any], code: object, text: str
    ) -> None:
        found, cost = attack(servers[path == "/classify"], path, filled(fields, text.encode()))
        assert found == code
        assert cost.bytes < SPENT
        assert cost.stall < MAX_STALL

    def test_texts_that_fit_do_not_either(self, servers: dict[bool, ServerProcess]) -> None:
        documents = ["some words and more words " * 20] * 30_000
        body = json.dumps({"query": "a " * 4000, "documents": documents}).encode()
        found, cost = attack(servers[False], "/v1/rerank", body)
        assert found in (None, "queue_full", "request_too_large")
        assert cost.bytes < SPENT
        assert cost.stall < MAX_STALL

    def test_twenty_at_once_do_not_add_up(self, servers: dict[bool, ServerProcess]) -> None:
        documents = ["some words and more words " * 20] * 30_000
        body = json.dumps({"query": "a", "documents": documents}).encode()
        with cost_of(servers[False]) as cost, ThreadPoolExecutor(20) as clients:
            headers = {"X-Request-Timeout": "20"}
            waiting = [clients.submit(send, servers[False], "/v1/rerank", body, **headers) for _ in range(20)]
            statuses = {each.result().status_code for each in waiting}
        print(f"{statuses}: {cost.bytes / MB:.0f} MB, stall {cost.stall * 1000:.0f} ms")
        assert statuses <= {200, 413, 429, 503, 504}
        assert cost.bytes < 1500 * MB
        assert cost.stall < MAX_STALL
