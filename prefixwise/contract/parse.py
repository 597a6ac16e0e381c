"""From a decoded JSON object, or the keyword arguments of a Python call, to a `ScoreRequest` or `RerankRequest`.

The first step of the data path: later code relies on every type, range and combination. A field that is None counts as
absent. A field that is known and not served here is an error; an unknown one is ignored, and named in `warnings` of the
request. `checks.py` checks what depends on the model; `prompts/rerank.py` checks what depends on the profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple, get_args

from prefixwise.contract.checks import check_label_count, label_warnings
from prefixwise.contract.embed_overrides import parse_overrides
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe, quote
from prefixwise.contract.fields import (
    Body,
    Field,
    NotServed,
    Structured,
    check_names,
    choice,
    flag,
    missing,
    present_fields,
    text,
)
from prefixwise.contract.inputs import parse_documents, parse_items, parse_labels, parse_query, parse_suffix
from prefixwise.contract.known_fields import (
    GENERATIVE_FIELDS,
    KNOWN_FIELDS,
    PAIR_FIELDS,
    PAIR_NAMES,
    REQUEST_ID,
    known_fields_of,
)
from prefixwise.contract.request import PLAIN, SCORE_FIELDS, ScoreMode, ScoreRequest
from prefixwise.contract.rerank_request import AS_SENT, Dialect, RerankRequest, rerank_fields

MAX_REQUESTS_PER_CALL = 1000  # each has a state of its own in the scheduler

_SHOWN_KEYS = 5  # of documents that are objects, in a warning

_SCORE_MODES: tuple[ScoreMode, ...] = get_args(ScoreMode)
_SCORE_ROWS = {row.name: row for row in SCORE_FIELDS}
_SCORE_NAMES = frozenset(_SCORE_ROWS)
# The fields of a score request that are read by themselves.
_SINGLE_ROWS = [row for row in SCORE_FIELDS if row.attribute is not None and not isinstance(row.kind, Structured)]


def parse_score_request(body: object) -> ScoreRequest:
    """Raises a `RequestError` for the first thing wrong: missing fields, query, items, labels, other fields."""
    fields = present_fields(body)
    warnings = check_names(fields, _SCORE_NAMES, KNOWN_FIELDS)
    _require(fields, SCORE_FIELDS)
    _check_profile(fields)
    query = parse_query(fields["query"])
    is_reported = _SCORE_ROWS["on_item_error"].read(fields) == "report"
    items, item_errors = parse_items(fields["items"], isinstance(query, str), is_reported)
    is_sequence = _SCORE_ROWS["label_scoring"].read(fields) == "sequence"
    labels, label_token_ids = parse_labels(fields, is_sequence=is_sequence)
    score_mode = _score_mode(fields)
    values: dict[str, Any] = {row.name: row.read(fields) for row in _SINGLE_ROWS}
    _check_debug_top_k(values)
    of_query, of_items, vector_errors = parse_overrides(fields, len(items), report=is_reported)
    values |= {
        "query": query,
        "items": items,
        "labels": labels,
        "label_token_ids": label_token_ids,
        "score_mode": score_mode,
        "suffix": parse_suffix(fields, query),
        "query_embed_overrides": of_query,
        "item_embed_overrides": of_items,
        "item_errors": {**vector_errors, **item_errors},
    }
    request = ScoreRequest(**values)
    check_label_count(request)
    _check_sequence_mode(request)
    warnings = (*warnings, *label_warnings(request))
    return replace(request, warnings=warnings) if warnings else request


def parse_rerank_request(body: object, dialect: Dialect = "native") -> RerankRequest:
    """Raises a `RequestError` for the first thing wrong. Reads the fields that the dialect has."""
    fields = present_fields(body)
    rows = _dialect_rows(dialect)
    warnings = check_names(fields, _dialect_names(dialect), known_fields_of(dialect))
    values = _rerank_values(fields, rows)
    names = {row.attribute or row.name: row.name for row in rows}
    documents_field = names["documents"]
    if dialect not in AS_SENT:
        warnings = (*warnings, *_unread_warnings(fields[documents_field], documents_field))
    cut_by = names.get("truncate", "truncate")
    return RerankRequest(**values, documents_field=documents_field, cut_by=cut_by, warnings=warnings)


def _unread_warnings(documents: object, name: str) -> tuple[str, ...]:
    """One warning that names the fields of documents beside their text, if they have any."""
    entries = documents if isinstance(documents, list | tuple) else ()
    others = {str(key): None for entry in entries if isinstance(entry, Mapping) for key in entry if key != "text"}
    if not others:
        return ()
    shown = [quote(key) for key in islice(others, _SHOWN_KEYS)] + ["..."] * (len(others) > _SHOWN_KEYS)
    return (f'only "text" is read of objects in {name}: {", ".join(shown)} will be neither scored nor returned',)


_dialect_rows = cache(rerank_fields)


@cache
def _dialect_names(dialect: Dialect) -> frozenset[str]:
    return frozenset(row.name for row in _dialect_rows(dialect))


def _rerank_values(fields: Body, rows: tuple[Field, ...]) -> dict[str, Any]:
    """The attributes of the request."""
    checked = {row.name: row.read(fields) for row in rows if row.attribute is None}  # the dialect uses them to render
    _require(fields, rows)
    values: dict[str, Any] = {row.attribute or row.name: row.read(fields) for row in rows if row.attribute is not None}
    in_template = checked.get("chat_template_kwargs")
    if in_template is not None:
        _check_same("chat_template_kwargs", in_template, "instruction", values["instruction"])
        values["instruction"] = in_template
    _check_debug_top_k(values)
    values["truncation_side"] = values["truncation_side"].lower()
    return values


# vLLM's requests


class PairsRequest(NamedTuple):
    """Pairs of texts to score, as rerank requests: one for each different first text."""

    requests: tuple[RerankRequest, ...]
    indices: tuple[tuple[int, ...], ...]  # of each request's documents: their places among the pairs
    request_id: str | None


_PAIR_KNOWN = {
    **known_fields_of("vllm"),
    "query": NotServed(
        "vLLM's /score has queries; send query and items to /v1/score, query and documents to /v1/rerank"
    ),
}


def parse_pairs(body: object) -> PairsRequest:
    """A request of vLLM's `/score`: one text or many, each with one of as many others. Raises RequestError."""
    fields = present_fields(body)
    warnings = check_names(fields, _dialect_names("vllm") | PAIR_NAMES | {REQUEST_ID.name}, _PAIR_KNOWN)
    request_id = text(fields, REQUEST_ID.name)
    first, second = _pair_names(fields)
    queries, documents = _pair_texts(fields[first], first), _pair_texts(fields[second], second)
    warnings = (*warnings, *_unread_warnings(fields[first], first), *_unread_warnings(fields[second], second))
    if len(queries) not in (1, len(documents)):
        message = f"{first} must hold one text, or as many as {second} ({len(documents)}), got {len(queries)}"
        raise InvalidValueError(message, code="conflicting_parameters", param=first)
    if "" in queries:
        message = f"{first}[{queries.index('')}] must hold at least one character, got an empty text"
        raise InvalidValueError(message, code="empty_query", param=first)
    groups: dict[str, list[int]] = {}
    for index in range(len(documents)):
        groups.setdefault(queries[index % len(queries)], []).append(index)
    _check_request_count(len(groups), first, "different texts")
    values = _rerank_values(fields, _dialect_rows("vllm"))
    common = RerankRequest(
        "", (), **values, documents_field=second, cut_by="truncate_prompt_tokens: -1", warnings=warnings
    )
    common = replace(common, truncate=common.truncate_prompt_tokens is not None)  # as vLLM: else an error
    requests = [replace(common, query=query, documents=tuple(documents[i] for i in of)) for query, of in groups.items()]
    return PairsRequest(tuple(requests), tuple(map(tuple, groups.values())), request_id)


def _pair_names(fields: Body) -> tuple[str, str]:
    """The names of the texts, which must be one of the known pairs."""
    present = PAIR_NAMES & fields.keys()
    fitting = [names for names in PAIR_FIELDS if present <= set(names)]
    if not fitting:
        expected = ", or ".join(" and ".join(names) for names in PAIR_FIELDS)
        message = f"the texts must be {expected}, got {', '.join(sorted(present))}"
        raise InvalidValueError(message, code="conflicting_parameters", param=min(present))
    for name in fitting[0]:
        if name not in present and len(present) < 2:
            raise missing(name, "a string or a list of strings")
    return fitting[0]


def _pair_texts(value: object, name: str) -> tuple[str, ...]:
    return parse_documents([value] if isinstance(value, str) else value, name)


class GenerativeRequest(NamedTuple):
    """A request of vLLM's `/generative_scoring`."""

    request: ScoreRequest
    add_special_tokens: bool
    request_id: str | None


_GENERATIVE_NAMES = frozenset(row.name for row in GENERATIVE_FIELDS)


def parse_generative_request(body: object) -> GenerativeRequest:
    """The same as a score request with label token ids, except that `apply_softmax` is on by default."""
    fields = present_fields(body)
    warnings = check_names(fields, _GENERATIVE_NAMES, KNOWN_FIELDS)
    add_special_tokens = flag(fields, "add_special_tokens")
    request_id = text(fields, REQUEST_ID.name)
    own = {name: value for name, value in fields.items() if name in _SCORE_NAMES}
    request = parse_score_request({"apply_softmax": True, **own})
    if request.label_token_ids is None:
        raise missing("label_token_ids", _SCORE_ROWS["label_token_ids"].kind.expected())
    request = replace(request, warnings=(*warnings, *request.warnings))
    return GenerativeRequest(request, add_special_tokens is not False, request_id)


# Many requests in one call

# A request that has one field of a group ignores the defaults of the whole group.
_GROUPS = (("labels", "label_token_ids"), ("score_mode", "apply_softmax", "softmax"))


class ManyRequests(NamedTuple):
    """The requests of one call, with its defaults; not parsed yet, so that one wrong request does not fail the rest."""

    bodies: list[object]
    defaults: dict[str, object]
    warnings: tuple[str, ...]  # about unknown fields beside `requests`


def parse_requests(body: Body) -> ManyRequests:
    """A body with `requests`. Raises RequestError for what is wrong with all of them."""
    fields = present_fields(body)
    for name in ("query", "items"):
        if name in fields:
            message = f"{name} is a field of each request: expected requests without {name} beside them, got both"
            raise InvalidValueError(message, code="conflicting_parameters", param="requests")
    warnings = check_names(fields, _SCORE_NAMES | {"requests"}, KNOWN_FIELDS)
    requests = fields["requests"]
    if not isinstance(requests, list | tuple):
        message = f"requests must be a list of objects with query and items, got {describe(requests)}"
        raise InvalidRequestError(message, code="invalid_requests_type", param="requests")
    if not requests:
        raise InvalidValueError("requests must hold at least one, got none", code="empty_requests", param="requests")
    _check_request_count(len(requests), "requests", "requests")
    defaults = {name: value for name, value in fields.items() if name in _SCORE_NAMES}
    _check_defaults(defaults)
    bodies = [with_defaults(each, defaults) if isinstance(each, Mapping) else each for each in requests]
    return ManyRequests(bodies, defaults, warnings)


def _check_defaults(defaults: Body) -> None:
    """Raises for what would be wrong with every request that uses them."""
    values = {row.name: row.read(defaults) for row in _SINGLE_ROWS}
    _score_mode(defaults)
    _check_profile(defaults)
    parse_labels(defaults, is_sequence=values["label_scoring"] == "sequence")


def _check_request_count(num_requests: int, field: str, what: str) -> None:
    if num_requests > MAX_REQUESTS_PER_CALL:
        message = f"{field} must hold at most {MAX_REQUESTS_PER_CALL} {what}, got {num_requests}; send several calls"
        raise InvalidValueError(message, code="too_many_requests", param=field)


def with_defaults(own: Body, defaults: Body) -> dict[str, object]:
    """The fields, and the defaults of those that are absent or None."""
    present = {name: value for name, value in own.items() if value is not None}
    settled = {name for names in _GROUPS if any(each in present for each in names) for name in names}
    return {**{name: value for name, value in defaults.items() if name not in settled}, **present}


# Checks of several fields


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
    """`score_mode` if given, else by `apply_softmax`; the two must not contradict each other.

    Without labels the request is for a classifier, whose scores are logits by default.
    """
    apply_softmax, softmax = flag(fields, "apply_softmax"), flag(fields, "softmax")
    if softmax is not None:
        _check_same("softmax", softmax, "apply_softmax", apply_softmax)
        apply_softmax = softmax
    has_labels = "labels" in fields or "label_token_ids" in fields
    implied: ScoreMode = "softmax" if apply_softmax else "prob" if has_labels else "logit"
    mode = choice(fields, "score_mode", _SCORE_MODES, implied)
    if apply_softmax is not None and apply_softmax != (mode == "softmax"):
        message = (
            f'score_mode "{mode}" contradicts apply_softmax {str(apply_softmax).lower()}: expected one of the two, '
            "got both"
        )
        raise InvalidValueError(message, code="conflicting_parameters", param="score_mode")
    return mode


def _check_same(name: str, value: object, other: str, other_value: object) -> None:
    """Two names of one thing must not contradict each other. `other_value`: None if it is absent."""
    if other_value is not None and other_value != value:
        message = (
            f"{name} and {other} mean the same: expected one of them, got {describe(value)} and {describe(other_value)}"
        )
        raise InvalidValueError(message, code="conflicting_parameters", param=name)


def _check_debug_top_k(values: Mapping[str, object]) -> None:
    value = values.get("debug_top_k")
    if value is not None and not values["return_debug"]:
        message = f"debug_top_k is shown in the debug block: expected return_debug true beside it, got {value} alone"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")


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
