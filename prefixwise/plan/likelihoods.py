"""Log-likelihoods: what the model computes so that each of some tokens gets its log-probability.

A token is read after the token before it. So a context and its continuation become a prefix and a segment, and every
token of the segment is followed by a row of logits:

    context       c c c c c       prefix    c c c c
    continuation  x y z           segment   c x y          rows after c, x and y, which read x, y and z

Continuations of one context share its prefix. A segment has at most a KV block of tokens. Whole prompts and longer
continuations are cut where KV blocks begin, and each segment reads the blocks before it:

    q . . .|. . . .|. . . .|. .   with blocks of 4 tokens: the first three blocks are the prefix of the last segment
    q . . .|. . . .|. . . .|.|.   the rest in blocks of 1 token, where the backend reads short blocks (`rest_size`)

The forward that computes a KV block reads its rows, too. A block in the KV cache is computed once more for them.

The cuts follow from the sequence alone, so its bits do not depend on other sequences. Sequences that begin with the
same blocks share them, whole segments included: together, the segments of a call are a prefix tree. What prompts share
seldom ends with a whole block, so short blocks behind the last whole one share more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import numpy as np

from prefixwise.contract.ragged import Int32Array, Int64Array, Ragged, numbers, starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.long_items import prefix_block_starts
from prefixwise.plan.segments import Segments

SHORT_BLOCK_SIZE = 32  # tokens; shorter ones share little more, and attention has more parts
_NO_TOKEN = 0  # is read where only the most likely tokens are asked for


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """Tokens, and those of them whose log-probabilities are asked for."""

    token_ids: Int32Array
    first: int  # the tokens from here on are read; at least 1, as no token comes before the first one
    reads_next: bool = False  # also what comes after the last token

    @property
    def num_rows(self) -> int:
        return max(0, len(self.token_ids) - self.first) + self.reads_next

    @property
    def num_computed(self) -> int:
        """The tokens that the model sees."""
        return len(self.token_ids) - 1 + self.reads_next if self.num_rows else 0


@dataclass(frozen=True, eq=False)
class LikelihoodPlan:
    """Groups of segments, each behind one prefix, and where every sequence finds its rows."""

    groups: tuple[Segments, ...]
    rows: tuple[Int64Array, ...]  # per sequence, in the rows of all groups, one after the other

    @property
    def num_rows(self) -> int:
        return sum(len(group.score_offsets) for group in self.groups)


def plan_likelihoods(
    sequences: Sequence[TokenSequence], *, rest_size: int = KV_BLOCK_SIZE, num_kv_blocks: int = 1 << 20
) -> LikelihoodPlan:
    """Groups in the order of their prefixes, so that neighbours share KV blocks.

    Args:
        sequences: What is asked for.
        rest_size: Tokens of the KV blocks behind the last whole one.
        num_kv_blocks: That fit in the KV cache. A sequence that would have more has whole blocks only.
    """
    tree = _Tree(rest_size, num_kv_blocks)
    pieces = [tree.add(sequence) for sequence in sequences]
    groups = tree.finish()
    return LikelihoodPlan(
        tuple(group.segments() for group in groups),
        tuple(_rows_of(each) for each in pieces),
    )


@dataclass(eq=False)
class _Piece:
    """A segment: some tokens of a sequence behind the first `begin` ones. A row of logits follows each of its tokens,
    and one more each where sequences with these tokens go on with different ones."""

    begin: int
    tokens: Int32Array
    next_tokens: list[int] = field(default_factory=list)  # distinct, after its last token
    first_row: int = 0  # of all rows

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.tokens) - 1 + len(self.next_tokens)

    @property
    def row_places(self) -> Int64Array:
        """The token that each row follows."""
        return np.minimum(numbers(self.num_rows), len(self.tokens) - 1)

    @property
    def targets(self) -> Int32Array:
        return np.concatenate([self.tokens[1:], np.array(self.next_tokens, np.int32)])

    def rows_for(self, next_token: int) -> Int64Array:
        """The rows of a sequence that goes on with this token."""
        rows = self.first_row + np.arange(len(self.tokens))
        rows[-1] += self.next_tokens.index(next_token)
        return rows


@dataclass(eq=False)
class _Group:
    """Pieces that read one prefix or its beginning."""

    prefix_ids: Int32Array
    block_starts: list[int]
    pieces: dict[_Piece, None] = field(default_factory=dict)  # in order; at first also those that other groups have

    def segments(self) -> Segments:
        tokens = Ragged.from_sequences([piece.tokens for piece in self.pieces])
        num_rows = np.array([piece.num_rows for piece in self.pieces], np.int64)
        places = np.concatenate([piece.row_places for piece in self.pieces])
        return Segments(
            prefix_ids=self.prefix_ids,
            prefix_lens=np.array([piece.begin for piece in self.pieces], np.int64),
            tokens=tokens,
            score_offsets=places + tokens.starts[:-1].repeat(num_rows),
            rows_of_segment=starts_from_lens(num_rows),
            label_ids=np.concatenate([piece.targets for piece in self.pieces])[:, None],
            block_starts=tuple(self.block_starts),
            segment_of_block=self._segment_of_block(),
        )

    def _segment_of_block(self) -> Int64Array | None:
        numbers_of = {(piece.begin, piece.end): number for number, piece in enumerate(self.pieces)}
        found = np.array([numbers_of.get(block, -1) for block in pairwise(self.block_starts)], np.int64)
        return found if (found >= 0).any() else None


class _Tree:
    """The pieces of all sequences, each once."""

    def __init__(self, rest_size: int, num_kv_blocks: int) -> None:
        self._rest_size = rest_size
        self._num_kv_blocks = num_kv_blocks
        self._groups: dict[tuple[bytes, int], _Group] = {}
        self._pieces: dict[tuple[int, bool, int, bytes], _Piece] = {}

    def add(self, sequence: TokenSequence) -> list[tuple[_Piece, int]]:
        """The pieces of a sequence, and the token after each."""
        if not sequence.num_rows:
            return []
        token_ids, start, stop = sequence.token_ids, sequence.first - 1, sequence.num_computed
        for rest_size in (self._rest_size, KV_BLOCK_SIZE):
            edges = _cut(start, stop, rest_size)
            starts = prefix_block_starts(edges[-2], rest_size)
            if len(starts) <= self._num_kv_blocks:
                break
        prefix_ids = token_ids[: edges[-2]]
        group = self._groups.setdefault((prefix_ids.tobytes(), rest_size), _Group(prefix_ids, starts))
        found = []
        for begin, end in pairwise(edges):
            # The KV block in which a piece begins is longer where the prefix goes on behind it.
            digest = blake2b(token_ids[:end].tobytes(), digest_size=16).digest()
            key = begin, begin < len(prefix_ids), rest_size, digest
            piece = self._pieces.setdefault(key, _Piece(begin, token_ids[begin:end]))
            group.pieces[piece] = None
            next_token = int(token_ids[end]) if end < len(token_ids) else _NO_TOKEN
            if next_token not in piece.next_tokens:
                piece.next_tokens.append(next_token)
            found.append((piece, next_token))
        return found

    def finish(self) -> list[_Group]:
        """The groups that compute something, by their prefixes; every piece gets its rows.

        Of groups with the same piece, which may be a KV block, the first one has it: that group computes the block.
        """
        groups, known, row = [], set[_Piece](), 0
        for _, group in sorted(self._groups.items(), key=lambda each: each[0]):
            group.pieces = {piece: None for piece in group.pieces if piece not in known}
            known.update(group.pieces)
            if group.pieces:
                groups.append(group)
            for piece in group.pieces:
                piece.first_row = row
                row += piece.num_rows
        return groups


def _cut(start: int, stop: int, rest_size: int) -> list[int]:
    """Where segments begin; at last, where the last one ends."""
    if start and stop - start <= KV_BLOCK_SIZE:
        return [start, stop]
    whole = (stop - 1) // KV_BLOCK_SIZE * KV_BLOCK_SIZE
    first = (start // KV_BLOCK_SIZE + 1) * KV_BLOCK_SIZE
    return [start, *range(first, whole, KV_BLOCK_SIZE), *range(max(whole, rest_size), stop, rest_size), stop]


def _rows_of(pieces: Sequence[tuple[_Piece, int]]) -> Int64Array:
    return np.concatenate([np.zeros(0, np.int64), *(piece.rows_for(token) for piece, token in pieces)])
