"""From a judge request to the token sequences that the model sees: the chat with each item in its place.

    before {item} after     tokenized as one text, as the chat of that item alone would be
    answers                 the tokens that they add to the text before them

The shared prefix is the part of `before` that no item can change. A chat without a place for items is one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.errors import InvalidValueError, quote
from prefixwise.contract.inputs import Place
from prefixwise.contract.judge import JudgeRequest
from prefixwise.contract.ragged import Int32Array, Ragged, ranges, starts_from_lens
from prefixwise.contract.result import Truncation
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.chat import ChatText, chat_text
from prefixwise.prompts.rerank import PROBE, common_prefix, shared_lens
from prefixwise.prompts.template import Prompt, missing_space_warnings
from prefixwise.prompts.tokenizer import TextTokenizer

_NOTHING = np.zeros(0, np.int32)
_CONTEXT_CHARS = 64  # before an answer, which its tokens may depend on


def build_judge_prompt(
    request: JudgeRequest, tokenizer: TextTokenizer | None, model: ModelConfig
) -> tuple[Prompt, tuple[str, ...]]:
    """The tokens, and warnings about answers that are hardly meant.

    Raises RequestError if the model cannot take the messages, TokenizerError if it has no tokenizer.
    """
    chat = chat_text(request.messages, tokenizer)
    assert tokenizer is not None, "`chat_text` raises without one"
    context = (chat.before if request.items is None else chat.after)[-_CONTEXT_CHARS:]
    label_ids = _answer_ids(request.answers, context, tokenizer)
    warnings = missing_space_warnings(request.answers, context, tokenizer, "answers")
    if request.items is None:
        return _whole(chat, label_ids, tokenizer, model), warnings
    items, truncated = _bounded_items(request.items, request.max_tokens_per_item, tokenizer)
    items = [chat.stripped(item) for item in items]
    check_token_count(len(tokenizer.encode(chat.after)) * len(items), "messages")
    fixed, found = tokenizer.encode_after(chat.before, ["", PROBE, *items], chat.after)
    head = common_prefix(found[0], found[1])
    whole = found.take(np.arange(2, len(found)))
    shared = shared_lens(head, whole)
    prefix_ids, lens = np.concatenate([fixed, head]), whole.lens - shared
    _check_room(len(prefix_ids), model)
    sequences = Ragged(whole.flat[ranges(whole.starts[:-1] + shared, lens)], starts_from_lens(lens))
    prompt = Prompt(
        prefix_ids=prefix_ids,
        sequences=sequences,
        joined=False,
        label_ids=label_ids,
        prompt_tokens=len(prefix_ids) + len(sequences.flat),
        truncated=truncated,
        shared_lens=len(fixed) + shared,
    )
    return prompt, warnings


def _whole(
    chat: ChatText, label_ids: tuple[tuple[int, ...], ...], tokenizer: TextTokenizer, model: ModelConfig
) -> Prompt:
    """A chat without a place for items: an empty item behind all of it."""
    ids = tokenizer.encode(chat.before)
    _check_room(len(ids), model)
    if not len(ids):
        message = "messages must have at least one token, got a chat that has none"
        raise InvalidValueError(message, code="empty_messages", param="messages")
    return Prompt(ids, Ragged.from_sequences([_NOTHING]), joined=False, label_ids=label_ids, prompt_tokens=len(ids))


def _check_room(num_tokens: int, model: ModelConfig) -> None:
    if num_tokens > model.max_context_len:
        message = f"messages must fit the model's {model.max_context_len} tokens, got {num_tokens}; shorten them"
        raise InvalidValueError(message, code="context_too_long", param="messages")


def _bounded_items(
    items: Sequence[str], max_tokens: int | None, tokenizer: TextTokenizer
) -> tuple[list[str], tuple[Truncation, ...]]:
    """The items without what is cut off, and those that were cut. Raises context_too_long."""
    if max_tokens is None:
        for index, item in enumerate(items):
            tokenizer.check_len(item, Place.of_item(index))
        return list(items), ()
    longest = min(max_tokens, tokenizer.max_context_len)
    bounded = [tokenizer.shortened(item, Place.of_item(index), longest) for index, item in enumerate(items)]
    lens = tokenizer.encode_many(bounded).lens
    cut = np.flatnonzero(lens > max_tokens).tolist()
    for index in cut:
        bounded[index] = tokenizer.cut(bounded[index], max_tokens)
    return bounded, tuple(Truncation(index, int(lens[index]), max_tokens) for index in cut)


def _answer_ids(answers: Sequence[str], context: str, tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each answer after the context; those of the answer alone where it would change the context's."""
    for index, answer in enumerate(answers):
        tokenizer.check_len(answer, Place(f"answers[{index}]", "answers"))
    before, *behind = tokenizer.encode_many(["", *answers], before=context)
    found: dict[tuple[int, ...], str] = {}
    for answer, both, alone in zip(answers, behind, tokenizer.encode_many(answers), strict=True):
        ids = _ids(both[len(before) :] if np.array_equal(both[: len(before)], before) else alone)
        if not ids:
            message = f"answers must have at least one token each, got {quote(answer)} which has none"
            raise InvalidValueError(message, code="empty_answers", param="answers")
        if ids in found:
            message = f"answers must differ in their tokens, got {quote(found[ids])} and {quote(answer)} with the same"
            raise InvalidValueError(message, code="invalid_answers", param="answers")
        found[ids] = answer
    return tuple(found)


def _ids(tokens: Int32Array) -> tuple[int, ...]:
    return tuple(tokens.tolist())
