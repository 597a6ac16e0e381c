"""The bodies of requests and responses as JSON Schema. Request fields come from the tables of `contract/request.py`."""

from __future__ import annotations

from prefixwise.contract.fields import Schema, properties
from prefixwise.contract.request import IDS, SCORE_FIELDS, TEXTS, Dialect, rerank_fields
from prefixwise.server.openapi_errors import ERROR_TABLE
from prefixwise.server.routes.tokens import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS

COUNT: Schema = {"type": "integer", "minimum": 0}
_SCORE_PROPERTIES = properties(SCORE_FIELDS)


def optional(kind: str, text: str, default: object = None, **more: object) -> Schema:
    """A field that may be absent or null."""
    return {"type": [kind, "null"], "default": default, "description": text, **more}


def object_of(properties: Schema, *optional: str, **more: object) -> Schema:
    """An object that has all of these properties except the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "required": required, "properties": properties, **more}


# Scores

_SCORE_REQUEST: Schema = {
    "type": "object",
    "required": ["query", "items"],
    "properties": _SCORE_PROPERTIES,
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
        "truncated": {
            "description": "Items that were cut to max_tokens_per_item.",
            "type": "array",
            "items": object_of({"index": COUNT, "original_tokens": COUNT, "kept_tokens": COUNT}),
        },
        "item_errors": {
            "description": 'Items without scores, if on_item_error is "report".',
            "type": "array",
            "items": object_of({"index": COUNT, "code": {"type": "string"}, "message": {"type": "string"}}),
        },
        "debug": {"type": "object", "description": "Present if return_debug is set."},
    },
    "truncated",
    "item_errors",
    "debug",
)

_PREFIX_REQUEST: Schema = {
    "type": "object",
    "required": ["query"],
    "properties": {
        "query": _SCORE_PROPERTIES["query"],
        "ttl_seconds": optional(
            "number",
            "How long the prefix stays pinned.",
            DEFAULT_TTL_SECONDS,
            exclusiveMinimum=0,
            maximum=MAX_TTL_SECONDS,
        ),
        "profile": optional(
            "string",
            'Pin the prefix of rerank requests with this profile ("default": the model\'s own); the query must be '
            "text. If absent, pin the prefix of requests to /v1/score.",
        ),
        "instruction": optional("string", "The instruction of the rerank requests; if absent, the profile's own."),
        "model": _SCORE_PROPERTIES["model"],
    },
}

_PREFIX = object_of(
    {
        "object": {"const": "prefix"},
        "id": {"type": "string", "description": "The prefix_id of DELETE /v1/prefix/{prefix_id}."},
        "model": {"type": "string"},
        "tokens": {**COUNT, "description": "Tokens of the prefix, with BOS and delimiter."},
        "cached_tokens": {**COUNT, "description": "Of these, tokens that were in the KV cache."},
        "bytes": {**COUNT, "description": "Memory on each device."},
        "ttl_seconds": {"type": "number"},
    }
)

_TEXT_OR_TEXTS: list[Schema] = [{"type": "string"}, {**TEXTS, "minItems": 1}, {"type": "null"}]

_TOKENIZE_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "text": {"description": "One text, or a list of texts.", "anyOf": _TEXT_OR_TEXTS},
        "prompt": {"description": "Another name for text; give one of the two.", "anyOf": _TEXT_OR_TEXTS},
        "add_special_tokens": optional("boolean", "Put the tokens that start a prompt (BOS) before each text.", False),
        "model": _SCORE_PROPERTIES["model"],
    },
    "anyOf": [
        {"required": ["text"], "properties": {"text": {"type": ["string", "array"]}, "prompt": {"type": "null"}}},
        {"required": ["prompt"], "properties": {"text": {"type": "null"}, "prompt": {"type": ["string", "array"]}}},
    ],
}

_TOKENIZE_RESPONSE = object_of(
    {
        "model": {"type": "string"},
        "tokens": {"anyOf": [IDS, {"type": "array", "items": IDS}]},
        "count": {"anyOf": [COUNT, {"type": "array", "items": COUNT}]},
        "max_model_len": COUNT,
    }
)

_MODEL_ENTRY = object_of(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"const": "prefixwise"},
        "root": {"type": ["string", "null"]},
        "max_model_len": {"type": ["integer", "null"], "description": "null while the model loads."},
    }
)


def _list_of(name: str) -> Schema:
    entries = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    return object_of({"object": {"const": "list"}, "data": entries})


_ERROR = object_of(
    {
        "error": object_of(
            {
                "message": {"type": "string", "description": "What was expected, what the request had, what to do."},
                "type": {"enum": sorted({row.type for row in ERROR_TABLE})},
                "param": {"type": ["string", "null"], "description": "The wrong field."},
                "code": {"type": "string", "description": "A code from the table of errors."},
            }
        ),
        "detail": {"type": "string", "description": "The message again, for clients that only read this."},
        "message": {"type": "string", "description": "The message again, for clients that only read this."},
    }
)

# Rerank requests and responses


def _rerank_request(dialect: Dialect) -> Schema:
    rows = rerank_fields(dialect)
    required = [row.name for row in rows if row.is_required]
    return {"type": "object", "required": required, "properties": properties(rows)}


_RELEVANCE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
_META = object_of(
    {
        "api_version": object_of({"version": {"type": "string"}}),
        "billed_units": object_of({"search_units": COUNT}),
        "tokens": object_of({"input_tokens": COUNT, "output_tokens": {"const": 0}}),
        "cached_tokens": {**COUNT, "description": "Prefix tokens that were in the KV cache."},
        "profile": {"type": "string", "description": "The profile that made the prompt."},
        "warnings": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The model has no known profile, or documents were cut.",
        },
        "truncated": {
            "type": "array",
            "items": object_of({"index": COUNT, "original_tokens": COUNT, "kept_tokens": COUNT}),
            "description": "Documents that were cut.",
        },
        "debug": {"type": "object", "description": "Present if return_debug is set."},
    },
    "warnings",
    "truncated",
    "debug",
)
_RESULT: Schema = {"index": {**COUNT, "description": "The index in the request."}, "relevance_score": _RELEVANCE}
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


SCHEMAS: Schema = {
    "ScoreRequest": _SCORE_REQUEST,
    "ScoreResponse": _SCORE_RESPONSE,
    "PrefixRequest": _PREFIX_REQUEST,
    "Prefix": _PREFIX,
    "PrefixList": _list_of("Prefix"),
    "PrefixReleased": object_of({"object": {"const": "prefix"}, "id": {"type": "string"}, "deleted": {"const": True}}),
    "TokenizeRequest": _TOKENIZE_REQUEST,
    "TokenizeResponse": _TOKENIZE_RESPONSE,
    "Model": _MODEL_ENTRY,
    "ModelList": _list_of("Model"),
    "Artifact": {"type": "object", "description": "A JSON file of a benchmark or validation run."},
    "ReportList": object_of(
        {
            "has_folder": {"type": "boolean", "description": "Whether the server was started with --reports-dir."},
            "artifacts": {
                "type": "array",
                "items": object_of(
                    {
                        "name": {"type": "string"},
                        "folder": {"type": "string"},
                        "kind": {"type": "string"},
                        "bytes": COUNT,
                        "note": {
                            "type": ["string", "null"],
                            "description": "What the file is, if it cannot be shown as a report.",
                        },
                    }
                ),
            },
        }
    ),
    "Health": object_of({"status": {"const": "ok"}}),
    "HealthGenerate": object_of({"status": {"const": "ok"}, "milliseconds": {"type": "number", "minimum": 0}}),
    "ServerInfo": object_of(
        {
            "status": {"enum": ["starting", "ready", "draining", "stopped"]},
            "version": {"type": "string"},
            "uptime_seconds": {"type": "number"},
            "api_key_set": {"type": "boolean"},
            "served_model_names": TEXTS,
            "configuration": {"type": "object", "description": "The configuration, every `auto` resolved."},
            "versions": {"type": "object"},
            "memory": {
                "type": "object",
                "description": "Peak bytes of the host, and the memory of the devices as the backend reports it.",
            },
            "model": {"type": "object"},
            "devices": {"type": "object"},
            "buckets": {"type": "object"},
            "prefix_cache": {"type": "object"},
            "max_queued_tokens": COUNT,
            "stats": {"type": "object"},
        },
        "model",
        "devices",
        "buckets",
        "prefix_cache",
        "max_queued_tokens",
        "stats",
    ),
    "Error": _ERROR,
    "RerankRequest": _rerank_request("cohere_v1"),
    "RerankResponse": _V1_RESPONSE,
    "RerankV2Request": _rerank_request("cohere_v2"),
    "RerankV2Response": _V2_RESPONSE,
    "TeiRerankRequest": _rerank_request("tei"),
    "TeiRerankResponse": _TEI_RESPONSE,
    "TeiError": _TEI_ERROR,
    "TeiInfo": _TEI_INFO,
    "AnyRerankRequest": _either("TeiRerankRequest", "RerankRequest", "With `texts`, or with `documents`."),
    "AnyRerankResponse": _either("TeiRerankResponse", "RerankResponse", "In the dialect of the request."),
    "AnyError": _either("TeiError", "Error", "In the dialect of the request; the second one without a readable body."),
}
