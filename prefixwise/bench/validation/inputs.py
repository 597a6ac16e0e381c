"""What an endpoint is evaluated with: labels, a delimiter, and tokens that are the same whenever they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from prefixwise.bench.default_tokens import DEFAULT_DELIMITER, DEFAULT_LABELS, default_delimiter, default_labels
from prefixwise.bench.token_facts import TokenFacts, token_facts
from prefixwise.contract.errors import ModelLoadError, PrefixwiseError

NUM_ISOLATION_ITEMS = 8
MUTATED_INDEX = 3  # with items before it and after it
LONGER_BY = 7  # tokens, so that whatever comes after the item moves to an odd place


@dataclass(frozen=True)
class TokenChoice:
    """The ids that mean something, and how many ids there are."""

    labels: tuple[int, ...]
    delimiter: int
    vocab_size: int


def told_vocab_size(server_info: Mapping[str, Any], model_list: Mapping[str, Any]) -> int | None:
    """As the server tells it, in `/server_info` or in `/v1/models`; None where it does not."""
    model, entries = server_info.get("model"), model_list.get("data")
    first = entries[0] if isinstance(entries, list) and entries else None
    for place in (model, server_info, first):
        size = place.get("vocab_size") if isinstance(place, Mapping) else None
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def settle_tokens(
    labels: Sequence[int] | None, delimiter: int | None, vocab_size: int | None, model: str
) -> tuple[TokenChoice, list[str]]:
    """Also what is to be said about it. None: the default, or the model's own where its vocabulary lacks that.

    Without a vocabulary size ids stay below the largest that is named, which must be in there anyway.
    Raises PrefixwiseError for ids that were given and cannot be.
    """
    named = [*(labels or DEFAULT_LABELS), DEFAULT_DELIMITER if delimiter is None else delimiter]
    if vocab_size is None:
        size = max(named) + 1
        told = [f"the server does not tell its vocabulary size: ids stay below {size} (--vocab-size says it)"]
        return TokenChoice(tuple(named[:-1]), named[-1], size), told
    _check_ids([*(labels or ()), *(() if delimiter is None else (delimiter,))], vocab_size)
    notes: list[str | None] = []
    if labels is not None and delimiter is not None:
        return TokenChoice(tuple(labels), delimiter, vocab_size), []
    facts = _facts(model, vocab_size)
    if delimiter is None:
        delimiter, note = default_delimiter(facts, labels or ())
        notes.append(note)
    if labels is None:
        labels, note = default_labels(facts, (delimiter,))
        notes.append(note)
    return TokenChoice(tuple(labels), delimiter, vocab_size), [note for note in notes if note]


def _facts(model: str, vocab_size: int) -> TokenFacts:
    """The server's vocabulary counts; its tokenizer is asked only where a default would not fit into that."""
    told = TokenFacts(model, "what the server tells", vocab_size, vocab_size, ())
    if vocab_size > DEFAULT_DELIMITER:
        return told
    try:
        own = token_facts(model)
    except ModelLoadError:  # it is the server's, and need not be here
        return told
    return own if own.vocab_size == vocab_size else told


def _check_ids(given: Sequence[int], vocab_size: int) -> None:
    if vocab_size < 8:
        raise PrefixwiseError(f"a vocabulary of at least 8 tokens is needed, got {vocab_size}")
    for each in given:
        if not 0 <= each < vocab_size:
            raise PrefixwiseError(
                f"labels and delimiter must be from 0 to {vocab_size - 1} for this server, got {each}"
            )


@dataclass(frozen=True)
class TokenSource:
    """Tokens by name: the same name gives the same tokens, other names others. The delimiter is never among them."""

    choice: TokenChoice
    seed: int

    def draw(self, name: str, count: int) -> list[int]:
        rng = Random(f"{self.seed}/{name}")
        return [self._token(rng.randrange(self._size)) for _ in range(count)]

    def other(self, name: str, tokens: Sequence[int]) -> list[int]:
        """As many, and at every place another one."""
        rng = Random(f"{self.seed}/{name}")
        return [self._token((self._place(each) + rng.randrange(1, self._size)) % self._size) for each in tokens]

    def isolation_items(self, item_tokens: int) -> list[list[int]]:
        """Of many lengths, so that nothing lines up by accident."""
        lengths = [max(1, item_tokens + index - MUTATED_INDEX) for index in range(NUM_ISOLATION_ITEMS)]
        return [self.draw(f"isolation/item/{index}", length) for index, length in enumerate(lengths)]

    def items(self, name: str, count: int, item_tokens: int) -> list[list[int]]:
        return [self.draw(f"{name}/item/{index}", item_tokens) for index in range(count)]

    @property
    def _size(self) -> int:
        return self.choice.vocab_size - 1

    def _token(self, place: int) -> int:
        return place + (place >= self.choice.delimiter)

    def _place(self, token: int) -> int:
        return token - (token > self.choice.delimiter)
