"""The error table of the API, as data: for the OpenAPI document, the documentation page and the tests."""

from __future__ import annotations

from typing import NamedTuple


class ErrorRow(NamedTuple):
    """One way in which a request can fail."""

    status: int
    type: str
    codes: tuple[str, ...]
    when: str


_BAD = "invalid_request_error"
_VALUE = "invalid_value_error"
_MISSING = "missing_parameter_error"
_SERVER = "server_error"

ERROR_TABLE = (
    ErrorRow(400, _BAD, ("invalid_http",), "What came is no HTTP/1.1."),
    ErrorRow(400, _BAD, ("invalid_json",), "The body is not a JSON object in UTF-8."),
    ErrorRow(
        400,
        _MISSING,
        (
            "missing_query",
            "missing_items",
            "missing_label_token_ids",
            "missing_text",
            "missing_name",
            "missing_documents",
        ),
        "A field that must be there is not, or is null.",
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
        ),
        "A field that must hold something is empty, or a text has no token.",
    ),
    ErrorRow(
        400,
        _BAD,
        (
            "invalid_query_type",
            "invalid_items_type",
            "invalid_label_token_ids_type",
            "invalid_labels_type",
            "invalid_suffix_type",
            "invalid_text_type",
            "invalid_model_type",
            "invalid_apply_softmax_type",
            "invalid_item_first_type",
            "invalid_return_debug_type",
            "invalid_add_special_tokens_type",
            "invalid_documents_type",
            "invalid_profile_type",
            "invalid_instruction_type",
            "invalid_return_documents_type",
            "invalid_truncate_type",
        ),
        "A field is of another type than it must be.",
    ),
    ErrorRow(400, _BAD, ("mixed_input_types",), "Text and token ids in one request: all is text, or all is ids."),
    ErrorRow(400, _BAD, ("invalid_token_id_type",), "A token id is not an integer; a bool is not one."),
    ErrorRow(400, _BAD, ("no_tokenizer",), "The model has no tokenizer, and text came; send token ids."),
    ErrorRow(
        400,
        _VALUE,
        ("invalid_profile",),
        "There is no such profile, it cannot rerank, or it is for another model; the message says which.",
    ),
    ErrorRow(
        400, _VALUE, ("no_label_logits",), "The model is a classifier, which reranks and has no logits of label tokens."
    ),
    ErrorRow(400, _VALUE, ("negative_token_id",), "A token id is below 0."),
    ErrorRow(400, _VALUE, ("invalid_unicode",), "A text has a lone surrogate, which no tokenizer can read."),
    ErrorRow(
        400,
        _VALUE,
        (
            "invalid_score_mode",
            "invalid_label_scoring",
            "invalid_tokenization",
            "invalid_algorithm",
            "invalid_on_item_error",
            "invalid_max_tokens_per_item",
            "invalid_debug_top_k",
            "invalid_ttl_seconds",
            "invalid_top_n",
            "invalid_max_tokens_per_doc",
            "invalid_max_chunks_per_doc",
            "invalid_priority",
            "invalid_rank_fields",
            "invalid_truncation_side",
            "invalid_request_timeout",
        ),
        "A value that the field does not have, or a number out of its range.",
    ),
    ErrorRow(
        400,
        _VALUE,
        ("conflicting_parameters", "wrong_label_count"),
        "Parameters that contradict each other, or another number of labels than the score mode takes.",
    ),
    ErrorRow(
        400,
        _VALUE,
        ("label_not_single_token",),
        'A label is not exactly one token; label_scoring "sequence" takes labels of any length.',
    ),
    ErrorRow(400, _VALUE, ("delimiter_collision",), "The query or an item holds the delimiter that the server uses."),
    ErrorRow(400, _VALUE, ("too_many_items",), "More items than one request may have (--max-items-per-request)."),
    ErrorRow(400, _VALUE, ("too_many_scores",), "More scores (items x labels) than one answer may have."),
    ErrorRow(400, _VALUE, ("context_too_long",), "The prefix and the longest item do not fit the model."),
    ErrorRow(400, _VALUE, ("dense_mask_too_large",), "A dense mask was asked for beyond its bound."),
    ErrorRow(
        400,
        _VALUE,
        ("prefix_cache_full", "prefix_cache_disabled"),
        "No prefix can be pinned: too many are, or none is kept here.",
    ),
    ErrorRow(401, "authentication_error", ("invalid_api_key",), "The API key is missing or wrong."),
    ErrorRow(400, _VALUE, ("invalid_artifact",), "No report can be made of it: the message says why."),
    ErrorRow(404, _BAD, ("not_found",), "There is nothing under this path or id."),
    ErrorRow(404, _BAD, ("no_report_viewer",), "The server is without what reports are made with."),
    ErrorRow(404, "model_error", ("model_not_found",), "The model is not served here."),
    ErrorRow(405, _BAD, ("method_not_allowed",), "The path does not take this method; Allow lists those it takes."),
    ErrorRow(413, _BAD, ("request_too_large",), "The body is larger than --max-request-bytes."),
    ErrorRow(422, _VALUE, ("token_id_exceeds_vocab",), "A token id that the model does not have."),
    ErrorRow(429, "rate_limit_error", ("queue_full",), "Too many tokens are waiting; Retry-After says when to come."),
    ErrorRow(500, _SERVER, ("internal_error",), "Something unforeseen; the log has it under the request's id."),
    ErrorRow(503, _SERVER, ("not_ready", "shutting_down"), "The model is warming up, or the server is stopping."),
    ErrorRow(504, _SERVER, ("deadline_exceeded",), "Not done within --request-timeout or X-Request-Timeout."),
)


def rows_of(status: int) -> list[ErrorRow]:
    """All ways to this status."""
    return [row for row in ERROR_TABLE if row.status == status]
