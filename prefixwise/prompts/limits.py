"""What a model cannot take: contexts that are too long, and tokens that it does not have.

The last check before any work. Ids that a caller sent were held against the vocabulary by the contract; a
tokenizer may still know tokens that the model's embedding lacks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefixwise.contract.errors import InvalidValueError, RequestError, VocabularyError
from prefixwise.models.config import ModelConfig
from prefixwise.prompts.template import Prompt


def check_limits(prompt: Prompt, model: ModelConfig, *, label_tokens: int, report: bool) -> dict[int, RequestError]:
    """The errors of items that the model cannot take; raises the first instead unless `report`.

    `label_tokens`: how many tokens of a label the model must see too (all but the last of the longest).
    """
    _check_common_tokens(prompt, model.vocab_size)
    errors: dict[int, RequestError] = {}
    for item, error in _item_errors(prompt, model, label_tokens):
        if item in prompt.item_errors or item in errors:
            continue
        if not report:
            raise error
        errors[item] = error
    return errors


def _check_common_tokens(prompt: Prompt, vocab_size: int) -> None:
    unknown = prompt.prefix_ids[prompt.prefix_ids >= vocab_size]
    if len(unknown):
        raise _unknown_token("query", "query", int(unknown[0]), vocab_size, None)
    for number, label in enumerate(prompt.label_ids):
        if max(label) >= vocab_size:
            raise _unknown_token(f"labels[{number}]", "labels", max(label), vocab_size, None)


def _item_errors(prompt: Prompt, model: ModelConfig, label_tokens: int) -> Iterator[tuple[int, RequestError]]:
    needed = prompt.context_lens() + label_tokens
    for item in np.flatnonzero(needed > model.max_context_len).tolist():
        yield item, _too_long(prompt, item, model.max_context_len, label_tokens)
    rows = prompt.sequences
    for position in np.flatnonzero(rows.flat >= model.vocab_size).tolist():
        item = int(np.searchsorted(rows.starts, position, side="right")) - 1
        token = int(rows.flat[position])
        name = prompt.items_field
        yield item, _unknown_token(f"{name}[{item}]", name, token, model.vocab_size, item)


def _too_long(prompt: Prompt, item: int, max_context_len: int, label_tokens: int) -> InvalidValueError:
    own = int(prompt.sequences.lens[item])
    parts = f"{own} tokens" if prompt.joined else f"prefix {len(prompt.prefix_ids)} + item {own} tokens"
    labels = f" + label {label_tokens}" if label_tokens else ""
    is_hopeless = len(prompt.prefix_ids) + label_tokens > max_context_len  # not even an empty item would fit
    advice = "shorten the query" if is_hopeless else "shorten it or set max_tokens_per_item"
    return InvalidValueError(
        f"items[{item}] must fit the model's {max_context_len} tokens, got {parts}{labels}; {advice}",
        code="context_too_long",
        param="items",
        item_index=item,
    )


def _unknown_token(where: str, param: str, token: int, vocab_size: int, item: int | None) -> VocabularyError:
    return VocabularyError(
        f"{where} must hold tokens below {vocab_size}, the model's vocabulary size, "
        f"got a text that its tokenizer gives token {token}",
        code="token_id_exceeds_vocab",
        param=param,
        item_index=item,
    )
