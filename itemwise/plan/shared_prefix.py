"""Which tokens an item shares with the request's prefix, and which are its own.

The split is the longest common prefix of *that item's* tokens and the prefix's tokens. It never depends on the other
items: otherwise adding one would move another's split, and with it its bits.

    prefix        q q q q
    apart         q q q q | a b        split 4
    joint         q q q X | a b        split 3: the tokenizer merged across the border
    empty         q q q | q            split 3: the last prefix token is computed again, to have something to read
    item_first    | a b q q q q        split 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from itemwise.contract.errors import InvalidValueError, RequestError
from itemwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from itemwise.prompts.template import Prompt


@dataclass(frozen=True)
class SplitItems:
    """The request's prefix, and for every item how much of it it reads and what comes after."""

    prefix_ids: Int32Array  # [S]
    prefix_lens: Int64Array  # [I]: tokens of the prefix that the item reads
    tails: Ragged  # [I rows], each at least one token


def split_items(prompt: Prompt) -> SplitItems:
    """Find every item's split."""
    if prompt.joined:
        shared = common_prefix_lens(prompt.prefix_ids, prompt.sequences)
        whole = prompt.sequences
    else:
        shared = np.full(len(prompt.sequences), len(prompt.prefix_ids), np.int64)
        whole = None
    total_lens = prompt.context_lens()
    shared = np.minimum(shared, total_lens - 1)  # an empty tail gives one token back
    return SplitItems(prompt.prefix_ids, shared, _tails(prompt, whole, shared))


def _tails(prompt: Prompt, whole: Ragged | None, shared: Int64Array) -> Ragged:
    if whole is not None:
        lens = whole.lens - shared
        return Ragged(whole.flat[ranges(whole.starts[:-1] + shared, lens)], starts_from_lens(lens))
    empty = np.flatnonzero(prompt.sequences.lens == 0)
    if not len(empty):
        return prompt.sequences
    lens = np.maximum(prompt.sequences.lens, 1)
    starts = starts_from_lens(lens)
    flat = np.empty(int(starts[-1]), np.int32)
    flat[ranges(starts[:-1], prompt.sequences.lens)] = prompt.sequences.flat
    flat[starts[:-1][empty]] = prompt.prefix_ids[-1]
    return Ragged(flat, starts)


def common_prefix_lens(prefix: Int32Array, rows: Ragged) -> Int64Array:
    """For every row, how many of its first tokens are the prefix's."""
    compared = np.minimum(rows.lens, len(prefix))
    offsets = ranges(np.zeros(len(rows), np.int64), compared)
    row_of = np.repeat(np.arange(len(rows)), compared)
    differs = rows.flat[rows.starts[:-1][row_of] + offsets] != prefix[offsets]
    found = compared.copy()
    np.minimum.at(found, row_of[differs], offsets[differs])
    return found


def check_context(prompt: Prompt, max_context_len: int, label_tokens: int, *, report: bool) -> dict[int, RequestError]:
    """The errors of items that do not fit the model; raises the first instead unless they are to be reported.

    `label_tokens`: how many tokens of a label the model must see too (all but the last of the longest).
    """
    needed = prompt.context_lens() + label_tokens
    errors: dict[int, RequestError] = {}
    for item in np.flatnonzero(needed > max_context_len):
        if int(item) in prompt.item_errors:
            continue
        own = int(prompt.sequences.lens[item])
        parts = f"{own} tokens" if prompt.joined else f"prefix {len(prompt.prefix_ids)} + item {own} tokens"
        labels = f" + label {label_tokens}" if label_tokens else ""
        error = InvalidValueError(
            f"items[{item}] must fit the model's {max_context_len} tokens, got {parts}{labels}; "
            "shorten it or set max_tokens_per_item",
            code="context_too_long",
            param="items",
            item_index=int(item),
        )
        if not report:
            raise error
        errors[int(item)] = error
    return errors
