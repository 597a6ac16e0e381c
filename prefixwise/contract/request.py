"""The fields of score requests, one row each, and the object that parsing makes of them.

To add a field: add a row to the table, a key to the `...Options` beside it and an attribute to the request class. All
of that is in this file (`rerank_request.py` for rerank requests); then use the value where it matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import DTYPES, EXPECTED, ItemVectors, Vectors, VectorsInput
from prefixwise.contract.errors import RequestError
from prefixwise.contract.fields import (
    Choice,
    Count,
    Field,
    Flag,
    Option,
    Schema,
    Structured,
    Text,
)
from prefixwise.contract.inputs import MAX_TOKEN_ID
from prefixwise.contract.ragged import Int32Array, Ragged

ScoreMode = Literal["softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"]
LabelScoring = Literal["single", "sequence"]
Tokenization = Literal["separate", "joint"]
Algorithm = Literal["auto", "serial", "packed", "prefill_extend"]
OnItemError = Literal["fail", "report"]
TruncationSide = Literal["right", "left"]

PLAIN = "plain"  # the profile of requests that bring their own labels
MAX_PRIORITY = 999  # as in Cohere's API
TokenIds = Sequence[int] | NDArray[np.integer[Any]]
TextOrIds = str | TokenIds

# JSON Schemas

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
IDS: Schema = {"type": "array", "items": TOKEN_ID}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
_ITEMS: list[Schema] = [
    {"type": "string"},
    {**TEXTS, "minItems": 1},
    {"type": "array", "items": IDS, "minItems": 1},
]
_VECTORS: list[Schema] = [
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
    {
        "type": "object",
        "required": ["base64", "dtype"],
        "properties": {"base64": {"type": "string", "contentEncoding": "base64"}, "dtype": {"enum": [*DTYPES]}},
        "additionalProperties": False,
    },
    {"type": "null"},
]


def _labels(entry: Schema) -> Schema:
    return {"type": ["array", "null"], "minItems": 1, "items": entry}


# Fields of both kinds of requests

ALGORITHM = Field(
    "algorithm",
    Choice(get_args(Algorithm)),
    "How the items share the computation of their prefix; the scores are the same.",
    "auto",
    option=Option(f"How the items share their prefix: {', '.join(get_args(Algorithm))}."),
)
DEBUG_TOP_K = Field(
    "debug_top_k",
    Count(),
    "With return_debug and one item: also report the item's tokens and this many of the most likely next tokens.",
)

PRIORITY = Field(
    "priority",
    Count(0, MAX_PRIORITY),
    "Requests with lower numbers are served first.",
    0,
    in_python=False,
)

# Score requests

SCORE_FIELDS = (
    Field(
        "query",
        Structured(
            "a string or a list of token ids",
            {"anyOf": [{"type": "string", "minLength": 1}, {**IDS, "minItems": 1}]},
        ),
        "The text or token ids that all items are scored against; at least one character or token.",
        is_required=True,
    ),
    Field(
        "items",
        Structured("a list of strings or a list of lists of token ids", {"anyOf": _ITEMS}),
        "A list of texts, or a list of lists of token ids; one text is one item. An item may be empty.",
        is_required=True,
    ),
    Field(
        "labels",
        Structured("a list of strings", _labels({"type": "string", "minLength": 1})),
        "Labels as text; give either labels or label_token_ids. A classifier takes neither: it scores its classes.",
        option=Option(
            'A label, as in " yes"; may be repeated. Items are ranked by the first.',
            names=("--label", "-l"),
            panel="Input",
            repeats=str,
        ),
    ),
    Field(
        "label_token_ids",
        Structured("a list of token ids", _labels({"anyOf": [TOKEN_ID, {**IDS, "minItems": 1}]})),
        'Labels as token ids; with label_scoring "sequence" a list of ids is one label.',
        option=Option(
            "A label as a token id; may be repeated.",
            names=("--label-token-id",),
            metavar="ID",
            panel="Input",
            repeats=int,
        ),
    ),
    Field(
        "suffix",
        Structured("a string or a list of token ids", {"anyOf": [{"type": "string"}, IDS, {"type": "null"}]}),
        "Text or token ids after every item, of the same type as the query.",
        option=Option("The text after every item.", panel="Input"),
    ),
    Field(
        "apply_softmax",
        Flag(),
        'true: score mode "softmax"; false: "prob", of a classifier "logit". Must agree with score_mode if both are '
        "given.",
        option=Option("Probabilities over the labels alone, like --score-mode softmax.", names=("--softmax",)),
        attribute=None,
    ),
    Field("softmax", Flag(), "Another name for apply_softmax.", in_python=False, attribute=None),
    Field(
        "score_mode",
        Choice(get_args(ScoreMode)),
        'What a score is; if absent, "softmax" with apply_softmax, else "prob", of a classifier "logit".',
        option=Option(f"What a score is: {', '.join(get_args(ScoreMode))}; prob when left out, of a classifier logit."),
    ),
    Field(
        "label_scoring",
        Choice(get_args(LabelScoring)),
        "single: a label is one token; sequence: the log-probabilities of its tokens are added up.",
        "single",
        option=Option(),
    ),
    Field(
        "tokenization",
        Choice(get_args(Tokenization), former={"apart": "separate"}),
        "separate: query and item are tokenized by themselves; joint: as one text.",
        "separate",
        option=Option(),
    ),
    Field("item_first", Flag(), "Put the item before the query.", False, option=Option()),
    Field(
        "max_tokens_per_item",
        Count(),
        "Cut the ends of longer items; items are never cut if absent.",
        option=Option("Cut the ends of longer items; never cut when left out."),
    ),
    Field(
        "embed_override_token_id",
        Count(0, MAX_TOKEN_ID),
        "The token in query and items whose embeddings are overridden; required with overrides.",
    ),
    Field(
        "query_embed_overrides",
        Structured(EXPECTED, {"anyOf": _VECTORS}),
        "A vector for each such token of the query, in place of the token's row of the embedding table.",
    ),
    Field(
        "item_embed_overrides",
        Structured(
            "a list with the vectors of each item, null for none",
            {"type": ["array", "null"], "items": {"anyOf": _VECTORS}},
        ),
        "The same for each item; null for an item whose tokens keep their embeddings.",
    ),
    ALGORITHM,
    Field(
        "on_item_error",
        Choice(get_args(OnItemError)),
        "fail: a wrong item fails the request; report: it is listed in item_errors and its scores are null.",
        "fail",
        option=Option("fail: one item that cannot be scored fails all; report: all other items are scored."),
    ),
    Field(
        "return_pooled_hidden_states",
        Flag(),
        "Also return the hidden state at each item's scored position, after the final norm.",
        False,
    ),
    Field("return_debug", Flag(), "Report in `debug` how the scores were computed.", False),
    DEBUG_TOP_K,
    Field(
        "profile",
        Choice((PLAIN,)),
        "Other profiles bring their own labels; use them on the rerank routes.",
        in_python=False,
        attribute=None,
    ),
    PRIORITY,
    Field("model", Text(), 'A served name; if absent or "default", the served model.', in_python=False),
)


class ScoreOptions(TypedDict, total=False):
    """The keyword arguments of `Scorer.score`, except `on_item_error`, which decides the type of its result."""

    labels: Iterable[str] | None
    label_token_ids: Iterable[int] | Iterable[TokenIds] | None
    suffix: TextOrIds | None
    apply_softmax: bool | None
    score_mode: ScoreMode | None
    label_scoring: LabelScoring
    tokenization: Tokenization | Literal["apart"]
    item_first: bool
    max_tokens_per_item: int | None
    embed_override_token_id: int | None
    query_embed_overrides: VectorsInput | None
    item_embed_overrides: Sequence[VectorsInput | None] | NDArray[Any] | None
    algorithm: Algorithm
    return_pooled_hidden_states: bool
    return_debug: bool
    debug_top_k: int | None


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value, so two requests cannot be compared
class ScoreRequest:
    """One query, its items and labels, and how to score them. Text throughout, or token ids throughout."""

    query: str | Int32Array
    items: tuple[str, ...] | Ragged
    # Either labels or label_token_ids is set, or neither: a classifier has classes (`checks.with_classes` sets both).
    labels: tuple[str, ...] | None = None
    label_token_ids: tuple[tuple[int, ...], ...] | None = None  # one id per label unless label_scoring is "sequence"
    suffix: str | Int32Array | None = None
    score_mode: ScoreMode = "prob"
    label_scoring: LabelScoring = "single"
    tokenization: Tokenization = "separate"
    item_first: bool = False
    max_tokens_per_item: int | None = None
    embed_override_token_id: int | None = None
    query_embed_overrides: Vectors | None = None
    item_embed_overrides: ItemVectors | None = None
    algorithm: Algorithm = "auto"
    on_item_error: OnItemError = "fail"
    return_pooled_hidden_states: bool = False
    return_debug: bool = False
    debug_top_k: int | None = None
    priority: int = 0
    model: str | None = None
    warnings: tuple[str, ...] = ()  # about unknown fields, and about labels that are hardly meant
    # Items that cannot be scored (on_item_error "report" only). Those of wrong type are "" or empty in `items`, so that
    # the other items keep their index; code that scores the items skips all of these.
    item_errors: Mapping[int, RequestError] = field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        return isinstance(self.query, str)

    @property
    def num_items(self) -> int:
        return len(self.items)

    @property
    def num_labels(self) -> int:
        return len(self.labels or self.label_token_ids or ())
