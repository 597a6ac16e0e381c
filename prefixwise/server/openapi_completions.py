"""The bodies of the routes that complete prompts and chats, and of those that show tokens, as JSON Schema."""

from __future__ import annotations

from prefixwise.contract.completions import CHAT_FIELDS, COMPLETION_FIELDS
from prefixwise.contract.fields import Schema, properties
from prefixwise.contract.request import IDS, TEXTS
from prefixwise.server.openapi_scores import COUNT, WARNINGS, object_of, optional

_LOGPROB: Schema = {"type": "number"}
_FINISH_REASON: Schema = {"enum": ["length", "stop"], "description": "stop: the token ends a text."}
_USAGE = object_of(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
    }
)


def _response(kind: str, choice: Schema) -> Schema:
    return object_of(
        {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": COUNT,
            "model": {"type": "string"},
            "choices": {"type": "array", "items": choice},
            "usage": _USAGE,
            "warnings": WARNINGS,
        },
        "warnings",
    )


_LOGPROBS = object_of(
    {
        "tokens": TEXTS,
        "token_logprobs": {
            "description": "Of each token behind those before it; null for the first token of a prompt.",
            "type": "array",
            "items": {**_LOGPROB, "type": ["number", "null"]},
        },
        "top_logprobs": {
            "description": "The most likely tokens at each position, and the one that is there.",
            "type": "array",
            "items": {"type": ["object", "null"], "additionalProperties": _LOGPROB},
        },
        "text_offset": {"type": "array", "items": COUNT, "description": "Where each token begins in the text."},
    }
)
_COMPLETION = object_of(
    {
        "index": {**COUNT, "description": "Of the prompt."},
        "text": {"type": "string", "description": "With `echo` the prompt, then the token that follows it."},
        "logprobs": {"anyOf": [_LOGPROBS, {"type": "null"}]},
        "finish_reason": _FINISH_REASON,
    }
)
_TOKEN: Schema = {
    "token": {"type": "string"},
    "logprob": _LOGPROB,
    "bytes": {"type": "array", "items": {**COUNT, "maximum": 255}},
}
_CHAT_COMPLETION = object_of(
    {
        "index": COUNT,
        "message": object_of({"role": {"const": "assistant"}, "content": {"type": "string"}}),
        "logprobs": {
            "anyOf": [
                object_of(
                    {
                        "content": {
                            "type": "array",
                            "items": object_of(
                                {**_TOKEN, "top_logprobs": {"type": "array", "items": object_of(_TOKEN)}}
                            ),
                        }
                    }
                ),
                {"type": "null"},
            ]
        },
        "finish_reason": _FINISH_REASON,
    }
)
_NULLABLE: Schema = {"type": ["string", "null"]}

COMPLETION_SCHEMAS: Schema = {
    "CompletionRequest": {
        "type": "object",
        "required": ["prompt", "max_tokens"],
        "properties": {**properties(COMPLETION_FIELDS), "max_tokens": {"enum": [0, 1]}},
    },
    "CompletionResponse": _response("text_completion", _COMPLETION),
    "ChatCompletionRequest": {
        "type": "object",
        "required": ["messages"],
        "properties": properties(CHAT_FIELDS),
        "anyOf": [
            {"required": ["max_tokens"], "properties": {"max_tokens": {"const": 1}}},
            {"required": ["max_completion_tokens"], "properties": {"max_completion_tokens": {"const": 1}}},
        ],
    },
    "ChatCompletionResponse": _response("chat.completion", _CHAT_COMPLETION),
    "DetokenizeRequest": {
        "type": "object",
        "required": ["tokens"],
        "properties": {"tokens": IDS, "model": optional("string", "A served name.")},
    },
    "DetokenizeResponse": object_of({"prompt": {"type": "string"}, "warnings": WARNINGS}, "warnings"),
    "TokenizerInfo": object_of(
        {
            **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "chat_template"), _NULLABLE),
            "add_bos_token": {"type": "boolean", "description": "Whether prompts of text begin with BOS."},
            "model_max_length": COUNT,
            "vocab_size": COUNT,
        }
    ),
}
