"""The fields of score and rerank requests, one row each, and the objects that parsing makes of them.

To add a field: add a row to the table, a key to the `...Options` beside it and an attribute to the request class. All
of that is in this file; then use the value where it matters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, get_args

from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import DTYPES, EXPECTED, ItemVectors, Vectors, VectorsInput
from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, RequestError, describe
from prefixwise.contract.fields import (
    Choice,
    Count,
    Field,
    Flag,
    NotServed,
    Option,
    Schema,
    Structured,
    Text,
    missing,
    text,
)
from prefixwise.contract.inputs import MAX_TOKEN_ID, parse_documents
from prefixwise.contract.ragged import Int32Array, Ragged

ScoreMode = Literal["softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"]
LabelScoring = Literal["single", "sequence"]
Tokenization = Literal["separate", "joint"]
Algorithm = Literal["auto", "serial", "packed", "prefill_extend"]
OnItemError = Literal["fail", "report"]
TruncationSide = Literal["right", "left"]
# native: Python, the command line and batches; the others are APIs, one file each in `server/dialects`
Dialect = Literal[
    "native", "cohere_v1", "cohere_v2", "tei", "sglang", "infinity", "voyage", "mixedbread", "nvidia", "vllm"
]

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

_PRIORITY = Field(
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
    _ALGORITHM,
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
    _DEBUG_TOP_K,
    Field(
        "profile",
        Choice((PLAIN,)),
        "Other profiles bring their own labels; use them on the rerank routes.",
        in_python=False,
        attribute=None,
    ),
    _PRIORITY,
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
    embed_override_token_id: int | None
    query_embed_overrides: VectorsInput | None
    item_embed_overrides: Sequence[VectorsInput | None] | NDArray[Any] | None
    algorithm: Algorithm
    on_item_error: OnItemError
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
    warnings: tuple[str, ...] = ()  # about unknown fields
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


# Rerank requests


def _read_query(value: object, name: str) -> str:
    query = text({name: value}, name)
    if not query:
        message = f"query must hold at least one character, got {describe(query)}"
        raise InvalidValueError(message, code="empty_query", param="query")
    return query


_QUERY_OBJECT = 'an object like {"text": "..."}'


def _read_query_object(value: object, name: str) -> str:
    if not isinstance(value, Mapping):
        message = f"{name} must be {_QUERY_OBJECT}, got {describe(value)}"
        raise InvalidRequestError(message, code="invalid_query_type", param=name)
    if value.get("text") is None:
        raise missing(name, _QUERY_OBJECT)
    return _read_query(value["text"], name)


def _read_rewrite_query(value: object, name: str) -> object:
    """Only a query as sent is scored; ignoring the field would order by another query than was asked for."""
    if value is not False:
        message = f"{name} must be false or absent: queries are scored as they are sent, got {describe(value)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)
    return value


def _read_template_arguments(value: object, name: str) -> str | None:
    """The instruction. Other arguments are for templates that no profile has; ignoring them would change prompts."""
    if not isinstance(value, Mapping):
        message = f'{name} must be an object like {{"instruction": "..."}}, got {describe(value)}'
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    others = [key for key in value if key != "instruction"]
    if others:
        message = f"{name} must hold an instruction and nothing else, got {describe(others[0])} in it"
        raise InvalidRequestError(message, code=f"invalid_{name}_type", param=name)
    return text(value, "instruction")


def _read_rank_fields(value: object, name: str) -> object:
    """Only `text` of a document is read; ignoring other fields would give wrong scores."""
    if value != ["text"]:
        message = f'{name} must be ["text"], the one field that is read of a document, got {describe(value)}'
        raise InvalidValueError(message, code="invalid_rank_fields", param=name)
    return value


_ALL: frozenset[str] = frozenset(get_args(Dialect))
_TEI = frozenset({"tei"})
_COHERE = frozenset({"cohere_v1", "cohere_v2"})
_OURS = _COHERE | {"native"}  # their requests may have our own fields too, and their responses have room for them
_MIXEDBREAD = frozenset({"mixedbread"})
_NVIDIA = frozenset({"nvidia"})
_VLLM = frozenset({"vllm"})
_TOP_K = frozenset({"voyage", "mixedbread"})
_WITH_DOCUMENTS = _OURS | {"sglang", "infinity", "voyage"}
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
        dialects=_ALL - _NVIDIA - _VLLM,
    ),
    Field(
        "query",
        Structured(
            _QUERY_OBJECT,
            {
                "type": "object",
                "required": ["text"],
                "properties": {"text": {"type": "string", "minLength": 1}},
            },
            _read_query_object,
        ),
        "The text that the passages are ordered by, in an object.",
        is_required=True,
        dialects=_NVIDIA,
    ),
    Field("documents", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, dialects=_WITH_DOCUMENTS),
    Field("texts", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, attribute="documents", dialects=_TEI),
    Field("input", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, attribute="documents", dialects=_MIXEDBREAD),
    Field("passages", _DOCUMENTS, _ABOUT_DOCUMENTS, is_required=True, attribute="documents", dialects=_NVIDIA),
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
        dialects=_ALL - {"sglang"},
    ),
    Field(
        "instruct",
        Text(),
        "What makes a document relevant, in words; if absent, the profile's own instruction.",
        attribute="instruction",
        dialects=frozenset({"sglang"}),
    ),
    Field(
        "chat_template_kwargs",
        Structured(
            'an object like {"instruction": "..."}',
            {
                "type": ["object", "null"],
                "properties": {"instruction": {"type": ["string", "null"]}},
                "additionalProperties": False,
            },
            _read_template_arguments,
        ),
        "vLLM's way to send the instruction, the one argument that a profile's prompt takes.",
        attribute=None,
        dialects=_COHERE | _VLLM,
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
    Field(
        "truncate_prompt_tokens",
        Count(-1),
        "Cut documents so that no prompt has more tokens than this; -1: than the model reads.",
        in_python=False,
        dialects=_COHERE | _VLLM,
    ),
    Field(
        "truncate",
        Flag(),
        "true: cut a text that does not fit; false: it is an error. If absent, as the server's --auto-truncate says.",
        attribute=None,
        dialects=_TEI,
    ),
    Field(
        "truncate",
        Choice(("NONE", "END")),
        "END: cut the end of a passage that does not fit; NONE: it is an error.",
        "NONE",
        attribute=None,
        dialects=_NVIDIA,
    ),
    Field(
        "truncation",
        Flag(),
        "true: cut a document that does not fit; false: it is an error.",
        True,
        attribute="truncate",
        dialects=frozenset({"voyage"}),
    ),
    Field(
        "truncation_side",
        Choice(get_args(TruncationSide)),
        "The end of a long document to cut.",
        "right",
        dialects=_ALL - _TEI,
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
        dialects=_ALL - _TOP_K - _VLLM,
    ),
    Field(
        "top_k",
        Count(),
        "How many of the best documents to return; all if absent or larger than their number.",
        attribute="top_n",
        dialects=_TOP_K,
    ),
    Field(
        "rank_fields",
        Structured('`["text"]`', {"enum": [["text"], None]}, _read_rank_fields, code="invalid_{}"),
        "If a document is an object, only its `text` is read.",
        attribute=None,
        dialects=_COHERE | _MIXEDBREAD,
    ),
    Field(
        "rewrite_query",
        Structured("`false`", {"enum": [False, None]}, _read_rewrite_query, code="invalid_{}"),
        "Only false: the query is scored as it is.",
        attribute=None,
        dialects=_MIXEDBREAD,
    ),
    replace(_PRIORITY, dialects=_OURS | _VLLM),
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
        dialects=_COHERE | {"infinity", "voyage"},
    ),
    Field(
        "return_documents",
        Flag(),
        "Return each document with its score.",
        True,
        attribute=None,
        dialects=frozenset({"sglang"}),
    ),
    Field("return_input", Flag(), "Return each input with its score.", False, attribute=None, dialects=_MIXEDBREAD),
    Field(
        "raw_scores",
        Flag(),
        "Return the scores as they are before the mapping to 0 .. 1.",
        False,
        attribute=None,
        dialects=_TEI | {"infinity"},
    ),
    Field("return_text", Flag(), "Return each text with its score.", False, attribute=None, dialects=_TEI),
    Field(
        "use_activation",
        Flag(),
        "false: return the scores as they are before the mapping to 0 .. 1.",
        True,
        attribute=None,
        dialects=_COHERE | _VLLM,
    ),
)


def rerank_fields(dialect: Dialect) -> tuple[Field, ...]:
    """The fields that requests of this dialect may have."""
    return tuple(row for row in RERANK_FIELDS if dialect in row.dialects)


# Pairs of texts, as in vLLM's `/score`. Each row: the name of the first texts and of the second ones.

REQUEST_ID = Field("request_id", Text(), "The response's id, unless the header X-Request-Id has one.", attribute=None)

PAIR_FIELDS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
PAIR_NAMES = frozenset(name for names in PAIR_FIELDS for name in names)

# vLLM's `/generative_scoring`: some fields of score requests, and two more, which parsing reads in its own way

GENERATIVE_FIELDS = (
    *(row for row in SCORE_FIELDS if row.name in ("query", "items", "label_token_ids", "apply_softmax", "item_first")),
    *(row for row in SCORE_FIELDS if row.name in ("priority", "model")),
    Field("add_special_tokens", Flag(), "false: a text query does not begin with BOS.", True, attribute=None),
    REQUEST_ID,
)

# Fields that requests do not have

_NOT_SERVED = {
    "max_tokens_per_query": NotServed("queries are never cut", harmless=(0,)),
    "cache_salt": NotServed("all requests share one prefix cache"),
    "mm_processor_kwargs": NotServed("only text is read", harmless=({},)),
    "add_special_tokens": NotServed(
        "a prompt of text always begins with BOS where the model has one", harmless=(True,)
    ),
}


def _elsewhere(rows: Sequence[Field], why: str) -> dict[str, NotServed]:
    """The rows, for requests that do not have them. A value that is the default of all rows of its name is harmless."""
    found = {}
    for row in rows:
        defaults = [each.default for each in rows if each.name == row.name]
        is_one = defaults[0] is not None and all(each == defaults[0] for each in defaults)
        found[row.name] = NotServed(why, (defaults[0],) if is_one else ())
    return found


KNOWN_FIELDS: Mapping[str, NotServed] = {
    **_NOT_SERVED,
    "requests": NotServed("only a call to /v1/score without query and items has many requests"),
    **dict.fromkeys(PAIR_NAMES, NotServed("it is a field of vLLM's /score")),
    **_elsewhere(RERANK_FIELDS, "it is a field of other requests, which rerank documents"),
    **_elsewhere(SCORE_FIELDS, "it is a field of other requests, which score items (/v1/score)"),
}


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
    truncate_prompt_tokens: int | None = (
        None  # of query, document and the profile's text; None or -1: the model's limit
    )
    documents_field: str = "documents"  # the dialect's name for the documents, for errors
    warnings: tuple[str, ...] = ()  # about unknown fields

    @property
    def num_items(self) -> int:
        return len(self.documents)
