"""The labels and the delimiter of the contract workload, and what stands in for them where a vocabulary lacks them."""

from __future__ import annotations

from collections.abc import Collection

from prefixwise.bench.token_facts import TokenFacts

DEFAULT_LABELS = (9454, 2753)
DEFAULT_DELIMITER = 151643


def default_labels(facts: TokenFacts, taken: Collection[int] = ()) -> tuple[tuple[int, ...], str | None]:
    """The pair, and what is to be said where it is not the usual one: half of that pair has no meaning."""
    if max(DEFAULT_LABELS) < facts.vocab_size:
        return DEFAULT_LABELS, None
    if facts.answer_ids and not set(facts.answer_ids) & set(taken):
        own, which = facts.answer_ids, "its tokens Yes and No"
    else:
        left_out = {*facts.special_ids, *taken}
        ordinary = [token_id for token_id in range(facts.num_tokens) if token_id not in left_out]
        own, which = tuple(ordinary[: len(DEFAULT_LABELS)]), "its first ordinary tokens"
    return own, _replaced(f"label_token_ids {list(DEFAULT_LABELS)}", list(own), which, facts)


def default_delimiter(facts: TokenFacts, taken: Collection[int] = ()) -> tuple[int, str | None]:
    """The usual one, or the tokenizer's own with what is to be said about it."""
    if facts.vocab_size > DEFAULT_DELIMITER:
        return DEFAULT_DELIMITER, None
    special = [token_id for token_id in facts.special_ids if token_id not in taken]
    if facts.eos_id is not None and facts.eos_id not in taken:
        own, which = facts.eos_id, "its end of text"
    elif special:
        own, which = special[0], "its first special token"
    else:
        own = next(token_id for token_id in range(facts.vocab_size - 1, -1, -1) if token_id not in taken)
        which = "its last id"
    return own, _replaced(f"delimiter_token_id {DEFAULT_DELIMITER}", own, which, facts)


def _replaced(default: str, own: object, which: str, facts: TokenFacts) -> str:
    return f"the default {default} is not in the vocabulary of {facts.model} ({facts.vocab_size}): {own}, {which}"
