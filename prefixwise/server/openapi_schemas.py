"""The shapes of bodies, as JSON Schema: what is really taken, and what really comes back."""

from __future__ import annotations

from prefixwise.contract.parse import ALGORITHMS, LABEL_SCORINGS, ON_ITEM_ERRORS, PLAIN, SCORE_MODES, TOKENIZATIONS
from prefixwise.server.openapi_errors import ERROR_TABLE
from prefixwise.server.openapi_parts import COUNT, IDS, MODEL, TEXTS, TOKEN_ID, Schema, choice, object_of, optional
from prefixwise.server.openapi_rerank import RERANK_SCHEMAS
from prefixwise.server.routes.prefix import DEFAULT_TTL_SECONDS, MAX_TTL_SECONDS

SCORE_FIELDS: Schema = {
    "query": {
        "description": "What all items are scored against: text or token ids, at least one.",
        "anyOf": [{"type": "string", "minLength": 1}, {**IDS, "minItems": 1}],
    },
    "items": {
        "description": "A list of texts, or a list of lists of token ids; one text is one item. An item may be empty.",
        "anyOf": [
            {"type": "string"},
            {**TEXTS, "minItems": 1},
            {"type": "array", "items": IDS, "minItems": 1},
        ],
    },
    "labels": optional(
        "array",
        "Labels as text; one of labels and label_token_ids.",
        minItems=1,
        items={"type": "string", "minLength": 1},
    ),
    "label_token_ids": optional(
        "array",
        'Labels as token ids; a list of ids is one label where label_scoring is "sequence".',
        minItems=1,
        items={"anyOf": [TOKEN_ID, {**IDS, "minItems": 1}]},
    ),
    "apply_softmax": optional("boolean", 'Score mode "softmax" when true, "prob" when false.', False),
    "score_mode": choice(SCORE_MODES, "What a score is; apply_softmax chooses where this is absent.", None),
    "label_scoring": choice(LABEL_SCORINGS, "A label is one token, or as many as it needs.", "single"),
    "item_first": optional("boolean", "The item stands before the query.", False),
    "suffix": {
        "description": "Stands after every item: text or token ids, like the query.",
        "default": None,
        "anyOf": [{"type": "string"}, IDS, {"type": "null"}],
    },
    "tokenization": choice(TOKENIZATIONS, "Query and item each on their own, or as one text.", "apart"),
    "max_tokens_per_item": optional("integer", "Longer items are cut at their end; absent: never.", minimum=1),
    "algorithm": choice(ALGORITHMS, "How it is computed; the scores are the same.", "auto"),
    "on_item_error": choice(
        ON_ITEM_ERRORS,
        "A bad item fails the request, or is reported in item_errors and has null for its scores.",
        "fail",
    ),
    "return_debug": optional("boolean", "Say in `debug` how it was computed.", False),
    "debug_top_k": optional(
        "integer",
        "Beside return_debug, for a request of one item: its tokens, and so many of the most likely next ones.",
        minimum=1,
    ),
    "profile": choice(
        (PLAIN,), "No other profile scores with labels of the request's own; the rerank routes do.", None
    ),
    "model": MODEL,
}

_SCORE_REQUEST: Schema = {
    "type": "object",
    "required": ["query", "items"],
    "properties": SCORE_FIELDS,
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
        "prompt_tokens": {**COUNT, "description": "What was sent: the query once, plus all items."},
        "total_tokens": COUNT,
        "completion_tokens": {"const": 0},
        "prompt_tokens_details": object_of(
            {"cached_tokens": {**COUNT, "description": "Prefix tokens that an earlier request had computed."}}
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
            "description": "Items that max_tokens_per_item has cut.",
            "type": "array",
            "items": object_of({"index": COUNT, "original_tokens": COUNT, "kept_tokens": COUNT}),
        },
        "item_errors": {
            "description": 'Items without scores, where on_item_error is "report".',
            "type": "array",
            "items": object_of({"index": COUNT, "code": {"type": "string"}, "message": {"type": "string"}}),
        },
        "debug": {"type": "object", "description": "Where return_debug was set."},
    },
    "truncated",
    "item_errors",
    "debug",
)

_PREFIX_REQUEST: Schema = {
    "type": "object",
    "required": ["query"],
    "properties": {
        "query": SCORE_FIELDS["query"],
        "ttl_seconds": optional(
            "number",
            "How long it is kept.",
            DEFAULT_TTL_SECONDS,
            exclusiveMinimum=0,
            maximum=MAX_TTL_SECONDS,
        ),
        "profile": optional(
            "string",
            'Keep what rerank requests with this query share, by this profile ("default": the model\'s own); then the '
            "query must be text. Absent: what requests to /v1/score share.",
        ),
        "instruction": optional("string", "Of the rerank requests; the profile's own when absent."),
        "model": MODEL,
    },
}

_PREFIX = object_of(
    {
        "object": {"const": "prefix"},
        "id": {"type": "string", "description": "For DELETE /v1/prefix/{prefix_id}."},
        "model": {"type": "string"},
        "tokens": {**COUNT, "description": "Of the prefix, with BOS and delimiter."},
        "cached_tokens": {**COUNT, "description": "Of these, computed before."},
        "bytes": {**COUNT, "description": "Memory that it takes on each device."},
        "ttl_seconds": {"type": "number"},
    }
)

_TEXT_OR_TEXTS: list[Schema] = [{"type": "string"}, {**TEXTS, "minItems": 1}, {"type": "null"}]

_TOKENIZE_REQUEST: Schema = {
    "type": "object",
    "properties": {
        "text": {"description": "One text, or many.", "anyOf": _TEXT_OR_TEXTS},
        "prompt": {"description": "Another name for text; one of the two.", "anyOf": _TEXT_OR_TEXTS},
        "add_special_tokens": optional("boolean", "Put before each text what starts a prompt (BOS).", False),
        "model": MODEL,
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
        "max_model_len": {"type": ["integer", "null"], "description": "null while the model is loading."},
    }
)


def _list_of(name: str) -> Schema:
    entries = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    return object_of({"object": {"const": "list"}, "data": entries})


_ERROR = object_of(
    {
        "error": object_of(
            {
                "message": {"type": "string", "description": "What was expected, what came, what to do."},
                "type": {"enum": sorted({row.type for row in ERROR_TABLE})},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": "string", "description": "One of those in the table of errors."},
            }
        ),
        "detail": {"type": "string", "description": "The message again: some clients read only this."},
        "message": {"type": "string", "description": "And again, for some others."},
    }
)

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
    "Artifact": {"type": "object", "description": "A file that a program of the harness has written."},
    "ReportList": object_of(
        {
            "has_folder": {"type": "boolean", "description": "Was the server started with --reports-dir?"},
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
                            "description": "What it is for, where it is no report that can be shown.",
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
            "configuration": {"type": "object", "description": "With every `auto` settled."},
            "versions": {"type": "object"},
            "memory": {
                "type": "object",
                "description": "Peak bytes of the host, and what the backend tells about its devices.",
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
    **RERANK_SCHEMAS,
}
