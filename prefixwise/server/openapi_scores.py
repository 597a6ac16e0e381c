"""The bodies of the routes that score items or pairs, as JSON Schema; and what all schemas share."""

from __future__ import annotations

from prefixwise.contract.classify import CLASSIFY_FIELDS, EMBED_FIELDS
from prefixwise.contract.fields import Schema, Structured, properties
from prefixwise.contract.judge import JUDGE_FIELDS
from prefixwise.contract.known_fields import GENERATIVE_FIELDS, PAIR_FIELDS, REQUEST_ID
from prefixwise.contract.parse import MAX_REQUESTS_PER_CALL
from prefixwise.contract.request import SCORE_FIELDS, TEXTS
from prefixwise.contract.rerank_request import rerank_fields

COUNT: Schema = {"type": "integer", "minimum": 0}
SCORE_PROPERTIES = properties(SCORE_FIELDS)


def optional(kind: str, text: str, default: object = None, **more: object) -> Schema:
    """A field that may be absent or null."""
    return {"type": [kind, "null"], "default": default, "description": text, **more}


def object_of(properties: Schema, *optional: str, **more: object) -> Schema:
    """An object that has all of these properties except the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties, **more}


TRUNCATED: Schema = {
    "type": "array",
    "items": object_of({"index": COUNT, "original_tokens": COUNT, "kept_tokens": COUNT}),
}
WARNINGS: Schema = {**TEXTS, "description": "Unknown fields, which were ignored, and labels that are hardly meant."}

# One request

_SCORE_REQUEST: Schema = {
    "type": "object",
    "required": ["query", "items"],
    "properties": SCORE_PROPERTIES,
    "allOf": [
        {
            "anyOf": [
                {
                    "description": "Text throughout.",
                    "properties": {
                        "query": {"type": "string"},
                        "items": {"anyOf": [{"type": "string"}, TEXTS]},
                        "suffix": {"type": ["string", "null"]},
                    },
                },
                {
                    "description": "Token ids throughout.",
                    "properties": {
                        "query": {"type": "array"},
                        "items": {"type": "array", "items": {"type": "array"}},
                        "suffix": {"type": ["array", "null"]},
                    },
                },
            ]
        },
        {
            "anyOf": [
                {
                    "required": ["labels"],
                    "properties": {"labels": {"type": "array"}, "label_token_ids": {"type": "null"}},
                },
                {
                    "required": ["label_token_ids"],
                    "properties": {"labels": {"type": "null"}, "label_token_ids": {"type": "array"}},
                },
                {
                    "description": "The classes of a classifier.",
                    "properties": {"labels": {"type": "null"}, "label_token_ids": {"type": "null"}},
                },
            ]
        },
    ],
}


USAGE = object_of(
    {
        "prompt_tokens": {**COUNT, "description": "The query once, plus all items."},
        "total_tokens": COUNT,
        "completion_tokens": {"const": 0},
        "prompt_tokens_details": object_of(
            {"cached_tokens": {**COUNT, "description": "Prefix tokens that were in the KV cache."}}
        ),
    }
)

_SCORE_RESPONSE = object_of(
    {
        "object": {"const": "scoring"},
        "model": {"type": "string"},
        "scores": {
            "description": "Rows in item order, columns in label order; null for an item in item_errors.",
            "type": "array",
            "items": {"type": ["array", "null"], "items": {"type": "number"}},
        },
        "usage": USAGE,
        "labels": {**TEXTS, "description": "The names of a classifier's classes, in the order of the columns."},
        "pooled_hidden_states": {
            "description": "Of each item, if return_pooled_hidden_states is set; null for an item in item_errors.",
            "type": "array",
            "items": {"type": ["array", "null"], "items": {"type": "number"}},
        },
        "truncated": {"description": "Items that were cut to max_tokens_per_item.", **TRUNCATED},
        "item_errors": {
            "description": 'Items without scores, if on_item_error is "report".',
            "type": "array",
            "items": object_of({"index": COUNT, "code": {"type": "string"}, "message": {"type": "string"}}),
        },
        "warnings": WARNINGS,
        "debug": {"type": "object", "description": "Present if return_debug is set."},
    },
    "labels",
    "pooled_hidden_states",
    "truncated",
    "item_errors",
    "warnings",
    "debug",
)

# Many requests

_DEFAULTS = [row for row in SCORE_FIELDS if row.name not in ("query", "items")]
_CHECKED_ALONE = ("labels", "label_token_ids")  # of the structured fields; the other ones depend on the request
_MANY_REQUEST: Schema = {
    "type": "object",
    "description": "The fields beside `requests` are defaults of the fields that a request does not have.",
    "required": ["requests"],
    "properties": {
        "requests": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_REQUESTS_PER_CALL,
            "items": {"description": "Like ScoreRequest. One that is not gets its error in the response."},
        },
        "query": {"type": "null"},
        "items": {"type": "null"},
        **{
            row.name: {"description": row.about}
            if isinstance(row.kind, Structured) and row.name not in _CHECKED_ALONE
            else row.schema()
            for row in _DEFAULTS
        },
    },
}
_MANY_RESPONSE = object_of(
    {
        "object": {"const": "list"},
        "model": {"type": "string"},
        "data": {
            "description": "One for each request, in their order: its response, or its error.",
            "type": "array",
            "items": {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("ScoreResponse", "Error")]},
        },
        "usage": USAGE,
        "warnings": WARNINGS,
    },
    "warnings",
)

# vLLM's requests

_DOCUMENTS: Schema = next(row for row in rerank_fields("cohere_v1") if row.name == "documents").kind.schema()
_FIRST: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _DOCUMENTS]}
_SECOND: Schema = {"anyOf": [{"type": "string"}, _DOCUMENTS]}
_PAIRS_REQUEST: Schema = {
    "type": "object",
    "description": "One text, or as many as of the second kind, each of which makes a pair with one of them.",
    "properties": properties((*rerank_fields("vllm"), REQUEST_ID)),
    "anyOf": [
        {"required": [first, second], "properties": {first: _FIRST, second: _SECOND}} for first, second in PAIR_FIELDS
    ],
}


def _list_response(data: Schema, about: str, about_truncated: str, **more: Schema) -> Schema:
    """As in vLLM's API: one of `data` for each of the request's inputs. `more`: further properties."""
    return object_of(
        {
            "id": {"type": "string"},
            "object": {"const": "list"},
            "created": COUNT,
            "model": {"type": "string"},
            "data": {"description": about, "type": "array", "items": data},
            **more,
            "usage": USAGE,
            "warnings": WARNINGS,
            "truncated": {"description": about_truncated, **TRUNCATED},
        },
        "warnings",
        "truncated",
    )


_LIST_RESPONSE = _list_response(
    object_of({"index": COUNT, "object": {"const": "score"}, "score": {"type": "number"}}),
    "One for each pair or item, in their order.",
    "Second texts that were cut.",
)
_GENERATIVE_REQUEST: Schema = {
    **_SCORE_REQUEST,
    "required": ["query", "items", "label_token_ids"],
    "properties": {
        **properties(GENERATIVE_FIELDS),
        "label_token_ids": {**SCORE_PROPERTIES["label_token_ids"], "type": "array"},
        "apply_softmax": {**SCORE_PROPERTIES["apply_softmax"], "default": True},
    },
    "allOf": _SCORE_REQUEST["allOf"][:1],
}

# Judgements

_JUDGE_REQUEST: Schema = {
    "type": "object",
    "required": ["messages", "answers"],
    "properties": properties(JUDGE_FIELDS),
}
_JUDGE_RESPONSE = object_of(
    {
        "object": {"const": "judge"},
        "model": {"type": "string"},
        "answers": {**TEXTS, "description": "In the order of probs."},
        "results": {
            "description": "One for each item, in their order; one if the request has no items.",
            "type": "array",
            "items": object_of(
                {
                    "index": COUNT,
                    "answer": {"type": "string", "description": "The most likely answer."},
                    "probs": {
                        "description": "The probability of each answer among all of them.",
                        "type": "array",
                        "items": {"type": "number"},
                    },
                    "expected_value": {
                        "description": "The mean of the answers' values; null if they have none.",
                        "type": ["number", "null"],
                    },
                    "entropy": {"type": "number", "minimum": 0, "description": "Of the distribution, in bits."},
                    "mass": {
                        "description": "How likely it is that the model gives one of the answers at all.",
                        "type": "number",
                        "minimum": 0,
                        "maximum": 1,
                    },
                }
            ),
        },
        "usage": USAGE,
        "truncated": {"description": "Items that were cut to max_tokens_per_item.", **TRUNCATED},
        "warnings": WARNINGS,
        "debug": {"type": "object", "description": "Present if return_debug is set."},
    },
    "truncated",
    "warnings",
    "debug",
)

# Classes

_CLASSIFY_REQUEST: Schema = {
    "type": "object",
    "required": ["input"],
    "properties": properties(CLASSIFY_FIELDS),
}
_CLASSIFY_RESPONSE = _list_response(
    object_of(
        {
            "index": COUNT,
            "label": {"type": "string", "description": "The class with the largest number, by its id2label."},
            "probs": {
                "description": "In the order of the classes; logits if use_activation is false.",
                "type": "array",
                "items": {"type": "number"},
            },
            "num_classes": COUNT,
        }
    ),
    "One for each input, in their order.",
    "Inputs that were cut to truncate_prompt_tokens.",
    labels={**TEXTS, "description": "The names of the classes, in the order of probs."},
)
_EMBED_REQUEST: Schema = {"type": "object", "required": ["input"], "properties": properties(EMBED_FIELDS)}
_EMBED_RESPONSE = _list_response(
    object_of(
        {
            "index": COUNT,
            "object": {"const": "embedding"},
            "embedding": {
                "description": "The hidden state after the last token; with encoding_format base64 its bytes.",
                "anyOf": [
                    {"type": "array", "items": {"type": "number"}},
                    {"type": "string", "contentEncoding": "base64"},
                ],
            },
        }
    ),
    "One for each input, in their order.",
    "Inputs that were cut to truncate_prompt_tokens.",
)

SCORE_SCHEMAS: Schema = {
    "ScoreRequest": _SCORE_REQUEST,
    "ScoreResponse": _SCORE_RESPONSE,
    "ScoreManyRequest": _MANY_REQUEST,
    "ScoreManyResponse": _MANY_RESPONSE,
    "VllmScoreRequest": _PAIRS_REQUEST,
    "VllmScoreResponse": _LIST_RESPONSE,
    "GenerativeScoringRequest": _GENERATIVE_REQUEST,
    "JudgeRequest": _JUDGE_REQUEST,
    "JudgeResponse": _JUDGE_RESPONSE,
    "ClassifyRequest": _CLASSIFY_REQUEST,
    "ClassifyResponse": _CLASSIFY_RESPONSE,
    "EmbedRequest": _EMBED_REQUEST,
    "EmbedResponse": _EMBED_RESPONSE,
    **{
        f"AnyScore{kind}": {
            "description": text,
            "anyOf": [{"$ref": f"#/components/schemas/{name}{kind}"} for name in ("Score", "ScoreMany", "VllmScore")],
        }
        for kind, text in (
            ("Request", "One request; many with `requests`; vLLM's with `text_1` or `queries`."),
            ("Response", "In the form of the request."),
        )
    },
}
