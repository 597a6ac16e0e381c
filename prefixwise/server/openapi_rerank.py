"""The bodies of the rerank routes, as JSON Schema."""

from __future__ import annotations

from prefixwise.contract.parse import ALGORITHMS
from prefixwise.contract.parse_rerank import MAX_PRIORITY, TRUNCATION_SIDES
from prefixwise.server.openapi_parts import COUNT, Schema, choice, object_of, optional

_QUERY: Schema = {"type": "string", "minLength": 1, "description": "What the documents are ordered by."}
_DOCUMENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}]
}
_DOCUMENTS: Schema = {
    "type": "array",
    "minItems": 1,
    "items": _DOCUMENT,
    "description": "At least one; any may be empty, or stand there twice.",
}
_TOP_N = optional("integer", "How many of the best come back; all when absent, or when it is more.", minimum=1)
_MODEL = optional("string", "Any name, unless the server was started with --strict-model.")
_RANK_FIELDS: Schema = {
    "enum": [["text"], None],
    "default": None,
    "description": "Of a document that is an object, `text` is what is read.",
}
_OURS: Schema = {
    "profile": optional("string", 'How the prompt is made; absent or "default": as goes with the model.'),
    "instruction": optional("string", "What the profile's prompt is to ask; its own question when absent."),
    "max_tokens_per_doc": optional("integer", "Longer documents are cut; absent: as long as fits.", minimum=1),
    "truncation_side": choice(TRUNCATION_SIDES, "Which end of a long document is cut off.", "right"),
    "truncate": optional("boolean", "false: a document that does not fit is an error.", True),
    "algorithm": choice(ALGORITHMS, "How it is computed; the scores are the same.", "auto"),
    "return_debug": optional("boolean", "Say in `meta.debug` how it was computed.", False),
    "debug_top_k": optional(
        "integer",
        "Beside return_debug, for a request of one item: its tokens, and so many of the most likely next ones.",
        minimum=1,
    ),
    "model": _MODEL,
}
_CHUNKS = optional(
    "integer", "A document that does not fit is cut into at most so many, and its best one counts.", minimum=1
)
_PRIORITY = optional("integer", "Lower ones are served first.", 0, minimum=0, maximum=MAX_PRIORITY)

_COHERE_FIELDS: Schema = {
    "query": _QUERY,
    "documents": _DOCUMENTS,
    "top_n": _TOP_N,
    "max_chunks_per_doc": _CHUNKS,
    "rank_fields": _RANK_FIELDS,
    "priority": _PRIORITY,
    **_OURS,
}
_V2_REQUEST: Schema = {"type": "object", "required": ["query", "documents"], "properties": _COHERE_FIELDS}
_V1_REQUEST: Schema = {
    **_V2_REQUEST,
    "properties": {
        **_COHERE_FIELDS,
        "return_documents": optional("boolean", "Send each document back with its score.", False),
    },
}
_TEI_REQUEST: Schema = {
    "type": "object",
    "required": ["query", "texts"],
    "properties": {
        "query": _QUERY,
        "texts": _DOCUMENTS,
        "truncate": optional("boolean", "Cut what does not fit, which is an error otherwise.", False),
        "truncation_direction": choice(("Right", "Left"), "Which end is cut off.", "Right"),
        "raw_scores": optional("boolean", "The score before it was brought to 0 .. 1.", False),
        "return_text": optional("boolean", "Send each text back with its score.", False),
        "top_n": _TOP_N,
        **{name: _OURS[name] for name in ("profile", "instruction", "max_tokens_per_doc", "model")},
    },
}

_RELEVANCE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_META = object_of(
    {
        "api_version": object_of({"version": {"type": "string"}}),
        "billed_units": object_of({"search_units": COUNT}),
        "tokens": object_of({"input_tokens": COUNT, "output_tokens": {"const": 0}}),
        "cached_tokens": {**COUNT, "description": "Prefix tokens that an earlier request had computed."},
        "profile": {"type": "string", "description": "How the prompt was made."},
        "warnings": {
            "type": "array",
            "items": {"type": "string"},
            "description": "No profile is known for the model, or documents were cut.",
        },
        "truncated": {
            "type": "array",
            "items": object_of({"index": COUNT, "original_tokens": COUNT, "kept_tokens": COUNT}),
            "description": "Documents that were cut.",
        },
        "debug": {"type": "object", "description": "Where return_debug was set."},
    },
    "warnings",
    "truncated",
    "debug",
)
_RESULT: Schema = {"index": {**COUNT, "description": "Where it stood in the request."}, "relevance_score": _RELEVANCE}
_V1_RESPONSE = object_of(
    {
        "id": {"type": "string"},
        "object": {"const": "list"},
        "model": {"type": "string"},
        "results": {
            "type": "array",
            "description": "Best first.",
            "items": object_of({**_RESULT, "document": object_of({"text": {"type": "string"}})}, "document"),
        },
        "usage": object_of(
            {
                "prompt_tokens": COUNT,
                "total_tokens": COUNT,
                "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
            }
        ),
        "meta": _META,
    }
)
_V2_RESPONSE = object_of(
    {
        "id": {"type": "string"},
        "results": {"type": "array", "description": "Best first.", "items": object_of(_RESULT)},
        "meta": _META,
    }
)
_TEI_RESPONSE: Schema = {
    "type": "array",
    "description": "Best first.",
    "items": object_of({"index": COUNT, "score": {"type": "number"}, "text": {"type": "string"}}, "text"),
}
_TEI_ERROR = object_of(
    {
        "error": {"type": "string"},
        "error_type": {"enum": ["Validation", "Tokenizer", "Overloaded", "Unhealthy", "Backend"]},
    }
)
_TEI_INFO = object_of(
    {
        "model_id": {"type": "string"},
        "model_sha": {"type": "null"},
        "model_dtype": {"type": "string"},
        "model_type": object_of({"reranker": {"type": "object"}}),
        "max_concurrent_requests": COUNT,
        "max_input_length": COUNT,
        "max_batch_tokens": COUNT,
        "max_batch_requests": {"type": "null"},
        "max_client_batch_size": COUNT,
        "auto_truncate": {"const": False},
        "tokenization_workers": COUNT,
        "version": {"type": "string"},
        "sha": {"type": "null"},
        "docker_label": {"type": "null"},
    }
)


def _either(one: str, other: str, text: str) -> Schema:
    return {"description": text, "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in (one, other)]}


RERANK_SCHEMAS: Schema = {
    "RerankRequest": _V1_REQUEST,
    "RerankResponse": _V1_RESPONSE,
    "RerankV2Request": _V2_REQUEST,
    "RerankV2Response": _V2_RESPONSE,
    "TeiRerankRequest": _TEI_REQUEST,
    "TeiRerankResponse": _TEI_RESPONSE,
    "TeiError": _TEI_ERROR,
    "TeiInfo": _TEI_INFO,
    "AnyRerankRequest": _either("TeiRerankRequest", "RerankRequest", "With `texts`, or with `documents`."),
    "AnyRerankResponse": _either("TeiRerankResponse", "RerankResponse", "As was asked."),
    "AnyError": _either("TeiError", "Error", "As was asked; before the body was read, the second."),
}
