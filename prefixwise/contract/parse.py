"""From a decoded JSON object, or the keyword arguments of a Python call, to a `ScoreRequest` or `RerankRequest`.

The first step of the data path: later code relies on every type, range and combination. A field that is None counts as
absent; unknown fields are ignored. `checks.py` checks what depends on the model; `prompts/rerank.py` checks what
depends on the profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from prefixwise.contract.errors import InvalidValueError, describe
from prefixwise.contract.fields import Body, Field, Structured, choice, flag, missing, present_fields
from prefixwise.contract.inputs import parse_items, parse_labels, parse_query, parse_suffix
from prefixwise.contract.request import (
    PLAIN,
    SCORE_FIELDS,
    Dialect,
    RerankRequest,
    ScoreMode,
    ScoreRequest,
    rerank_fields,
)

_SCORE_MODES: tuple[ScoreMode, ...] = get_args(ScoreMode)
_SCORE_ROWS = {row.name: row for row in SCORE_FIELDS}
# The fields of a score request that are read by themselves.
_SINGLE_ROWS = [row for row in SCORE_FIELDS if row.attribute is not None and not isinstance(row.kind, Structured)]


def parse_score_request(body: object) -> ScoreRequest:
    """Raises a `RequestError` for the first thing wrong: missing fields, query, items, labels, other fields."""
    fields = present_fields(body)
    _require(fields, SCORE_FIELDS)
    if "labels" not in fields and "label_token_ids" not in fields:
        raise missing("label_token_ids", "a list of token ids (or labels, a list of strings)")
    _check_profile(fields)
    query = parse_query(fields["query"])
    is_reported = _SCORE_ROWS["on_item_error"].read(fields) == "report"
    items, item_errors = parse_items(fields["items"], isinstance(query, str), is_reported)
    is_sequence = _SCORE_ROWS["label_scoring"].read(fields) == "sequence"
    labels, label_token_ids = parse_labels(fields, is_sequence=is_sequence)
    score_mode = _score_mode(fields)
    values: dict[str, Any] = {row.name: row.read(fields) for row in _SINGLE_ROWS}
    _check_debug_top_k(values)
    values |= {
        "query": query,
        "items": items,
        "labels": labels,
        "label_token_ids": label_token_ids,
        "score_mode": score_mode,
        "suffix": parse_suffix(fields, query),
        "item_errors": item_errors,
    }
    request = ScoreRequest(**values)
    _check_label_count(request)
    _check_sequence_mode(request)
    return request


def parse_rerank_request(body: object, dialect: Dialect = "native") -> RerankRequest:
    """Raises a `RequestError` for the first thing wrong. Reads the fields that the dialect has."""
    fields = present_fields(body)
    rows = _dialect_rows(dialect)
    for row in rows:
        if row.attribute is None:
            row.read(fields)  # the dialect uses the value when it renders the result
    _require(fields, rows)
    values: dict[str, Any] = {row.attribute or row.name: row.read(fields) for row in rows if row.attribute is not None}
    _check_debug_top_k(values)
    values["truncation_side"] = values["truncation_side"].lower()
    documents_field = next(row.name for row in rows if "documents" in (row.attribute, row.name))
    return RerankRequest(**values, documents_field=documents_field)


_dialect_rows = cache(rerank_fields)


def _require(fields: Body, rows: tuple[Field, ...]) -> None:
    for row in rows:
        if row.is_required and row.name not in fields:
            raise missing(row.name, row.kind.expected())


def _check_profile(fields: Body) -> None:
    """Profiles make prompts of rerank requests. If the field were ignored here, the scores would be wrong."""
    profile = fields.get("profile", PLAIN)
    if profile != PLAIN:
        message = f"profile must be {PLAIN} or absent where items are scored, got {describe(profile)}; rerank instead"
        raise InvalidValueError(message, code="invalid_profile", param="profile")


def _score_mode(fields: Body) -> ScoreMode:
    """`score_mode` if given, else by `apply_softmax`; the two must not contradict each other."""
    apply_softmax = flag(fields, "apply_softmax")
    implied: ScoreMode = "softmax" if apply_softmax else "prob"
    mode = choice(fields, "score_mode", _SCORE_MODES, implied)
    if apply_softmax is not None and apply_softmax != (mode == "softmax"):
        message = (
            f'score_mode "{mode}" contradicts apply_softmax: expected {mode == "softmax"}, '
            f"got {apply_softmax}; leave one of the two out"
        )
        raise InvalidValueError(message, code="conflicting_parameters", param="score_mode")
    return mode


def _check_debug_top_k(values: Mapping[str, object]) -> None:
    value = values.get("debug_top_k")
    if value is not None and not values["return_debug"]:
        message = f"debug_top_k is shown in the debug block: expected return_debug true beside it, got {value} alone"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")


def _check_label_count(request: ScoreRequest) -> None:
    allowed = {"logit_diff": (2,), "sigmoid": (1, 2)}.get(request.score_mode)
    if allowed is None or request.num_labels in allowed:
        return
    expected = " or ".join(map(str, allowed))
    message = f'score_mode "{request.score_mode}" takes {expected} labels, got {request.num_labels}'
    param = "labels" if request.labels is not None else "label_token_ids"
    raise InvalidValueError(message, code="wrong_label_count", param=param)


def _check_sequence_mode(request: ScoreRequest) -> None:
    """A label of many tokens has a log-probability but no logit."""
    mode, num_labels = request.score_mode, request.num_labels
    needs_logit = mode == "logit" or (mode == "sigmoid" and num_labels == 1)
    if request.label_scoring == "sequence" and needs_logit:
        message = (
            'label_scoring "sequence" has no raw logit: expected score_mode softmax, prob, logprob, '
            f'logit_diff, or sigmoid with two labels, got "{mode}" with {num_labels} label(s)'
        )
        raise InvalidValueError(message, code="conflicting_parameters", param="score_mode")
