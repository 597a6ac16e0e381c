"""The one suite that every attention faces, whatever its backend: cases, inputs, and the answer in plain float64.

An implementation under test is a function from a batch and its inputs to the output [T, N, H]; `check` does the rest.
Padding tokens at the end of the batch are poisoned with NaN, which must not reach any real token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from itemwise.backends.base import ForwardBatch, Layout, MaskImpl, PrefixState
from itemwise.contract.ragged import starts_from_lens

Floats = NDArray[np.float32]
PADDING = 5  # tokens


@dataclass(frozen=True)
class HostPrefix(PrefixState):
    """A cached prefix whose keys and values the case holds itself."""

    @property
    def num_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class AttentionCase:
    """Segments of a batch, by length, and the prefixes that they read."""

    name: str
    segment_lens: tuple[int, ...]
    prefix_index: tuple[int, ...] = ()  # per segment, -1 for none; empty: none reads any
    prefix_lens: tuple[int, ...] = ()
    cached_prefix_lens: tuple[int, ...] = ()  # lengths of cached prefixes
    batch_prefixes: tuple[int, ...] = ()  # or: segments of this batch that serve as prefixes
    row_starts: tuple[int, ...] = ()  # in segments; packed only
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    layout: Layout = Layout.EXTEND
    seed: int = field(default=0, compare=False)


CASES: tuple[AttentionCase, ...] = (
    AttentionCase("one causal sequence", (300,), layout=Layout.CAUSAL),
    AttentionCase("causal sequences of ragged lengths", (1, 17, 128, 129, 257, 2), layout=Layout.CAUSAL),
    AttentionCase("one item", (20,), (0,), (50,), (50,)),
    AttentionCase("items of one token", (1, 1, 1), (0, 0, 0), (7, 7, 7), (7,)),
    AttentionCase("ragged items over one prefix", (20, 1, 33, 16, 64, 65, 128, 129, 300), (0,) * 9, (200,) * 9, (200,)),
    AttentionCase("a prefix of one token", (5, 6), (0, 0), (1, 1), (1,)),
    AttentionCase("several prefixes", (20, 3, 140, 8, 1), (0, 1, 0, 2, 1), (600, 31, 600, 5, 31), (600, 31, 5)),
    AttentionCase("one prefix read at several lengths", (20, 20, 20, 4), (0, 0, 0, 0), (90, 89, 40, 90), (90,)),
    AttentionCase("some read no prefix", (20, 9, 20), (0, -1, 0), (30, 0, 30), (30,)),
    AttentionCase(
        "packed rows",
        (150, 20, 7, 33, 150, 20, 130),
        (-1, 0, 0, 0, -1, 1, 1),
        (0, 150, 150, 149, 0, 150, 150),
        batch_prefixes=(0, 4),
        row_starts=(0, 4, 7),
        layout=Layout.PACKED,
    ),
    *(
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
            (9, 3, 64),
            (16, 1, 64),
            (8, 1, 256),
            (12, 2, 128),
            (4, 2, 96),
        )
    ),
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
    cached = tuple(HostPrefix(length) for length in case.cached_prefix_lens)
    return ForwardBatch(
        layout=case.layout,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.zeros(num_tokens, np.int32),
        segment_starts=starts,
        prefix_index=np.array(case.prefix_index or (-1,) * num_segments),
        prefix_lens=np.array(case.prefix_lens or (0,) * num_segments),
        prefixes=cached or case.batch_prefixes,
        row_starts=starts[list(case.row_starts or (0, num_segments))],
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 0), np.int32),
        mask=mask,
    )


def make_inputs(case: AttentionCase) -> AttentionInputs:
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


def expected_output(batch: ForwardBatch, inputs: AttentionInputs) -> NDArray[np.float64]:
    """[T, N, H] of the real tokens: one softmax over all that a token sees, token by token."""
    outputs = []
    for segment in range(len(batch.segment_starts) - 1):
        start, stop = (int(batch.segment_starts[segment + i]) for i in (0, 1))
        prefix_k, prefix_v = _prefix_of(batch, inputs, segment)
        for token in range(start, stop):
            keys = np.concatenate([prefix_k, inputs.k[start : token + 1]]).astype(np.float64)
            values = np.concatenate([prefix_v, inputs.v[start : token + 1]]).astype(np.float64)
            outputs.append(_attend(inputs.q[token].astype(np.float64), keys, values))
    return np.stack(outputs)


def _prefix_of(batch: ForwardBatch, inputs: AttentionInputs, segment: int) -> tuple[Floats, Floats]:
    index, length = int(batch.prefix_index[segment]), int(batch.prefix_lens[segment])
    if index < 0:
        return inputs.k[:0], inputs.v[:0]
    source = batch.prefixes[index]
    if isinstance(source, int):
        start = int(batch.segment_starts[source])
        return inputs.k[start : start + length], inputs.v[start : start + length]
    keys, values = inputs.cached[index]
    return keys[:length], values[:length]


def _attend(q: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float64]:
    """q [N, H] over keys and values [C, K, H]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (np.repeat(each, group, axis=1) for each in (keys, values))  # [C, N, H]
    scores = np.einsum("nh,cnh->nc", q, keys) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(1, keepdims=True))
    result: NDArray[np.float64] = np.einsum("nc,cnh->nh", weights / weights.sum(1, keepdims=True), values)
    return result


Implementation = Callable[[ForwardBatch, AttentionInputs], Floats]


def check(implementation: Implementation, case: AttentionCase, tolerance: float, mask: MaskImpl = "segment") -> None:
    """Every real token is right, and no NaN of the padding reached it."""
    batch, inputs = make_batch(case, mask), make_inputs(case)
    output = implementation(batch, inputs)[: batch.num_tokens]
    assert np.isfinite(output).all(), "poisoned padding leaked into real tokens"
    assert np.abs(output - expected_output(batch, inputs)).max() <= tolerance
