"""All fields that some request has: where a request does not serve one, it is an error; other names are warnings.

Also the fields of vLLM's requests that score: pairs of texts, and `/generative_scoring`. Fields of other servers are
known if they would change the response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from prefixwise.contract.fields import Field, Flag, NotServed, Text
from prefixwise.contract.request import SCORE_FIELDS
from prefixwise.contract.rerank_request import FORMATS, RERANK_FIELDS, Dialect, rerank_fields

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
    "cache_salt": NotServed("all requests share one prefix cache", harmless=("",)),
    "mm_processor_kwargs": NotServed("only text is read", harmless=({},)),
    "add_special_tokens": NotServed(
        "a prompt of text always begins with BOS where the model has one", harmless=(True,)
    ),
    "lora_path": NotServed("the name of a LoRA adapter is the `model`"),
    "activation": NotServed("its name is `use_activation`", harmless=(True,)),
    "chat_template": NotServed("the prompt is the model's own"),
    "dimensions": NotServed("hidden states are returned whole"),
    # Jina's
    "max_doc_length": NotServed("`max_tokens_per_doc` is what cuts documents"),
    "return_embeddings": NotServed("only scores and documents are returned", harmless=(False,)),
}


# vLLM's and SGLang's, which change the logits
_LOGITS = "logits are the model's own"
_CONSTRAINTS = (
    *("guided_choice", "guided_regex", "guided_json", "guided_grammar", "structured_outputs"),
    *("regex", "ebnf", "json_schema", "structural_tag", "allowed_token_ids", "bad_words"),
    *("logits_processors", "custom_logit_processor", "logit_bias"),
)
_OTHER_LOGITS = {
    **dict.fromkeys(_CONSTRAINTS, NotServed(_LOGITS, harmless=([], {}, ""))),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), NotServed(_LOGITS, harmless=(0, 0.0))),
    "repetition_penalty": NotServed(_LOGITS, harmless=(1, 1.0)),
    "min_tokens": NotServed(_LOGITS, harmless=(0,)),
}


def not_generated(why: str) -> dict[str, NotServed]:
    """The fields of requests that generate, for requests that do not."""
    return {
        **dict.fromkeys(("temperature", "top_p", "n"), NotServed(why, harmless=(1, 1.0))),
        **dict.fromkeys(("stream", "logprobs"), NotServed(why, harmless=(False,))),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "top_logprobs"), NotServed(why, harmless=(0,))),
        **dict.fromkeys(("tools", "stop"), NotServed(why, harmless=([], ""))),
        "stream_options": NotServed(why),
        "tool_choice": NotServed(why, harmless=("none", "auto")),
        "response_format": NotServed(why, harmless=({"type": "text"},)),
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
    **_OTHER_LOGITS,
    **not_generated("nothing is generated"),
    "requests": NotServed("only HTTP's POST /v1/score takes many at once; here each is a call or a row of its own"),
    **dict.fromkeys(("messages", "answers", "values"), NotServed("it is a field of requests that judge (/v1/judge)")),
    **dict.fromkeys(PAIR_NAMES, NotServed("it is a field of vLLM's /score")),
    **_elsewhere(RERANK_FIELDS, "it is a field of other requests, which rerank documents"),
    **_elsewhere(SCORE_FIELDS, "it is a field of other requests, which score items (/v1/score)"),
}


@cache
def known_fields_of(dialect: Dialect) -> Mapping[str, NotServed]:
    """The known fields, for rerank requests: those of other dialects with the dialect's own names for them."""
    form, names = FORMATS[dialect], {row.attribute or row.name: row.name for row in rerank_fields(dialect)}
    found = dict(KNOWN_FIELDS)
    for row in RERANK_FIELDS:
        name = names.get(row.attribute or row.name)
        why = f"it is no field of {form}" if name is None else f"its name is `{name}` in {form}"
        found[row.name] = found[row.name]._replace(why=why)
    return found


# Fields of vLLM's and SGLang's requests that generate

_END = "the answer follows the chat at once, or continues an assistant's message at its end"

KNOWN_GENERATION: Mapping[str, NotServed] = {
    "prompt_embeds": NotServed("a prompt is text or token ids"),
    # Of chats
    "chat_template": NotServed("the model's own chat template is used"),
    "chat_template_kwargs": NotServed(
        "the template runs with enable_thinking false and nothing else", harmless=({}, {"enable_thinking": False})
    ),
    "add_generation_prompt": NotServed(_END, harmless=(True,)),
    "continue_final_message": NotServed(_END, harmless=(False,)),
    "reasoning_effort": NotServed(_END, harmless=("none",)),
    "documents": NotServed("the chat is the messages alone", harmless=([],)),
    "echo": NotServed("the answer is returned without the chat", harmless=(False,)),
    "add_special_tokens": NotServed("the chat template writes them", harmless=(False,)),
}
