"""The bodies of requests and responses as JSON Schema. Request fields come from the tables of `contract`."""

from __future__ import annotations

from prefixwise.contract.fields import Schema, properties
from prefixwise.contract.request import IDS, TEXTS
from prefixwise.contract.rerank_request import Dialect, rerank_fields
from prefixwise.server.openapi_completions import COMPLETION_SCHEMAS
from prefixwise.server.openapi_errors import ERROR_TABLE
from prefixwise.server.openapi_scores import COUNT, SCORE_PROPERTIES, SCORE_SCHEMAS, WARNINGS, object_of, optional
from prefixwise.server.routes.tokens import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS

_PREFIX_REQUEST: Schema = {
    "type": "object",
    "required": ["query"],
    "properties": {
        "query": SCORE_PROPERTIES["query"],
        "ttl_seconds": optional(
            "number",
            "How long the prefix stays pinned.",
            DEFAULT_TTL_SECONDS,
            minimum=1,
            maximum=MAX_TTL_SECONDS,
        ),
        "profile": optional(
            "string",
            'Pin the prefix of rerank requests with this profile ("default": the model\'s own); the query must be '
            "text. If absent, pin the prefix of requests to /v1/score.",
        ),
        "instruction": optional("string", "The instruction of the rerank requests; if absent, the profile's own."),
        "model": SCORE_PROPERTIES["model"],
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
        "warnings": WARNINGS,
    },
    "warnings",
)

_TEXT_OR_TEXTS: list[Schema] = [{"type": "string"}, {**TEXTS, "minItems": 1}, {"type": "null"}]

_TOKENIZE_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "text": {"description": "One text, or a list of texts.", "anyOf": _TEXT_OR_TEXTS},
        "prompt": {"description": "Another name for text; give one of the two.", "anyOf": _TEXT_OR_TEXTS},
        "add_special_tokens": optional("boolean", "Put the tokens that start a prompt (BOS) before each text.", False),
        "model": SCORE_PROPERTIES["model"],
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
        "warnings": WARNINGS,
    },
    "warnings",
)

_MODEL_ENTRY = object_of(
    {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"const": "prefixwise"},
        "root": {"type": ["string", "null"], "description": "The model's own name, or the folder of a LoRA adapter."},
        "parent": {"type": ["string", "null"], "description": "Of a LoRA adapter: the model that it changes."},
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
            "description": "The model has no known profile, documents were cut, or unknown fields were ignored.",
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
_RESULT: Schema = {
    "index": {**COUNT, "description": "The index in the request."},
    "relevance_score": {"type": "number", "description": "From 0 to 1, unless use_activation is false."},
    "raw_score": {"type": "number", "description": "Before the mapping to 0 .. 1, if return_raw_scores is set."},
}
_V1_RESPONSE = object_of(
    {
        "id": {"type": "string"},
        "object": {"const": "list"},
        "model": {"type": "string"},
        "results": {
            "type": "array",
            "description": "Best first.",
            "items": object_of(
                {**_RESULT, "document": object_of({"text": {"type": "string"}})}, "document", "raw_score"
            ),
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
        "results": {"type": "array", "description": "Best first.", "items": object_of(_RESULT, "raw_score")},
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
        "error_type": {"enum": ["Validation", "Empty", "Tokenizer", "Overloaded", "Unhealthy", "Backend"]},
    }
)
_TEI_INFO = object_of(
    {
        "model_id": {"type": "string"},
        "model_sha": {"type": "null"},
        "model_dtype": {"type": "string"},
        "served_model_name": {"type": "string"},
        "model_type": {"anyOf": [object_of({name: {"type": "object"}}) for name in ("reranker", "classifier")]},
        "max_concurrent_requests": COUNT,
        "max_input_length": COUNT,
        "max_batch_tokens": COUNT,
        "max_batch_requests": {"type": "null"},
        "max_client_batch_size": COUNT,
        "auto_truncate": {"type": "boolean"},
        "tokenization_workers": COUNT,
        "version": {"type": "string"},
        "sha": {"type": "null"},
        "docker_label": {"type": "null"},
    }
)


_SCORED: Schema = {"index": COUNT, "relevance_score": {"type": "number"}}
_PROMPT_USAGE = object_of({"prompt_tokens": COUNT, "total_tokens": COUNT})
_SGLANG_RESPONSE: Schema = {
    "type": "array",
    "description": "Best first.",
    "items": object_of(
        {"score": _RELEVANCE, "document": {"type": "string"}, "index": COUNT, "meta_info": {"type": "null"}}, "document"
    ),
}
_SGLANG_ERROR = object_of(
    {
        "object": {"const": "error"},
        "message": {"type": "string"},
        "type": {"type": "string"},
        "param": {"type": ["string", "null"]},
        "code": {"type": "integer", "description": "The status."},
    }
)
_INFINITY_RESPONSE = object_of(
    {
        "object": {"const": "rerank"},
        "results": {"type": "array", "items": object_of({**_SCORED, "document": {"type": "string"}}, "document")},
        "model": {"type": "string"},
        "usage": _PROMPT_USAGE,
        "id": {"type": "string"},
        "created": COUNT,
        "warnings": WARNINGS,
    },
    "warnings",
)
_VOYAGE_RESPONSE = object_of(
    {
        "object": {"const": "list"},
        "data": {"type": "array", "items": object_of({**_SCORED, "document": {"type": "string"}}, "document")},
        "model": {"type": "string"},
        "usage": object_of({"total_tokens": COUNT}),
        "warnings": WARNINGS,
    },
    "warnings",
)
_MIXEDBREAD_RESPONSE = object_of(
    {
        "object": {"const": "list"},
        "model": {"type": "string"},
        "data": {
            "type": "array",
            "items": object_of(
                {"index": COUNT, "score": _RELEVANCE, "input": {}, "object": {"const": "rank_result"}}, "input"
            ),
        },
        "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT, "completion_tokens": {"const": 0}}),
        "top_k": COUNT,
        "return_input": {"type": "boolean"},
        "warnings": WARNINGS,
    },
    "warnings",
)
_NVIDIA_RESPONSE = object_of(
    {
        "rankings": {
            "type": "array",
            "description": "Best first.",
            "items": object_of({"index": COUNT, "logit": {"type": "number"}}),
        },
        "usage": _PROMPT_USAGE,
        "warnings": WARNINGS,
    },
    "warnings",
)


def _either(text: str, *names: str) -> Schema:
    return {"description": text, "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in names]}


_BY_FIELDS = "In the dialect of the request."


SCHEMAS: Schema = {
    **SCORE_SCHEMAS,
    "PrefixRequest": _PREFIX_REQUEST,
    "Prefix": _PREFIX,
    "PrefixList": _list_of("Prefix"),
    "PrefixReleased": object_of({"object": {"const": "prefix"}, "id": {"type": "string"}, "deleted": {"const": True}}),
    **COMPLETION_SCHEMAS,
    "TokenizeRequest": _TOKENIZE_REQUEST,
    "TokenizeResponse": _TOKENIZE_RESPONSE,
    "Model": _MODEL_ENTRY,
    "ModelList": _list_of("Model"),
    "LoadLoraRequest": object_of(
        {
            "lora_name": {"type": "string", "description": "What requests send as `model`."},
            "lora_path": {"type": "string", "description": "A folder on the server."},
            "load_inplace": {"type": "boolean", "default": False, "description": "Replace an adapter of this name."},
        },
        "load_inplace",
    ),
    "UnloadLoraRequest": object_of({"lora_name": {"type": "string"}}),
    "LoraResponse": object_of(
        {
            "success": {"const": True},
            "error_message": {"type": "string"},
            "loaded_adapters": {"type": "object", "description": "Folders by name.", "additionalProperties": True},
        }
    ),
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
    "SglangRerankRequest": _rerank_request("sglang"),
    "SglangRerankResponse": _SGLANG_RESPONSE,
    "SglangError": _SGLANG_ERROR,
    "InfinityRerankRequest": _rerank_request("infinity"),
    "InfinityRerankResponse": _INFINITY_RESPONSE,
    "VoyageRerankRequest": _rerank_request("voyage"),
    "VoyageRerankResponse": _VOYAGE_RESPONSE,
    "MixedbreadRerankRequest": _rerank_request("mixedbread"),
    "MixedbreadRerankResponse": _MIXEDBREAD_RESPONSE,
    "NvidiaRankingRequest": _rerank_request("nvidia"),
    "NvidiaRankingResponse": _NVIDIA_RESPONSE,
    "AnyRerankRequest": _either(
        "TEI's with `texts`, Voyage's with `top_k` or `truncation`, Infinity's with `raw_scores`, else Cohere's.",
        *("TeiRerankRequest", "RerankRequest", "VoyageRerankRequest", "InfinityRerankRequest"),
    ),
    "AnyRerankResponse": _either(
        _BY_FIELDS, "TeiRerankResponse", "RerankResponse", "VoyageRerankResponse", "InfinityRerankResponse"
    ),
    "AnyError": _either(f"{_BY_FIELDS} The second one without a readable body.", "TeiError", "Error"),
    "AnyRerankV1Request": _either(
        "Mixedbread's with `input`, Voyage's with `top_k` or `truncation`, Infinity's with `raw_scores`, SGLang's with "
        "`instruct` or with --rerank-format sglang, else Cohere's.",
        *("RerankRequest", "SglangRerankRequest", "VoyageRerankRequest"),
        *("InfinityRerankRequest", "MixedbreadRerankRequest"),
    ),
    "AnyRerankV1Response": _either(
        _BY_FIELDS,
        *("RerankResponse", "SglangRerankResponse", "VoyageRerankResponse"),
        *("InfinityRerankResponse", "MixedbreadRerankResponse"),
    ),
    "AnyV1Error": _either(f"{_BY_FIELDS} The first one without a readable body.", "Error", "SglangError"),
}
