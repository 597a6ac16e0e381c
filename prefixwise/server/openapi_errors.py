"""The table of errors: for the OpenAPI document, the documentation and the tests."""

from __future__ import annotations

from typing import NamedTuple

from prefixwise.contract.classify import CLASSIFY_FIELDS
from prefixwise.contract.completions import CHAT_FIELDS, COMPLETION_FIELDS
from prefixwise.contract.judge import JUDGE_FIELDS
from prefixwise.contract.known_fields import PAIR_NAMES, REQUEST_ID
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import Dialect, rerank_fields


class ErrorRow(NamedTuple):
    """Errors with the same status, type and cause."""

    status: int
    type: str
    codes: tuple[str, ...]
    when: str


_BAD = "invalid_request_error"
_VALUE = "invalid_value_error"
_MISSING = "missing_parameter_error"
_SERVER = "server_error"


def _field_codes(*, is_type: bool) -> list[str]:
    """The codes of wrong types, or of wrong values, of the request fields. (TEI's and SGLang's errors have no code.)"""
    dialects: tuple[Dialect, ...] = ("cohere_v1", "infinity", "voyage", "mixedbread", "nvidia", "vllm")  # with codes
    rerank = (row for dialect in dialects for row in rerank_fields(dialect))
    rows = (*SCORE_FIELDS, *CLASSIFY_FIELDS, *JUDGE_FIELDS, *COMPLETION_FIELDS, *CHAT_FIELDS, REQUEST_ID, *rerank)
    codes = dict.fromkeys(row.kind.error_code(row.name) for row in rows)
    return [code for code in codes if code.endswith("_type") == is_type and code != "invalid_profile"]


_PAIRS = sorted(PAIR_NAMES - {"items", "documents"})

ERROR_TABLE = (
    ErrorRow(400, _BAD, ("invalid_http",), "The request is not valid HTTP/1.1."),
    ErrorRow(400, _BAD, ("invalid_host",), "The request has no Host header, or several."),
    ErrorRow(400, _BAD, ("invalid_json",), "The body is not a JSON object in UTF-8."),
    ErrorRow(400, _BAD, ("unsupported_encoding",), "The body has a Content-Encoding other than identity."),
    ErrorRow(
        400,
        _MISSING,
        (
            "missing_query",
            "missing_items",
            "missing_label_token_ids",
            "missing_embed_override_token_id",
            "missing_text",
            "missing_name",
            "missing_documents",
            "missing_input",
            "missing_passages",
            "missing_messages",
            "missing_answers",
            "missing_prompt",
            "missing_max_tokens",
            "missing_tokens",
            "missing_lora_name",
            "missing_lora_path",
            *(f"missing_{name}" for name in _PAIRS),
        ),
        "A required field is absent or null.",
    ),
    ErrorRow(
        400,
        _VALUE,
        (
            "empty_query",
            "empty_items",
            "empty_label_token_ids",
            "empty_text",
            "empty_documents",
            "empty_input",
            "empty_passages",
            "empty_messages",
            "empty_answers",
            "empty_prompt",
            *(f"empty_{name}" for name in _PAIRS),
            "empty_requests",
        ),
        "A field is empty that must not be, or a text has no token.",
    ),
    ErrorRow(
        400,
        _BAD,
        (
            *_field_codes(is_type=True),
            *(f"invalid_{name}_type" for name in _PAIRS),
            "invalid_requests_type",
            "invalid_text_type",
            "invalid_tokens_type",
            "invalid_lora_name_type",
            "invalid_lora_path_type",
            "invalid_load_inplace_type",
        ),
        "A field has a wrong type.",
    ),
    ErrorRow(400, _BAD, ("mixed_input_types",), "A request mixes text and token ids; send either text or ids."),
    ErrorRow(400, _BAD, ("invalid_token_id_type",), "A token id is not an integer; true and false are not integers."),
    ErrorRow(400, _BAD, ("no_tokenizer",), "The request holds text and the model has no tokenizer; send token ids."),
    ErrorRow(
        400,
        _VALUE,
        ("invalid_profile",),
        "The profile does not exist, cannot rerank, or is for another model; the message says which.",
    ),
    ErrorRow(400, _BAD, ("no_chat_template",), "The request has messages and the model has no chat template."),
    ErrorRow(
        400,
        _VALUE,
        ("invalid_messages", "invalid_answers", "invalid_values"),
        "The chat template does not take the messages, {item} is not in them once, or answers and values do not fit.",
    ),
    ErrorRow(
        400,
        _VALUE,
        ("no_label_logits", "no_vocabulary", "not_a_classifier"),
        "The model is a classifier, which has no logits of tokens; or it is none, and has no classes.",
    ),
    ErrorRow(400, _VALUE, ("negative_token_id",), "A token id is below 0."),
    ErrorRow(400, _VALUE, ("invalid_unicode",), "A text holds a lone surrogate, which no tokenizer can read."),
    ErrorRow(
        400,
        _VALUE,
        (
            *_field_codes(is_type=False),
            "invalid_ttl_seconds",
            "invalid_request_timeout",
        ),
        "An unknown value, or a number out of range.",
    ),
    ErrorRow(
        400,
        _VALUE,
        ("conflicting_parameters", "wrong_label_count"),
        "Parameters contradict each other, or the score mode does not take this number of labels.",
    ),
    ErrorRow(400, _VALUE, ("unsupported_parameter",), "A field that is known and not served here; leave it out."),
    ErrorRow(400, _VALUE, ("too_many_requests",), "More requests, or different first texts, than one call may have."),
    ErrorRow(
        400,
        _VALUE,
        ("label_not_single_token",),
        'A label is not exactly one token; label_scoring "sequence" takes labels of any length.',
    ),
    ErrorRow(400, _VALUE, ("delimiter_collision",), "The query or an item holds the server's delimiter token."),
    ErrorRow(
        400,
        _VALUE,
        ("invalid_embed_overrides", "embed_overrides_mismatch", "embed_overrides_truncated"),
        "Vectors do not fit the model, are not one for each placeholder token, or one of an item is cut off.",
    ),
    ErrorRow(400, _VALUE, ("too_many_items",), "More items than one request may have (--max-items-per-request)."),
    ErrorRow(400, _VALUE, ("too_many_scores",), "More scores or hidden states than one answer may have."),
    ErrorRow(400, _VALUE, ("response_too_large",), "The response could be larger than --max-response-bytes."),
    ErrorRow(400, _VALUE, ("too_many_tokens",), "More tokens than one request may have, what items repeat counted."),
    ErrorRow(400, _VALUE, ("too_many_values",), "The JSON has more values and names than one body may have."),
    ErrorRow(400, _VALUE, ("context_too_long",), "The prefix and the longest item do not fit the model."),
    ErrorRow(400, _VALUE, ("dense_mask_too_large",), "The dense mask would be larger than its bound."),
    ErrorRow(
        400,
        _VALUE,
        ("prefix_cache_full", "prefix_cache_disabled"),
        "The prefix cannot be pinned: the KV cache is full of pinned prefixes, or disabled.",
    ),
    ErrorRow(
        400,
        _VALUE,
        ("invalid_lora", "invalid_lora_name", "lora_already_loaded", "too_many_loras"),
        "The LoRA adapter cannot be loaded: its folder, its name, or as many as --max-loras are loaded.",
    ),
    ErrorRow(401, "authentication_error", ("invalid_api_key",), "The API key is missing or wrong."),
    ErrorRow(
        403,
        "permission_error",
        ("origin_not_allowed", "host_not_allowed", "content_type_not_allowed"),
        "The server has no API key, and a web page may have sent the request that is not its own.",
    ),
    ErrorRow(
        403,
        "permission_error",
        ("lora_updating_disabled",),
        "The server was not started with --allow-runtime-lora-updating.",
    ),
    ErrorRow(400, _VALUE, ("invalid_artifact",), "The artifact cannot be shown as a report; the message says why."),
    ErrorRow(404, _BAD, ("not_found",), "Nothing exists under this path or id."),
    ErrorRow(404, _BAD, ("no_report_viewer",), "The packages that render reports are not installed on the server."),
    ErrorRow(404, "model_error", ("model_not_found",), "The model is not served here."),
    ErrorRow(405, _BAD, ("method_not_allowed",), "The path does not take this method; Allow lists those it takes."),
    ErrorRow(408, _BAD, ("header_timeout", "idle_timeout"), "The headers did not arrive in time, or the body paused."),
    ErrorRow(408, _BAD, ("slow_transfer",), "The body arrived at less than --min-transfer-rate."),
    ErrorRow(413, _BAD, ("request_too_large",), "The body is larger than --max-request-bytes."),
    ErrorRow(413, _BAD, ("deadline_too_short",), "More tokens than the device can compute before the deadline."),
    ErrorRow(422, _VALUE, ("token_id_exceeds_vocab",), "A token id that the model does not have."),
    ErrorRow(429, "rate_limit_error", ("queue_full",), "Too many tokens are waiting; Retry-After says when to retry."),
    ErrorRow(429, "rate_limit_error", ("queue_too_long",), "The deadline, or another request's, could not be met."),
    ErrorRow(
        431,
        _BAD,
        ("too_many_headers", "headers_too_large"),
        "More or larger headers than --max-headers and --max-header-bytes allow.",
    ),
    ErrorRow(500, _SERVER, ("internal_error",), "An unexpected error; the log has it under the request id."),
    ErrorRow(503, _SERVER, ("not_ready", "shutting_down"), "The model is warming up, or the server is shutting down."),
    ErrorRow(
        503,
        _SERVER,
        ("engine_stalled", "engine_failed"),
        "The device hangs or has failed, or the engine process does not answer.",
    ),
    ErrorRow(503, _SERVER, ("engine_restarting",), "The engine process has ended, and the model is loaded again."),
    ErrorRow(503, _SERVER, ("body_memory_full",), "Bodies and responses fill --max-body-memory; Retry-After is set."),
    ErrorRow(503, _SERVER, ("too_many_connections",), "The server has as many connections as it may have."),
    ErrorRow(504, _SERVER, ("deadline_exceeded",), "It took longer than --request-timeout or X-Request-Timeout."),
)


def rows_of(status: int) -> list[ErrorRow]:
    """The errors with this status."""
    return [row for row in ERROR_TABLE if row.status == status]
