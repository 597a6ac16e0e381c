"""The fields of score and rerank requests, one row each, and the objects that parsing makes of them.

To add a field: add a row to the table, a key to the `...Options` beside it and an attribute to the request class. All
of that is in this file; then use the value where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict, get_args

from prefixwise.contract.errors import InvalidValueError, RequestError, describe
from prefixwise.contract.fields import Choice, Count, Field, Flag, Option, Schema, Structured, Text, text
from prefixwise.contract.inputs import MAX_TOKEN_ID, parse_documents
from prefixwise.contract.ragged import Int32Array, Ragged

ScoreMode = Literal["softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"]
LabelScoring = Literal["single", "sequence"]
Tokenization = Literal["separate", "joint"]
Algorithm = Literal["auto", "serial", "packed", "prefill_extend"]
OnItemError = Literal["fail", "report"]
TruncationSide = Literal["right", "left"]
Dialect = Literal["native", "cohere_v1", "cohere_v2", "tei"]  # native: Python, the command line and batches

PLAIN = "plain"  # the profile of requests that bring their own labels
MAX_PRIORITY = 999  # as in Cohere's API
TextOrIds = str | Sequence[int]

# JSON Schemas

TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
IDS: Schema = {"type": "array", "items": TOKEN_ID}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}}
_ITEMS: list[Schema] = [
    {"type": "string"},
    {**TEXTS, "minItems": 1},
    {"type": "array", "items": IDS, "minItems": 1},
]
_DOCUMENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]
}


def _labels(entry: Schema) -> Schema:
    return {"type": ["array", "null"], "minItems": 1, "items": entry}


# Fields of both kinds of requests

_ALGORITHM = Field(
    "algorithm",
    Choice(get_args(Algorithm)),
    "How the items share the computation of their prefix; the scores are the same.",
    "auto",
    option=Option(f"How the items share their prefix: {', '.join(get_args(Algorithm))}."),
)
_DEBUG_TOP_K = Field(
    "debug_top_k",
    Count(),
    "With return_debug and one item: also report the item's tokens and this many of the most likely next tokens.",
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
        "Labels as text; give either labels or label_token_ids.",
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
        'true: score mode "softmax"; false: "prob". Must agree with score_mode if both are given.',
        option=Option("Probabilities over the labels alone, like --score-mode softmax.", names=("--softmax",)),
        attribute=None,
    ),
    Field(
        "score_mode",
        Choice(get_args(ScoreMode)),
        'What a score is; if absent, "prob", or "softmax" with apply_softmax.',
        option=Option(f"What a score is: {', '.join(get_args(ScoreMode))}; prob when left out."),
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
    _ALGORITHM,
    Field(
        "on_item_error",
        Choice(get_args(OnItemError)),
        "fail: a wrong item fails the request; report: it is listed in item_errors and its scores are null.",
        "fail",
        option=Option("fail: one item that cannot be scored fails all; report: all other items are scored."),
    ),
    Field("return_debug", Flag(), "Report in `debug` how the scores were computed.", False),
    _DEBUG_TOP_K,
    Field(
        "profile",
        Choice((PLAIN,)),
        "Other profiles bring their own labels; use them on the rerank routes.",
        in_python=False,
        attribute=None,
    ),
    Field("model", Text(), 'A served name; if absent or "default", the served model.', in_python=False),
)


class ScoreOptions(TypedDict, total=False):
    """The keyword arguments of `Scorer.score`."""

    labels: Sequence[str] | None
    label_token_ids: Sequence[int] | Sequence[Sequence[int]] | None
    suffix: TextOrIds | None
    apply_softmax: bool | None
    score_mode: ScoreMode | None
    label_scoring: LabelScoring
    tokenization: Tokenization | Literal["apart"]
    item_first: bool
    max_tokens_per_item: int | None
    algorithm: Algorithm
    on_item_error: OnItemError
    return_debug: bool
    debug_top_k: int | None


@dataclass(frozen=True, eq=False)  # eq: arrays have no single truth value, so two requests cannot be compared
class ScoreRequest:
    """One query, its items and labels, and how to score them. Text throughout, or token ids throughout."""

    query: str | Int32Array
    items: tuple[str, ...] | Ragged
    labels: tuple[str, ...] | None = None  # either labels or label_token_ids is set
    label_token_ids: tuple[tuple[int, ...], ...] | None = None  # one id per label unless label_scoring is "sequence"
    suffix: str | Int32Array | None = None
    score_mode: ScoreMode = "prob"
    label_scoring: LabelScoring = "single"
    tokenization: Tokenization = "separate"
    item_first: bool = False
    max_tokens_per_item: int | None = None
    algorithm: Algorithm = "auto"
    on_item_error: OnItemError = "fail"
    return_debug: bool = False
    debug_top_k: int | None = None
    model: str | None = None
    # Items that cannot be scored (on_item_error "report" only). Each is "" or empty in `items`, so that the other
    # items keep their index; code that scores the items skips these.
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


# Rerank requests


def _read_query(value: object, name: str) -> str:
    query = text({name: value}, name)
    if not query:
        message = f"query must hold at least one character, got {describe(query)}"
        raise InvalidValueError(message, code="empty_query", param="query")
    return query


def _read_rank_fields(value: object, name: str) -> object:
    """Only `text` of a document is read; ignoring other fields would give wrong scores."""
    if value != ["text"]:
        message = f'{name} must be ["text"], the one field that is read of a document, got {describe(value)}'
        raise InvalidValueError(message, code="invalid_rank_fields", param=name)
    return value


_ALL: frozenset[str] = frozenset(get_args(Dialect))
_TEI = frozenset({"tei"})
_COHERE = frozenset({"cohere_v1", "cohere_v2"})
_OURS = _ALL - _TEI
_DOCUMENTS = Structured(
    'a list of strings, or of objects like {"text": "..."}',
    {"type": "array", "minItems": 1, "items": _DOCUMENT},
    parse_documents,
)
_ABOUT_DOCUMENTS = "The documents to order; at least one. Documents may be empty or repeated."

RERANK_FIELDS = (
    Field(
        "query",
        Structured("a string", {"type": "string", "minLength": 1}, _read_query),
        "The text that the documents are ordered by.",
        is_required=True,
        dialects=_ALL,
    ),
    Field("documents", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, dialects=_OURS),
    Field("texts", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, attribute="documents", dialects=_TEI),
    Field(
        "profile",
        Text(),
        'The profile that makes the prompt; if absent or "default", the one of the model.',
        dialects=_ALL,
    ),
    Field(
        "instruction",
        Text(),
        "What makes a document relevant, in words; if absent, the profile's own instruction.",
        option=Option("What makes a document relevant, in words; the profile's own when left out.", panel="Input"),
        dialects=_ALL,
    ),
    Field(
        "max_tokens_per_doc",
        Count(),
        "Cut longer documents; if absent, a document is cut only if it does not fit.",
        option=Option("Cut the ends of longer documents."),
        dialects=_ALL,
    ),
    Field(
        "max_chunks_per_doc",
        Count(),
        "Cut a document that does not fit into up to this many chunks, of which the best one counts; 1 if absent.",
        option=Option(
            "Cut a document that does not fit into up to N chunks, of which the best one counts; 1 when left out."
        ),
        dialects=_OURS,
    ),
    Field(
        "truncate",
        Flag(),
        "true: cut a document that does not fit; false: it is an error.",
        True,
        option=Option(
            "A document that does not fit is an error; else it is cut.", names=("--no-truncate",), turns_off=True
        ),
        dialects=_OURS,
    ),
    Field("truncate", Flag(), "true: cut a text that does not fit; false: it is an error.", False, dialects=_TEI),
    Field(
        "truncation_side",
        Choice(get_args(TruncationSide)),
        "The end of a long document to cut.",
        "right",
        dialects=_OURS,
    ),
    Field(
        "truncation_direction",
        Choice(("Right", "Left"), former={"right": "Right", "left": "Left"}),
        "The end of a long text to cut.",
        "Right",
        attribute="truncation_side",
        dialects=_TEI,
    ),
    Field("algorithm", _ALGORITHM.kind, _ALGORITHM.about, _ALGORITHM.default, option=_ALGORITHM.option, dialects=_OURS),
    Field(
        "top_n",
        Count(),
        "How many of the best documents to return; all if absent or larger than their number.",
        option=Option("Only the N best.", panel="Output"),
        dialects=_ALL,
    ),
    Field(
        "rank_fields",
        Structured('`["text"]`', {"enum": [["text"], None]}, _read_rank_fields, code="invalid_{}"),
        "If a document is an object, only its `text` is read.",
        attribute=None,
        dialects=_COHERE,
    ),
    Field(
        "priority",
        Count(0, MAX_PRIORITY),
        "Requests with lower numbers are served first.",
        0,
        in_python=False,
        dialects=_OURS,
    ),
    Field("return_debug", Flag(), "Report in `meta.debug` how the scores were computed.", False, dialects=_OURS),
    Field("debug_top_k", _DEBUG_TOP_K.kind, _DEBUG_TOP_K.about, dialects=_OURS),
    Field(
        "model",
        Text(),
        "Any name, unless the server was started with --strict-model.",
        in_python=False,
        dialects=_ALL,
    ),
    Field(
        "return_documents",
        Flag(),
        "Return each document with its score.",
        False,
        attribute=None,
        dialects=frozenset({"cohere_v1"}),
    ),
    Field(
        "raw_scores",
        Flag(),
        "Return the scores as they are before the mapping to 0 .. 1.",
        False,
        attribute=None,
        dialects=_TEI,
    ),
    Field("return_text", Flag(), "Return each text with its score.", False, attribute=None, dialects=_TEI),
)


def rerank_fields(dialect: Dialect) -> tuple[Field, ...]:
    """The fields that requests of this dialect may have."""
    return tuple(row for row in RERANK_FIELDS if dialect in row.dialects)


class RerankOptions(TypedDict, total=False):
    """The keyword arguments of `Scorer.rerank`."""

    profile: str | None
    instruction: str | None
    max_tokens_per_doc: int | None
    max_chunks_per_doc: int | None
    truncate: bool
    truncation_side: TruncationSide
    algorithm: Algorithm
    top_n: int | None
    return_debug: bool
    debug_top_k: int | None


@dataclass(frozen=True)
class RerankRequest:
    """One query and the documents to order by it. A profile (`prompts/profile.py`) makes items of the documents."""

    query: str
    documents: tuple[str, ...]
    profile: str | None = None
    instruction: str | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    truncate: bool = True
    truncation_side: TruncationSide = "right"
    algorithm: Algorithm = "auto"
    top_n: int | None = None
    priority: int = 0
    return_debug: bool = False
    debug_top_k: int | None = None
    model: str | None = None
    documents_field: str = "documents"  # the dialect's name for the documents, for errors

    @property
    def num_items(self) -> int:
        return len(self.documents)
