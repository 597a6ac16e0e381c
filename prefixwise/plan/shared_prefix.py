"""Which tokens an item shares with the request's prefix, and which are its own.

The split is the longest common prefix of *that item's* tokens and the prefix's tokens. It never depends on
the other items: otherwise adding one would move another's split, and with it its bits.

    prefix        q q q q
    apart         q q q q | a b        split 4
    joint         q q q X | a b        split 3: the tokenizer merged across the border
    empty         q q q | q            split 3: the last prefix token is computed again, to be read after
    item_first    | a b q q q q        split 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, ranges, starts_from_lens
from prefixwise.prompts.template import Prompt


@dataclass(frozen=True)
class SplitItems:
    """The request's prefix, and for every item how much of it it reads and what comes after."""

    prefix_ids: Int32Array  # [S]
    prefix_lens: Int64Array  # [I]: tokens of the prefix that the item reads
    tails: Ragged  # [I rows], each at least one token


def split_items(prompt: Prompt) -> SplitItems:
    """Find every item's split."""
    return _split_whole_rows(prompt) if prompt.joined else _split_tails(prompt)


def _split_whole_rows(prompt: Prompt) -> SplitItems:
    """Rows that may begin with the prefix's tokens."""
    rows = prompt.sequences
    shared = np.fromiter((common_prefix_len(prompt.prefix_ids, row) for row in rows), np.int64, len(rows))
    shared = np.minimum(shared, rows.lens - 1)
    tail_lens = rows.lens - shared
    flat = rows.flat[ranges(rows.starts[:-1] + shared, tail_lens)]
    return SplitItems(prompt.prefix_ids, shared, Ragged(flat, starts_from_lens(tail_lens)))


def _split_tails(prompt: Prompt) -> SplitItems:
    """Rows that stand behind the prefix, or behind its first tokens. An empty one takes the last of these back."""
    rows, prefix_ids = prompt.sequences, prompt.prefix_ids
    shared = prompt.shared_lens
    if shared is None:
        shared = np.full(len(rows), len(prefix_ids))
    is_empty = rows.lens == 0
    if not is_empty.any():
        return SplitItems(prefix_ids, shared, rows)
    shared = shared - is_empty
    flat = np.insert(rows.flat, rows.starts[:-1][is_empty], prefix_ids[shared[is_empty]])
    return SplitItems(prefix_ids, shared, Ragged(flat, starts_from_lens(np.maximum(rows.lens, 1))))


def common_prefix_len(prefix: Int32Array, row: Int32Array) -> int:
    """How many of the row's first tokens are the prefix's."""
    compared = min(len(prefix), len(row))
    differs = np.flatnonzero(prefix[:compared] != row[:compared])
    return int(differs[0]) if len(differs) else compared
