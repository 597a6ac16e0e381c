"""From a decoded JSON object, or the keyword arguments of a Python call, to a `ScoreRequest`.

The very first step of the data path: nothing behind it has to doubt a type, a range or a combination again.
A field that is None counts as absent; unknown fields are ignored. What depends on the model (vocabulary,
limits, names) is checked in `request.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, get_args

from prefixwise.contract.describe import describe
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, MissingParameterError
from prefixwise.contract.parse_inputs import parse_items, parse_labels, parse_query, parse_suffix
from prefixwise.contract.request import (
    Algorithm,
    LabelScoring,
    OnItemError,
    ScoreMode,
    ScoreRequest,
    Tokenization,
)
from prefixwise.contract.token_ids import plain

Fields = Mapping[str, object]
Choice = TypeVar("Choice", bound=str)

SCORE_MODES: tuple[ScoreMode, ...] = get_args(ScoreMode)
LABEL_SCORINGS: tuple[LabelScoring, ...] = get_args(LabelScoring)
TOKENIZATIONS: tuple[Tokenization, ...] = get_args(Tokenization)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
PLAIN = "plain"  # the profile of what is scored with labels of its own
ON_ITEM_ERRORS: tuple[OnItemError, ...] = get_args(OnItemError)


def parse_score_request(body: object) -> ScoreRequest:
    """Raises a `RequestError` for the first thing wrong: what is missing, query, items, labels, the rest."""
    fields = present_fields(body)
    _require_fields(fields)
    _check_profile(fields)
    query = parse_query(fields["query"])
    on_item_error = choice(fields, "on_item_error", ON_ITEM_ERRORS, "fail")
    items, item_errors = parse_items(fields["items"], isinstance(query, str), on_item_error)
    label_scoring = choice(fields, "label_scoring", LABEL_SCORINGS, "single")
    labels, label_token_ids = parse_labels(fields, label_scoring)
    request = ScoreRequest(
        query=query,
        items=items,
        labels=labels,
        label_token_ids=label_token_ids,
        score_mode=_score_mode(fields),
        label_scoring=label_scoring,
        item_first=flag(fields, "item_first") or False,
        tokenization=choice(fields, "tokenization", TOKENIZATIONS, "apart"),
        max_tokens_per_item=count(fields, "max_tokens_per_item"),
        algorithm=choice(fields, "algorithm", ALGORITHMS, "auto"),
        return_debug=flag(fields, "return_debug") or False,
        debug_top_k=debug_top_k(fields),
        on_item_error=on_item_error,
        model=parse_model_name(fields),
        suffix=parse_suffix(fields, query),
        item_errors=item_errors,
    )
    _check_label_count(request)
    _check_sequence_mode(request)
    return request


def present_fields(body: object) -> Fields:
    """The fields that are there, NumPy's values as Python's. Raises invalid_json where there can be none."""
    if not isinstance(body, Mapping):
        message = f"the request must be a JSON object, got {describe(body)}"
        raise InvalidRequestError(message, code="invalid_json")
    return {name: plain(value) for name, value in body.items() if value is not None}


def _require_fields(fields: Fields) -> None:
    if "query" not in fields:
        raise missing("query", "a string or a list of token ids")
    if "items" not in fields:
        raise missing("items", "a list of strings or a list of lists of token ids")
    if "labels" not in fields and "label_token_ids" not in fields:
        raise missing("label_token_ids", "a list of token ids (or labels, a list of strings)")


def _check_profile(fields: Fields) -> None:
    """A profile's prompt is made where documents are reranked; ignoring the field would give other scores."""
    profile = fields.get("profile", PLAIN)
    if profile != PLAIN:
        message = f"profile must be {PLAIN} or absent where items are scored, got {describe(profile)}; rerank instead"
        raise InvalidValueError(message, code="invalid_profile", param="profile")


def missing(name: str, expected: str) -> MissingParameterError:
    """The error missing_NAME."""
    message = f"{name} is required: expected {expected}, got nothing"
    return MissingParameterError(message, code=f"missing_{name}", param=name)


def choice(fields: Fields, name: str, choices: Sequence[Choice], default: Choice) -> Choice:
    """One of the choices. Raises invalid_NAME."""
    value = fields.get(name, default)
    if isinstance(value, str) and value in choices:
        return choices[choices.index(value)]
    message = f"{name} must be one of {', '.join(choices)}, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


def flag(fields: Fields, name: str) -> bool | None:
    """None where it is absent. Raises invalid_NAME_type."""
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    message = f"{name} must be true or false, got {describe(value)}"
    raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)


def _score_mode(fields: Fields) -> ScoreMode:
    """`score_mode` where it is given, else what `apply_softmax` says; the two must not contradict."""
    apply_softmax = flag(fields, "apply_softmax")
    implied: ScoreMode = "softmax" if apply_softmax else "prob"
    mode = choice(fields, "score_mode", SCORE_MODES, implied)
    if apply_softmax is not None and apply_softmax != (mode == "softmax"):
        message = (
            f'score_mode "{mode}" contradicts apply_softmax: expected {mode == "softmax"}, '
            f"got {apply_softmax}; leave one of the two out"
        )
        raise InvalidValueError(message, code="conflicting_parameters", param="score_mode")
    return mode


def count(fields: Fields, name: str) -> int | None:
    """An integer of 1 or more, None where it is absent. Raises invalid_NAME."""
    value = fields.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    message = f"{name} must be an integer of 1 or more, got {describe(value)}"
    raise InvalidValueError(message, code=f"invalid_{name}", param=name)


def debug_top_k(fields: Fields) -> int | None:
    """None where it is absent. Raises conflicting_parameters where there is no debug block to show it in."""
    value = count(fields, "debug_top_k")
    if value is not None and not flag(fields, "return_debug"):
        message = f"debug_top_k is shown in the debug block: expected return_debug true beside it, got {value} alone"
        raise InvalidValueError(message, code="conflicting_parameters", param="debug_top_k")
    return value


def parse_model_name(fields: Fields) -> str | None:
    """None where it is absent. Raises invalid_model_type."""
    value = fields.get("model")
    if value is None or isinstance(value, str):
        return value
    message = f"model must be a string, got {describe(value)}"
    raise InvalidRequestError(message, code="invalid_model_type", param="model")


def _check_label_count(request: ScoreRequest) -> None:
    allowed = {"logit_diff": (2,), "sigmoid": (1, 2)}.get(request.score_mode)
    if allowed is None or request.num_labels in allowed:
        return
    expected = " or ".join(map(str, allowed))
    message = f'score_mode "{request.score_mode}" takes {expected} labels, got {request.num_labels}'
    param = "labels" if request.labels is not None else "label_token_ids"
    raise InvalidValueError(message, code="wrong_label_count", param=param)


def _check_sequence_mode(request: ScoreRequest) -> None:
    """A label of many tokens has a log-probability but no logit, so the modes that need one make no sense."""
    mode, num_labels = request.score_mode, request.num_labels
    needs_logit = mode == "logit" or (mode == "sigmoid" and num_labels == 1)
    if request.label_scoring == "sequence" and needs_logit:
        message = (
            'label_scoring "sequence" has no raw logit: expected score_mode softmax, prob, logprob, '
            f'logit_diff, or sigmoid with two labels, got "{mode}" with {num_labels} label(s)'
        )
        raise InvalidValueError(message, code="conflicting_parameters", param="score_mode")
