"""The fields of rerank requests in every dialect, one row each, and the object that parsing makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypedDict, get_args

from prefixwise.contract.errors import InvalidRequestError, InvalidValueError, describe
from prefixwise.contract.fields import Choice, Count, Field, Flag, Option, Schema, Structured, Text, missing, text
from prefixwise.contract.inputs import parse_documents
from prefixwise.contract.request import ALGORITHM, DEBUG_TOP_K, PRIORITY, Algorithm, TruncationSide

# native: Python, the command line and batches; the others are APIs, one file each in `server/dialects`
Dialect = Literal[
    "native", "cohere_v1", "cohere_v2", "tei", "sglang", "infinity", "voyage", "mixedbread", "nvidia", "vllm"
]

# As errors name them
FORMATS: Mapping[Dialect, str] = {
    "native": "these requests",
    "cohere_v1": "Cohere's format",
    "cohere_v2": "Cohere's format",
    "tei": "TEI's format, which `texts` asks for",
    "sglang": "SGLang's format",
    "infinity": "Infinity's format, which `raw_scores` asks for",
    "voyage": "Voyage's format, which `top_k` and `truncation` ask for",
    "mixedbread": "Mixedbread's format, which `input` asks for",
    "nvidia": "NVIDIA's format",
    "vllm": "the format of vLLM's /score",
}

_DOCUMENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]
}


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
AS_SENT = _OURS | _MIXEDBREAD  # their responses have a document as it was sent, with fields beside its text
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
    Field("algorithm", ALGORITHM.kind, ALGORITHM.about, ALGORITHM.default, option=ALGORITHM.option, dialects=_OURS),
    Field(
        "top_n",
        Count(),
        "How many of the best documents to return; all if absent or larger than their number.",
        option=Option("Only the N best documents.", names=("--top",), panel="Output"),
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
    replace(PRIORITY, dialects=_OURS | _VLLM),
    Field("return_debug", Flag(), "Report in `meta.debug` how the scores were computed.", False, dialects=_OURS),
    Field("debug_top_k", DEBUG_TOP_K.kind, DEBUG_TOP_K.about, dialects=_OURS),
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
    Field(
        "return_raw_scores",
        Flag(),
        "Also return each score as it is before the mapping to 0 .. 1, as raw_score.",
        False,
        attribute=None,
        dialects=_COHERE,
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
    cut_by: str = "truncate"  # what lets documents be cut in the dialect, for errors
    warnings: tuple[str, ...] = ()  # about unknown fields, and about those of documents

    @property
    def num_items(self) -> int:
        return len(self.documents)
