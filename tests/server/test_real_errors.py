"""Every error that the API has, from `prefixwise serve` with a real model on a real port: a row for each way to it.

`when` is the row of the design's table of errors; rows without one there say what the field is.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson
import pytest

from prefixwise.server.openapi_errors import ERROR_TABLE
from tests.checkpoints import make_hf_checkpoint
from tests.server.app_client import error_of
from tests.server.real_requests import TIMEOUT, fetch, leftovers, plain_request, wait_for_requests
from tests.server.server_process import ServerProcess, real_server

IDS: dict[str, Any] = {"query": [1, 2, 3], "items": [[4, 5], [6], []], "label_token_ids": [7, 8]}
TEXT: dict[str, Any] = {"query": "Is this ", "items": ["a dog?", "a fox?"], "labels": [" yes", " no"]}
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
JUDGE: dict[str, Any] = {"messages": [{"role": "user", "content": "a {item}"}], "items": ["b"], "answers": "yes/no"}
KEY = "sesame"
AUTHORIZATION = {"Authorization": f"Bearer {KEY}"}
DELIMITER = 100

BAD, VALUE, MISSING = "invalid_request_error", "invalid_value_error", "missing_parameter_error"
SERVER = "server_error"


class Case(NamedTuple):
    """A request, and the error that it must get."""

    when: str
    body: object  # bytes are sent as they are, None is no body
    status: int
    type: str
    code: str
    param: str | None = None
    server: str = "plain"  # which of SERVERS
    method: str = "POST"
    path: str = "/v1/score"
    headers: Mapping[str, str] = {}


def ids(**changes: Any) -> dict[str, Any]:
    return {**IDS, **changes}


def text(**changes: Any) -> dict[str, Any]:
    return {**TEXT, **changes}


NO_JSON = "body is not JSON / not an object"
ABSENT = "`query` / `items` / labels missing"
NO_QUERY = "`query` empty (text or ids)"
NO_ITEMS = "`items` empty list"
NO_LABELS = "labels empty list"
WRONG_TYPE = "wrong type of query / items / labels"
MIXED = "text query with id items, or the reverse, or a mix inside items"
NO_UNICODE = "a lone surrogate (not in the table)"
NO_INTEGER = "a token id that is not an integer (a bool is not an integer)"
NEGATIVE = "negative token id"
BEYOND = "token id at or above the model's vocabulary (embedding rows, so added tokens are fine)"
NO_BOOL = "`apply_softmax` / `item_first` not a bool"
UNKNOWN = "unknown value of an enum field"
LONG_LABEL = "label string is not one token (single-token modes)"
COLLISION = "delimiter inside query or an item (flag set)"
TOO_MANY = "more items than `--max-items-per-request`"
TOO_MANY_SCORES = "items x labels above what one answer may have (not in the table)"
TOO_MANY_TOKENS = "tokens of all items above what one request may have (not in the table)"
TOO_MANY_VALUES = "JSON values above what one body may have (not in the table)"
TOO_LONG = "prefix + longest item does not fit the model"
TOO_LARGE = "body larger than `--max-request-bytes`"
NO_MODEL = "unknown `model`"
NO_KEY = "missing or wrong API key"
DEADLINE = "deadline passed (`--request-timeout`, or the header `X-Request-Timeout`, in seconds)"
NOWHERE = "unknown route / wrong method"
CONFLICT = (
    "both `labels` and `label_token_ids`; `score_mode` that contradicts `apply_softmax`; "
    "wrong number of labels for the mode"
)
DENSE = "`packed` with `dense` asked for beyond dense's bound"

CASES = [
    Case("a compressed body", b"x", 400, BAD, "unsupported_encoding", headers={"Content-Encoding": "gzip"}),
    Case(NO_JSON, b"no json", 400, BAD, "invalid_json"),
    Case(NO_JSON, b"", 400, BAD, "invalid_json"),
    Case(NO_JSON, b'["query"]', 400, BAD, "invalid_json"),
    Case(NO_JSON, b'{"query": "\xff"}', 400, BAD, "invalid_json"),
    Case(ABSENT, {}, 400, MISSING, "missing_query", "query"),
    Case(ABSENT, ids(query=None), 400, MISSING, "missing_query", "query"),
    Case(ABSENT, ids(items=None), 400, MISSING, "missing_items", "items"),
    Case(ABSENT, ids(label_token_ids=None), 400, MISSING, "missing_label_token_ids", "label_token_ids"),
    Case(NO_QUERY, ids(query=[]), 400, VALUE, "empty_query", "query"),
    Case(NO_QUERY, text(query=""), 400, VALUE, "empty_query", "query"),
    Case(NO_ITEMS, ids(items=[]), 400, VALUE, "empty_items", "items"),
    Case(NO_LABELS, ids(label_token_ids=[]), 400, VALUE, "empty_label_token_ids", "label_token_ids"),
    Case(NO_LABELS, text(labels=[]), 400, VALUE, "empty_label_token_ids", "labels"),
    Case(WRONG_TYPE, ids(query=5), 400, BAD, "invalid_query_type", "query"),
    Case(WRONG_TYPE, ids(items={"a": 1}), 400, BAD, "invalid_items_type", "items"),
    Case(WRONG_TYPE, ids(label_token_ids="7"), 400, BAD, "invalid_label_token_ids_type", "label_token_ids"),
    Case(MIXED, ids(query="text"), 400, BAD, "mixed_input_types", "items"),
    Case(MIXED, text(query=[1]), 400, BAD, "mixed_input_types", "items"),
    Case(MIXED, ids(items=[[1], "a"]), 400, BAD, "mixed_input_types", "items"),
    Case(NO_UNICODE, json.dumps(text(query="\ud800")).encode(), 400, VALUE, "invalid_unicode", "query"),
    Case(NO_UNICODE, json.dumps(text(items=["a", "\udc00b"])).encode(), 400, VALUE, "invalid_unicode", "items"),
    Case(NO_UNICODE, b'{"query": "\\ud800", "items": [NaN]}', 400, BAD, "invalid_json"),
    Case(NO_INTEGER, ids(query=[1, True]), 400, BAD, "invalid_token_id_type", "query"),
    Case(NO_INTEGER, ids(items=[[1.5]]), 400, BAD, "invalid_token_id_type", "items"),
    Case(NO_INTEGER, ids(label_token_ids=[False]), 400, BAD, "invalid_token_id_type", "label_token_ids"),
    Case(NEGATIVE, ids(items=[[1], [-4]]), 400, VALUE, "negative_token_id", "items"),
    Case(NEGATIVE, ids(label_token_ids=[-1]), 400, VALUE, "negative_token_id", "label_token_ids"),
    Case(BEYOND, ids(query=[512]), 422, VALUE, "token_id_exceeds_vocab", "query"),
    Case(BEYOND, ids(items=[[511], [512]]), 422, VALUE, "token_id_exceeds_vocab", "items"),
    Case(BEYOND, ids(label_token_ids=[512]), 422, VALUE, "token_id_exceeds_vocab", "label_token_ids"),
    Case(NO_BOOL, ids(apply_softmax=1), 400, BAD, "invalid_apply_softmax_type", "apply_softmax"),
    Case(NO_BOOL, ids(item_first="yes"), 400, BAD, "invalid_item_first_type", "item_first"),
    Case(UNKNOWN, ids(score_mode="best"), 400, VALUE, "invalid_score_mode", "score_mode"),
    Case(UNKNOWN, ids(label_scoring="all"), 400, VALUE, "invalid_label_scoring", "label_scoring"),
    Case(UNKNOWN, ids(tokenization="odd"), 400, VALUE, "invalid_tokenization", "tokenization"),
    Case(UNKNOWN, ids(algorithm="fast"), 400, VALUE, "invalid_algorithm", "algorithm"),
    Case(UNKNOWN, ids(on_item_error="cry"), 400, VALUE, "invalid_on_item_error", "on_item_error"),
    Case(LONG_LABEL, text(labels=["yes no", " no"]), 400, VALUE, "label_not_single_token", "labels"),
    Case(COLLISION, ids(items=[[1, DELIMITER]]), 400, VALUE, "delimiter_collision", "items", "limited"),
    Case(COLLISION, ids(query=[DELIMITER]), 400, VALUE, "delimiter_collision", "query", "limited"),
    Case(TOO_MANY, ids(items=[[1]] * 21), 400, VALUE, "too_many_items", "items", "limited"),
    Case(
        *(TOO_MANY_SCORES, ids(items=[[1]] * 4000, label_token_ids=[1] * 3000), 400, VALUE, "too_many_scores", "items"),
    ),
    Case(TOO_MANY_TOKENS, ids(items=[[]] * 10_000, suffix=[1] * 1000), 400, VALUE, "too_many_tokens"),
    Case(TOO_MANY_VALUES, b'{"query": [' + b"1," * 2**21 + b"1]}", 400, VALUE, "too_many_values"),
    Case(TOO_LONG, ids(items=[[1] * 32_768]), 400, VALUE, "context_too_long", "items"),
    Case(TOO_LONG, ids(query=[1] * 32_769), 400, VALUE, "context_too_long", "items"),
    Case(TOO_LARGE, ids(padding="x" * 100_000), 413, BAD, "request_too_large", None, "limited"),
    Case(NO_MODEL, ids(model="another"), 404, "model_error", "model_not_found", "model"),
    Case(NO_KEY, IDS, 401, "authentication_error", "invalid_api_key", None, "limited", headers={"Authorization": ""}),
    Case(
        *(NO_KEY, IDS, 401, "authentication_error", "invalid_api_key", None, "limited"),
        headers={"Authorization": f"Bearer {KEY}!"},
    ),
    Case(
        *(DEADLINE, plain_request(0, 2000, item_len=20), 504, SERVER, "deadline_exceeded"),
        headers={"X-Request-Timeout": "0.001"},  # it passes while the body is read
    ),
    Case(NOWHERE, IDS, 404, BAD, "not_found", path="/v1/scores"),
    Case(NOWHERE, None, 405, BAD, "method_not_allowed", method="GET"),
    Case(CONFLICT, ids(labels=["yes"]), 400, VALUE, "conflicting_parameters", "labels"),
    Case(
        *(CONFLICT, ids(score_mode="logit", apply_softmax=True), 400, VALUE),
        *("conflicting_parameters", "score_mode"),
    ),
    Case(
        *(CONFLICT, ids(score_mode="logit_diff", label_token_ids=[1]), 400, VALUE),
        *("wrong_label_count", "label_token_ids"),
    ),
    Case(
        *(
            CONFLICT,
            text(score_mode="sigmoid", labels=[" yes", " no", "The"]),
            400,
            VALUE,
            "wrong_label_count",
            "labels",
        ),
    ),
    Case(DENSE, ids(items=[[1] * 16_384]), 400, VALUE, "dense_mask_too_large", "algorithm", "limited"),
    # What the design's table leaves to its spirit.
    Case("labels", text(labels=" yes"), 400, BAD, "invalid_labels_type", "labels"),
    Case("suffix", text(suffix=5), 400, BAD, "invalid_suffix_type", "suffix"),
    Case("model", ids(model=5), 400, BAD, "invalid_model_type", "model"),
    Case("return_debug", ids(return_debug="yes"), 400, BAD, "invalid_return_debug_type", "return_debug"),
    Case(
        *("max_tokens_per_item", ids(max_tokens_per_item=0), 400, VALUE),
        *("invalid_max_tokens_per_item", "max_tokens_per_item"),
    ),
    Case(
        *("X-Request-Timeout", IDS, 400, VALUE, "invalid_request_timeout", "X-Request-Timeout"),
        headers={"X-Request-Timeout": "soon"},
    ),
    Case("no tokenizer", TEXT, 400, BAD, "no_tokenizer", server="bare"),
    Case("text", {}, 400, MISSING, "missing_text", "text", path="/tokenize"),
    Case("text", {"text": []}, 400, VALUE, "empty_text", "text", path="/tokenize"),
    Case("text", {"text": 5}, 400, BAD, "invalid_text_type", "text", path="/tokenize"),
    Case(
        *("add_special_tokens", {"text": "a", "add_special_tokens": 1}, 400, BAD),
        *("invalid_add_special_tokens_type", "add_special_tokens"),
        path="/tokenize",
    ),
    Case(
        *("ttl_seconds", {"query": [1], "ttl_seconds": 0}, 400, VALUE, "invalid_ttl_seconds", "ttl_seconds"),
        path="/v1/prefix",
    ),
    Case(
        *("pins leave room for a request", {"query": [1]}, 400, VALUE, "prefix_cache_full", "query", "limited"),
        path="/v1/prefix",
    ),
    Case(
        *("no prefix is kept", {"query": [1]}, 400, VALUE, "prefix_cache_disabled", None, "bare"),
        path="/v1/prefix",
    ),
    Case("top k", ids(return_debug=True, debug_top_k=0), 400, VALUE, "invalid_debug_top_k", "debug_top_k"),
    Case("report", None, 400, MISSING, "missing_name", "name", method="GET", path="/reports/view"),
    Case("report", {}, 400, VALUE, "invalid_artifact", "name", path="/reports/view"),
    Case("prefix id", None, 404, BAD, "not_found", "id", method="DELETE", path="/v1/prefix/nobody"),
    Case("documents", {"query": "a"}, 400, MISSING, "missing_documents", "documents", path="/v1/rerank"),
    *(
        Case(name, {"query": "a", "documents": ["b"], name: value}, 400, kind, code, name, path="/v1/rerank")
        for name, value, kind, code in (
            ("documents", [], VALUE, "empty_documents"),
            ("documents", "b", BAD, "invalid_documents_type"),
            ("profile", 5, BAD, "invalid_profile_type"),
            ("profile", "nothing", VALUE, "invalid_profile"),
            ("instruction", 5, BAD, "invalid_instruction_type"),
            ("return_documents", 1, BAD, "invalid_return_documents_type"),
            ("return_raw_scores", 1, BAD, "invalid_return_raw_scores_type"),
            ("truncate", 1, BAD, "invalid_truncate_type"),
            ("top_n", 0, VALUE, "invalid_top_n"),
            ("max_tokens_per_doc", 0, VALUE, "invalid_max_tokens_per_doc"),
            ("max_chunks_per_doc", 0, VALUE, "invalid_max_chunks_per_doc"),
            ("priority", -1, VALUE, "invalid_priority"),
            ("rank_fields", ["title"], VALUE, "invalid_rank_fields"),
            ("truncation_side", "up", VALUE, "invalid_truncation_side"),
            ("chat_template_kwargs", {"other": 1}, BAD, "invalid_chat_template_kwargs_type"),
            ("truncate_prompt_tokens", -2, VALUE, "invalid_truncate_prompt_tokens"),
            ("use_activation", 0, BAD, "invalid_use_activation_type"),
            ("cache_salt", "a", VALUE, "unsupported_parameter"),
            ("truncation", 1, BAD, "invalid_truncation_type"),
            ("raw_scores", 1, BAD, "invalid_raw_scores_type"),
        )
    ),
    *(
        Case(name, {"query": "a", "input": ["b"], name: value}, 400, kind, code, name, path="/v1/reranking")
        for name, value, kind, code in (
            ("input", None, MISSING, "missing_input"),
            ("input", [], VALUE, "empty_input"),
            ("input", "b", BAD, "invalid_input_type"),
            ("return_input", 1, BAD, "invalid_return_input_type"),
            ("rewrite_query", True, VALUE, "invalid_rewrite_query"),
            ("top_k", 0, VALUE, "invalid_top_k"),
        )
    ),
    *(
        Case(name, {"query": {"text": "a"}, "passages": [], name: value}, 400, kind, code, name, path="/v1/ranking")
        for name, value, kind, code in (
            ("passages", None, MISSING, "missing_passages"),
            ("passages", [], VALUE, "empty_passages"),
            ("passages", "b", BAD, "invalid_passages_type"),
            ("truncate", "START", VALUE, "invalid_truncate"),
        )
    ),
    *(
        Case(name, {**JUDGE, name: value}, 400, kind, code, name, path="/v1/judge")
        for name, value, kind, code in (
            ("messages", None, MISSING, "missing_messages"),
            ("messages", [], VALUE, "empty_messages"),
            ("messages", "a", BAD, "invalid_messages_type"),
            ("messages", [{"role": "user", "content": "a"}], VALUE, "invalid_messages"),
            ("messages", JUDGE["messages"], BAD, "no_chat_template"),
            ("answers", None, MISSING, "missing_answers"),
            ("answers", [], VALUE, "empty_answers"),
            ("answers", 5, BAD, "invalid_answers_type"),
            ("answers", "5", VALUE, "invalid_answers"),
            ("values", 5, BAD, "invalid_values_type"),
            ("values", [1], VALUE, "invalid_values"),
        )
    ),
    *(
        Case(name, {**COMPLETION, name: value}, 400, kind, code, name, path="/v1/completions")
        for name, value, kind, code in (
            ("prompt", None, MISSING, "missing_prompt"),
            ("prompt", "", VALUE, "empty_prompt"),
            ("prompt", 5, BAD, "invalid_prompt_type"),
            ("max_tokens", None, MISSING, "missing_max_tokens"),
            ("max_tokens", 16, VALUE, "invalid_max_tokens"),
            ("echo", 1, BAD, "invalid_echo_type"),
            ("logprobs", 21, VALUE, "invalid_logprobs"),
            ("temperature", "hot", BAD, "invalid_temperature_type"),
            ("seed", "a", BAD, "invalid_seed_type"),
            ("n", 2, VALUE, "invalid_n"),
            ("return_tokens_as_token_ids", 1, BAD, "invalid_return_tokens_as_token_ids_type"),
        )
    ),
    *(
        Case(name, {**CHAT, name: value}, 400, kind, code, name, path="/v1/chat/completions")
        for name, value, kind, code in (
            ("max_completion_tokens", 2, VALUE, "invalid_max_completion_tokens"),
            ("logprobs", 1, BAD, "invalid_logprobs_type"),
            ("top_logprobs", 21, VALUE, "invalid_top_logprobs"),
        )
    ),
    Case("detokenize", {}, 400, MISSING, "missing_tokens", "tokens", path="/detokenize"),
    Case("detokenize", {"tokens": 5}, 400, BAD, "invalid_tokens_type", "tokens", path="/detokenize"),
    Case("user", {"input": "a", "user": 5}, 400, BAD, "invalid_user_type", "user", path="/classify"),
    Case("classifier", {"input": "a"}, 400, VALUE, "not_a_classifier", path="/classify"),
    *(
        Case(name, ids(**{"embed_override_token_id": 3, name: value}), 400, kind, code, name)
        for name, value, kind, code in (
            ("return_pooled_hidden_states", 1, BAD, "invalid_return_pooled_hidden_states_type"),
            ("embed_override_token_id", -1, VALUE, "invalid_embed_override_token_id"),
            ("query_embed_overrides", 5, BAD, "invalid_query_embed_overrides_type"),
            ("item_embed_overrides", 5, BAD, "invalid_item_embed_overrides_type"),
            ("query_embed_overrides", [[1.0]], VALUE, "invalid_embed_overrides"),
            ("query_embed_overrides", [[0.0] * 64] * 2, VALUE, "embed_overrides_mismatch"),
        )
    ),
    Case(
        "overrides",
        ids(embed_override_token_id=5, max_tokens_per_item=1, item_embed_overrides=[[[0.0] * 64], None, None]),
        *(400, VALUE, "embed_overrides_truncated", "item_embed_overrides"),
    ),
    Case(
        *("overrides", ids(query_embed_overrides=[[1.0]]), 400, MISSING),
        *("missing_embed_override_token_id", "embed_override_token_id"),
    ),
    Case("softmax", ids(softmax=1), 400, BAD, "invalid_softmax_type", "softmax"),
    Case("many", {"requests": 5}, 400, BAD, "invalid_requests_type", "requests"),
    Case("many", {"requests": []}, 400, VALUE, "empty_requests", "requests"),
    Case("many", {"requests": [IDS] * 1001}, 400, VALUE, "too_many_requests", "requests"),
    Case(
        *("pairs", {"text_1": "a", "text_2": "b", "request_id": 5}, 400, BAD, "invalid_request_id_type", "request_id"),
        path="/score",
    ),
    Case("pairs", {"documents": "b"}, 400, MISSING, "missing_queries", "queries"),
    Case("pairs", {"queries": [], "documents": "b"}, 400, VALUE, "empty_queries", "queries"),
    Case("pairs", {"queries": 5, "documents": "b"}, 400, BAD, "invalid_queries_type", "queries"),
    *(
        case
        for name, other in (("text_1", "text_2"), ("text_2", "text_1"), ("data_1", "data_2"), ("data_2", "data_1"))
        for case in (
            Case("pairs", {other: "b"}, 400, MISSING, f"missing_{name}", name, path="/score"),
            Case("pairs", {other: "b", name: []}, 400, VALUE, f"empty_{name}", name, path="/score"),
            Case("pairs", {other: "b", name: 5}, 400, BAD, f"invalid_{name}_type", name, path="/score"),
        )
    ),
]

# What takes more than one request has a test of its own, here or where the file before `::` says.
SHOWN_BY_A_TEST = {
    (404, BAD, "no_report_viewer"): "test_pages::test_without_a_report_source_the_viewer_says_so",
    # queue full (by tokens)
    (429, "rate_limit_error", "queue_full"): "test_real_errors::test_a_full_queue_refuses",
    # deadlines that the measured rate cannot meet
    (429, "rate_limit_error", "queue_too_long"): "test_overload::TestDeadlines",
    (413, BAD, "deadline_too_short"): "test_overload::TestDeadlines",
    # a device that hangs, or fails for good
    (503, SERVER, "engine_stalled"): "test_faults::TestFaultsThatStay",
    (503, SERVER, "engine_failed"): "test_faults::TestFaultsThatStay",
    (503, SERVER, "engine_restarting"): "test_workers::TestDeaths",
    # shutting down / not warm yet
    (503, SERVER, "shutting_down"): "test_real_load::test_what_is_in_flight_at_a_sigterm_ends_well",
    (503, SERVER, "not_ready"): "test_real_embedded::test_it_says_that_it_is_not_ready_while_it_loads",
    # anything unforeseen: nothing makes a sound model fail, so it is a broken backend behind the same application
    (500, SERVER, "internal_error"): "test_score::test_the_error_of_a_failing_device_hides_its_cause",
    (400, BAD, "invalid_http"): "test_real_errors::test_bytes_that_are_not_http",
    # before the application: headers, connections; on a server without a key
    (400, BAD, "invalid_host"): "test_connections::test_a_head_beyond_its_limits_is_refused",
    (431, BAD, "too_many_headers"): "test_connections::test_a_head_beyond_its_limits_is_refused",
    (431, BAD, "headers_too_large"): "test_connections::test_a_head_beyond_its_limits_is_refused",
    (408, BAD, "header_timeout"): "test_connections::test_a_silent_connection_is_closed",
    (408, BAD, "idle_timeout"): "test_connections::test_a_body_that_pauses_is_refused",
    (408, BAD, "slow_transfer"): "test_connections::test_a_body_must_arrive_at_the_least_rate",
    (400, VALUE, "response_too_large"): "test_answers::TestSize",
    (503, SERVER, "body_memory_full"): "test_body_memory::TestRequests",
    (503, SERVER, "too_many_connections"): "test_connections::test_if_all_are_busy_a_reserve_answers_health_alone",
    (403, "permission_error", "origin_not_allowed"): "test_middleware::TestWebPages",
    (403, "permission_error", "content_type_not_allowed"): "test_middleware::TestWebPages",
    (403, "permission_error", "host_not_allowed"): "test_middleware::TestWebPages",
    # the fake model's formula as a classifier's head
    (400, VALUE, "no_label_logits"): "test_rerank::test_a_classifier_reranks_and_does_not_score",
    (400, VALUE, "no_vocabulary"): "test_completions::TestRefused",
    # on a server that loads LoRA adapters
    (403, "permission_error", "lora_updating_disabled"): "test_loras::test_only_where_it_is_allowed",
    **{
        (400, kind, code): "test_loras::test_every_fault_has_its_error"
        for kind, codes in (
            (VALUE, ("invalid_lora", "invalid_lora_name", "lora_already_loaded", "too_many_loras")),
            (MISSING, ("missing_lora_name", "missing_lora_path")),
            (BAD, ("invalid_lora_name_type", "invalid_lora_path_type", "invalid_load_inplace_type")),
        )
        for code in codes
    },
}


@pytest.fixture(scope="module")
def servers(
    small_server: ServerProcess, checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """`plain`: no options. `limited`: all that refuse. `bare`: no tokenizer, and no prefix is kept."""
    no_tokenizer = make_hf_checkpoint(tmp_path_factory.mktemp("checkpoints") / "bare", "qwen3")
    options = {
        "limited": [
            f"--model-path={checkpoint_of('qwen3')}",
            "--dtype=float32",
            f"--api-key={KEY}",
            f"--multi-item-scoring-delimiter={DELIMITER}",
            "--max-items-per-request=20",
            "--max-request-bytes=100000",
            "--max-queued-tokens=1000",
            "--multi-item-mask-impl=dense",
            "--algorithm=packed",
            "--prefix-cache-bytes=140000",  # one block
        ],
        "bare": [f"--model-path={no_tokenizer}", "--dtype=float32", "--disable-radix-cache"],
    }
    with ExitStack() as stack:
        running = {name: stack.enter_context(real_server(*args, wait=False)) for name, args in options.items()}
        for server in running.values():
            server.wait_until_ready()
        yield {"plain": small_server, **running}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.when[:24]}")
def test_a_fault_has_its_error(servers: dict[str, ServerProcess], case: Case) -> None:
    response = send(servers[case.server], case)
    assert error_of(response) == (case.status, case.type, case.code, case.param)
    assert "Traceback" not in response.text
    assert "site-packages" not in response.text


def test_workers_give_the_same_errors(servers: dict[str, ServerProcess], worker_server: ServerProcess) -> None:
    cases = [case for case in CASES if case.server == "plain"]
    assert len(cases) > 50
    for case in cases:
        theirs, ours = send(servers["plain"], case), send(worker_server, case)
        assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json()), case.when


def send(server: ServerProcess, case: Case) -> httpx.Response:
    content = case.body if isinstance(case.body, bytes) else None if case.body is None else orjson.dumps(case.body)
    headers = {**AUTHORIZATION, **case.headers}
    return fetch(case.method, f"{server.url}{case.path}", content=content, headers=headers)


def test_no_error_of_the_api_is_left_out() -> None:
    known = {(row.status, row.type, code) for row in ERROR_TABLE for code in row.codes}
    shown = {(case.status, case.type, case.code) for case in CASES}
    assert shown | SHOWN_BY_A_TEST.keys() == known
    assert not shown & SHOWN_BY_A_TEST.keys()


@pytest.mark.parametrize("name", SHOWN_BY_A_TEST.values())
def test_what_is_shown_elsewhere_is(name: str) -> None:
    module, _, test = name.partition("::")
    assert callable(getattr(import_module(f"tests.server.{module}"), test))


def test_bytes_that_are_not_http(servers: dict[str, ServerProcess]) -> None:
    answer = b""
    with socket.create_connection(("127.0.0.1", servers["plain"].port), timeout=TIMEOUT) as connection:
        connection.sendall(b"hello there\r\n\r\n")
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert orjson.loads(body)["error"]["code"] == "invalid_http"


def test_a_full_queue_refuses(servers: dict[str, ServerProcess]) -> None:
    """While a request runs that is larger than the bound; alone it is taken."""
    server = servers["limited"]
    large = {**plain_request(1, 20, prefix_len=1200), "algorithm": "serial"}
    large["query"] = [token % DELIMITER for token in large["query"]]
    large["items"] = [[token % DELIMITER for token in item] for item in large["items"]]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(send, server, Case("", large, 200, "", ""))
        wait_for_requests(server, 1, AUTHORIZATION)
        refused = send(server, Case("", IDS, 429, "", ""))
        assert running.result().status_code == 200
    assert error_of(refused) == (429, "rate_limit_error", "queue_full", None)
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert send(server, Case("", IDS, 200, "", "")).status_code == 200


def test_after_all_that_every_server_answers_as_before(servers: dict[str, ServerProcess]) -> None:
    """Two tests may have left work behind: a deadline, a full queue."""
    request = Case("", IDS, 200, "", "")
    answers = {name: send(server, request).json() for name, server in servers.items()}
    assert answers["plain"]["scores"] == answers["bare"]["scores"] != answers["limited"]["scores"]  # it has a delimiter
    for server in servers.values():
        assert leftovers(server, AUTHORIZATION) == (0, 0, 0)
