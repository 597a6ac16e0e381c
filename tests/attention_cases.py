"""The suite that every attention implementation of every backend faces: cases, inputs, and the answer in float64.

An implementation under test is a function from a batch and its inputs to the output [T, N, H]; `check` does the rest.
Padding tokens at the end of the batch are poisoned with NaN, which must not reach any real token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from prefixwise.contract.ragged import starts_from_lens
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, MaskImpl, Prefix

Floats = NDArray[np.float32]
PADDING = 5  # tokens


@dataclass(frozen=True)
class HostBlock(KVBlock):
    """A KV block of a cached prefix; the case holds its keys and values."""


@dataclass(frozen=True)
class AttentionCase:
    """Segments of a batch, by length, and the prefixes that they read."""

    name: str
    segment_lens: tuple[int, ...]
    prefix_index: tuple[int, ...] = ()  # per segment, -1 for none; empty: none reads any
    prefix_lens: tuple[int, ...] = ()
    cached_prefix_lens: tuple[int, ...] = ()  # lengths of cached prefixes
    # Segments of this batch with which prefixes begin or, after cached blocks, continue.
    batch_prefixes: tuple[int, ...] = ()
    sequence_starts: tuple[int, ...] = ()  # in segments; packed only
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    layout: Layout = Layout.EXTEND
    seed: int = field(default=0, compare=False)


# Layouts; all with the same heads, so that an implementation that compiles does so once.
LAYOUT_CASES: tuple[AttentionCase, ...] = (
    AttentionCase("one causal sequence", (300,), layout=Layout.CAUSAL),
    AttentionCase("causal sequences of ragged lengths", (1, 17, 32, 33, 257, 2), layout=Layout.CAUSAL),
    AttentionCase("one item", (20,), (0,), (50,), (50,)),
    AttentionCase("items of one token", (1, 1, 1), (0, 0, 0), (7, 7, 7), (7,)),
    AttentionCase("ragged items over one prefix", (20, 1, 33, 16, 65, 128, 32), (0,) * 7, (200,) * 7, (200,)),
    AttentionCase("long items", (257, 113), (0, 0), (40, 40), (40,)),
    AttentionCase("a prefix of one token", (5, 6), (0, 0), (1, 1), (1,)),
    AttentionCase("a prefix of whole key tiles", (20, 3), (0, 0), (512, 512), (512,)),
    AttentionCase("a long prefix of an odd length", (20, 129, 3), (0, 0, 0), (997, 997, 996), (997,)),
    AttentionCase("several prefixes", (20, 3, 140, 8, 1), (0, 1, 0, 2, 1), (600, 31, 600, 5, 31), (600, 31, 5)),
    AttentionCase(
        "interleaved prefixes", (20, 7, 33, 20, 1, 64), (0, 1, 0, 1, 0, 1), (200, 150, 200, 150, 200, 150), (200, 150)
    ),
    AttentionCase("one prefix read at several lengths", (20, 20, 20, 4), (0, 0, 0, 0), (90, 89, 40, 90), (90,)),
    AttentionCase("an empty prefix", (20, 5, 140)),
    AttentionCase("some read no prefix", (20, 9, 20, 6), (0, -1, 0, 0), (30, 0, 30, 0), (30,)),
    AttentionCase(
        "serial sequences",
        (150, 20, 40, 1, 130, 33),
        (-1, 0, -1, 1, -1, 2),
        (0, 150, 0, 40, 0, 129),
        batch_prefixes=(0, 2, 4),
        sequence_starts=(0, 2, 4, 6),
        layout=Layout.CAUSAL,
    ),
    AttentionCase(
        "packed sequences",
        (150, 20, 7, 33, 31, 5, 129),
        (-1, 0, 0, 0, -1, 1, 1),
        (0, 150, 150, 149, 0, 31, 31),
        batch_prefixes=(0, 4),
        sequence_starts=(0, 4, 7),
        layout=Layout.PACKED,
    ),
    AttentionCase(
        "one packed sequence of many items",
        (260, *(10,) * 11),
        (-1, *(0,) * 11),
        (0, *(260,) * 11),
        batch_prefixes=(0,),
        sequence_starts=(0, 12),
        layout=Layout.PACKED,
    ),
    AttentionCase(
        "packed sequences whose prefixes are KV blocks",
        (128, 44, 20, 7, 128, 5),
        (-1, 0, 0, 0, -1, 1),
        (0, 128, 172, 171, 0, 128),
        batch_prefixes=(0, 4),
        sequence_starts=(0, 4, 6),
        layout=Layout.PACKED,
    ),
    AttentionCase(
        "new KV blocks after cached ones",
        (128, 20, 128, 128, 30),
        (0, 0, -1, 1, 1),
        (256, 384, 0, 128, 256),
        cached_prefix_lens=(256, 0),
        batch_prefixes=(0, 2),
    ),
)

# Query heads per KV head: 1, 2 (as above), 3, 4, 6, 8, 16; one KV head and several; heads of four sizes.
HEAD_CASES: tuple[AttentionCase, ...] = tuple(
    AttentionCase(
        f"{heads} query heads on {kv} KV heads of {size}",
        (20, 130, 5),
        (0, 0, 0),
        (70, 70, 70),
        (70,),
        num_heads=heads,
        num_kv_heads=kv,
        head_size=size,
    )
    for heads, kv, size in (
        (4, 4, 64),
        (16, 8, 128),
        (9, 3, 96),
        (8, 2, 64),
        (12, 2, 128),
        (8, 1, 256),
        (16, 1, 64),
    )
)

CASES = (*LAYOUT_CASES, *HEAD_CASES)
CASE_NAMED = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Scoring:
    """What differs between models in how tokens score the keys that they see."""

    window: int = 0  # how many tokens a token sees, itself included; 0: all before it
    scale: float | None = None  # None: 1 / sqrt(H)
    softcap: float = 0.0  # 0: scores are not capped


PLAIN = Scoring()
# Narrower than a diagonal tile, about a KV block, a few blocks; as Gemma 2 has it.
SCORINGS: tuple[Scoring, ...] = (
    Scoring(window=1),
    Scoring(window=13),
    Scoring(window=128),
    Scoring(window=200),
    Scoring(window=300, scale=0.2, softcap=3.0),
    Scoring(scale=0.05, softcap=0.5),
)


@dataclass(frozen=True)
class AttentionInputs:
    """q [T, N, H], k and v [T, K, H], PADDING tokens included; cached prefixes as (keys, values), each [S, K, H]."""

    q: Floats
    k: Floats
    v: Floats
    cached: tuple[tuple[Floats, Floats], ...]


def make_batch(case: AttentionCase, mask: MaskImpl = "segment") -> ForwardBatch:
    starts = starts_from_lens(np.array(case.segment_lens, np.int64))
    num_segments, num_tokens = len(case.segment_lens), int(starts[-1])
    return ForwardBatch(
        layout=case.layout,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=_positions(case),
        segment_starts=starts,
        prefix_index=np.array(case.prefix_index or (-1,) * num_segments, np.int64),
        prefix_lens=np.array(case.prefix_lens or (0,) * num_segments, np.int64),
        prefixes=_prefixes(case),
        sequence_starts=starts[list(case.sequence_starts or (0, num_segments))],
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
        mask=mask,
    )


def _positions(case: AttentionCase) -> NDArray[np.int32]:
    """A segment's positions continue from the part of the prefix that it reads."""
    num_segments = len(case.segment_lens)
    indices, reads = case.prefix_index or (-1,) * num_segments, case.prefix_lens or (0,) * num_segments
    segments = zip(indices, reads, case.segment_lens, strict=True)
    firsts = [(read if index >= 0 else 0, length) for index, read, length in segments]
    pieces = [np.arange(first, first + length, dtype=np.int32) for first, length in firsts]
    return np.concatenate([np.zeros(0, np.int32), *pieces])


def _prefixes(case: AttentionCase) -> tuple[Prefix, ...]:
    num_prefixes = max(len(case.cached_prefix_lens), len(case.batch_prefixes))
    lens = case.cached_prefix_lens or (0,) * num_prefixes
    segments = case.batch_prefixes or (None,) * num_prefixes
    return tuple(Prefix(_blocks(length), segment) for length, segment in zip(lens, segments, strict=True))


def _blocks(length: int) -> tuple[KVBlock, ...]:
    return tuple(HostBlock(min(KV_BLOCK_SIZE, length - start)) for start in range(0, length, KV_BLOCK_SIZE))


def make_inputs(case: AttentionCase) -> AttentionInputs:
    """The same for every call, and the caller's own."""
    drawn = _draw_inputs(case)
    cached = tuple((keys.copy(), values.copy()) for keys, values in drawn.cached)
    return AttentionInputs(drawn.q.copy(), drawn.k.copy(), drawn.v.copy(), cached)


@lru_cache(maxsize=128)
def _draw_inputs(case: AttentionCase) -> AttentionInputs:
    random = np.random.default_rng(case.seed)
    num_tokens = sum(case.segment_lens)

    def draw(tokens: int, heads: int, scale: float = 1.0) -> Floats:
        return (scale * random.standard_normal((tokens, heads, case.head_size))).astype(np.float32)

    def padded(values: Floats) -> Floats:
        return np.concatenate([values, np.full((PADDING, *values.shape[1:]), np.nan, np.float32)])

    n, k = case.num_heads, case.num_kv_heads
    cached = tuple((draw(s, k, 1.5), draw(s, k)) for s in case.cached_prefix_lens)
    return AttentionInputs(
        padded(draw(num_tokens, n, 1.5)), padded(draw(num_tokens, k, 1.5)), padded(draw(num_tokens, k)), cached
    )


def round_inputs(inputs: AttentionInputs, dtype: DTypeLike) -> AttentionInputs:
    """To what the dtype can hold, still as float32."""

    def rounded(values: Floats) -> Floats:
        return values.astype(dtype).astype(np.float32)

    cached = tuple((rounded(keys), rounded(values)) for keys, values in inputs.cached)
    return AttentionInputs(rounded(inputs.q), rounded(inputs.k), rounded(inputs.v), cached)


def expected_output(batch: ForwardBatch, inputs: AttentionInputs, scoring: Scoring = PLAIN) -> NDArray[np.float64]:
    """[T, N, H] of the real tokens: one softmax over all that a token sees, a segment's tokens at a time."""
    outputs = [np.zeros((0, *inputs.q.shape[1:]))]
    for segment, (start, stop) in enumerate(pairwise(batch.segment_starts)):
        prefix_k, prefix_v = _prefix_of(batch, inputs, segment)
        keys = np.concatenate([prefix_k, inputs.k[start:stop]]).astype(np.float64)
        values = np.concatenate([prefix_v, inputs.v[start:stop]]).astype(np.float64)
        num_seen = len(prefix_k) + 1 + np.arange(stop - start)  # the prefix, the tokens before, itself
        seen = np.arange(len(keys)) < num_seen[:, None]
        if scoring.window:
            seen &= np.arange(len(keys)) >= num_seen[:, None] - scoring.window
        outputs.append(_attend(inputs.q[start:stop].astype(np.float64), keys, values, seen, scoring))
    return np.concatenate(outputs)


@lru_cache(maxsize=128)
def _expected_of(case: AttentionCase, dtype: np.dtype[Any], scoring: Scoring) -> NDArray[np.float64]:
    """Many implementations face a case, and no mask changes what is right."""
    return expected_output(make_batch(case), round_inputs(make_inputs(case), dtype), scoring)


def _prefix_of(batch: ForwardBatch, inputs: AttentionInputs, segment: int) -> tuple[Floats, Floats]:
    index, length = int(batch.prefix_index[segment]), int(batch.prefix_lens[segment])
    if index < 0:
        return inputs.k[:0], inputs.v[:0]
    cached_k, cached_v = inputs.cached[index] if inputs.cached else (inputs.k[:0], inputs.v[:0])
    continues_at = batch.prefixes[index].segment
    if continues_at is None:
        return cached_k[:length], cached_v[:length]
    start = int(batch.segment_starts[continues_at])
    new = slice(start, start + max(0, length - len(cached_k)))
    return np.concatenate([cached_k[:length], inputs.k[new]]), np.concatenate([cached_v[:length], inputs.v[new]])


def _attend(
    q: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], seen: NDArray[np.bool_], scoring: Scoring
) -> NDArray[np.float64]:
    """q [T, N, H] over those of keys and values [C, K, H] that each token has seen [T, C]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))  # [C, N, H]
    scale = 1 / np.sqrt(q.shape[2]) if scoring.scale is None else scoring.scale
    scores = np.einsum("tnh,cnh->ntc", q, keys, optimize=True) * scale
    if scoring.softcap:
        scores = scoring.softcap * np.tanh(scores / scoring.softcap)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    result: NDArray[np.float64] = np.einsum("ntc,cnh->tnh", weights, values, optimize=True)
    return result


Implementation = Callable[[ForwardBatch, AttentionInputs], Floats]


def check(
    implementation: Implementation,
    case: AttentionCase,
    tolerance: float,
    mask: MaskImpl = "segment",
    dtype: DTypeLike = np.float32,
    scoring: Scoring = PLAIN,
) -> None:
    """Every real token is right for inputs that are rounded to `dtype`, and no NaN of the padding reached it."""
    batch, inputs = make_batch(case, mask), round_inputs(make_inputs(case), dtype)
    output = implementation(batch, inputs)[: batch.num_tokens]
    assert np.isfinite(output).all(), "poisoned padding leaked into real tokens"
    assert np.abs(output - _expected_of(case, np.dtype(dtype), scoring)).max() <= tolerance


def check_alone(implementation: Implementation, case: AttentionCase) -> None:
    """Every segment has, bit for bit, the output that it has without the others. All read a cached prefix."""
    batch, inputs = make_batch(case), make_inputs(case)
    together = implementation(batch, inputs)
    for length, start, index, read in zip(
        case.segment_lens, batch.segment_starts[:-1].tolist(), case.prefix_index, case.prefix_lens, strict=True
    ):
        own, cached_lens = slice(start, start + length), (case.cached_prefix_lens[index],)
        lone = replace(
            case, segment_lens=(length,), prefix_index=(0,), prefix_lens=(read,), cached_prefix_lens=cached_lens
        )
        lone_inputs = AttentionInputs(inputs.q[own], inputs.k[own], inputs.v[own], (inputs.cached[index],))
        found = implementation(make_batch(lone), lone_inputs)[:length]
        assert np.array_equal(found, together[own]), (case.name, start)
