"""Calibration: a few forwards at warm-up that show what forwards cost on this machine (`plan/cost_model.py`).

    sizes       items without a prefix: the cost of a forward and of a token
    attention   items behind a long prefix, one KV block read many times: the cost of a query-key pair. Few items leave
                most of a GPU idle, so only the largest of these probes that there was time for counts

A slow CPU has time for the first ones alone. The static proportions decide what they leave open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic

import numpy as np

from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, KVBlock, Layout, Prefix
from prefixwise.forward.buckets import Buckets
from prefixwise.plan.cost_model import CostModel, Sample, Work, fit

CALIBRATION_SECONDS = 1.0  # no probe is begun that would end later
ROUNDS = 3  # the fastest run of each probe counts
SIZES = (64, 256), (1024, 4096, 16_384)  # tokens, before and after the attention probes
ITEM_TOKENS = 32
ATTENTION_SIZES, PREFIX_BLOCKS = (128, 4096), 16


def probe_costs(backend: Backend, known: CostModel, *, has_room: bool = True) -> list[Sample]:
    """Measure, on the device thread, while nothing else runs. `has_room`: for a KV block."""
    room = (backend.config.max_context_len - ITEM_TOKENS) // KV_BLOCK_SIZE
    num_blocks = min(PREFIX_BLOCKS, room, backend.info.max_kv_blocks_read or PREFIX_BLOCKS)
    if num_blocks < 1 or not has_room or not backend.config.is_causal:
        return _measure(backend, _probes(backend, []), known)
    block = _compute_block(backend)
    try:
        return _measure(backend, _probes(backend, [block] * num_blocks), known)
    finally:
        block.release()


def _measure(backend: Backend, probes: list[ForwardBatch], known: CostModel) -> list[Sample]:
    end, buckets = monotonic() + CALIBRATION_SECONDS, Buckets.of(backend.info)
    fastest = dict.fromkeys(range(len(probes)), math.inf)
    works = [Work(buckets.fit(batch.num_tokens), _num_pairs(batch)) for batch in probes]
    samples: list[Sample] = []
    for _ in range(ROUNDS):
        for number, batch in enumerate(probes):
            expected = fit(samples, known).seconds(works[number]) if samples else 0.0  # the first one runs in any case
            if monotonic() + min(expected, fastest[number]) <= end:
                fastest[number] = min(fastest[number], _seconds_of(backend, batch))
                samples = [Sample(works[each], seconds) for each, seconds in fastest.items() if seconds < math.inf]
    behind_prefix = [number for number, batch in enumerate(probes) if batch.prefixes and fastest[number] < math.inf]
    too_small = {works[number] for number in behind_prefix[:-1]}
    return [sample for sample in samples if sample.work not in too_small]


def _seconds_of(backend: Backend, batch: ForwardBatch) -> float:
    begin = monotonic()
    backend.forward(batch)
    return monotonic() - begin


def _probes(backend: Backend, prefix: Sequence[KVBlock]) -> list[ForwardBatch]:
    """In the order in which they run. `prefix`: what items of the attention probes read; empty: no such probes."""
    most = max(1, backend.info.step_tokens // ITEM_TOKENS)
    first, later, attention = (
        sorted({min(size // ITEM_TOKENS, most) for size in sizes}) for sizes in (*SIZES, ATTENTION_SIZES)
    )
    behind = [_items_batch(size, prefix) for size in attention] if prefix else []
    return [*map(_items_batch, first), *behind, *(_items_batch(size) for size in later if size not in first)]


def _items_batch(num_items: int, prefix: Sequence[KVBlock] = ()) -> ForwardBatch:
    """Items of ITEM_TOKENS tokens behind a prefix, and one label."""
    prefix_len, starts = len(prefix) * KV_BLOCK_SIZE, np.arange(num_items + 1) * ITEM_TOKENS
    return ForwardBatch(
        Layout.EXTEND,
        token_ids=np.zeros(num_items * ITEM_TOKENS, np.int32),
        positions=np.tile(np.arange(prefix_len, prefix_len + ITEM_TOKENS, dtype=np.int32), num_items),
        segment_starts=starts,
        prefix_index=np.full(num_items, 0 if prefix else -1),
        prefix_lens=np.full(num_items, prefix_len),
        prefixes=(Prefix(tuple(prefix)),) if prefix else (),
        sequence_starts=np.array([0, num_items * ITEM_TOKENS]),
        score_tokens=starts[1:] - 1,
        label_ids=np.zeros((num_items, 1), np.int32),
    )


def _num_pairs(batch: ForwardBatch) -> int:
    lens = np.diff(batch.segment_starts)
    return int(np.dot(lens, batch.prefix_lens)) + int(np.dot(lens, lens)) // 2


def _compute_block(backend: Backend) -> KVBlock:
    """One full KV block of any tokens."""
    batch = ForwardBatch(
        Layout.EXTEND,
        token_ids=np.zeros(KV_BLOCK_SIZE, np.int32),
        positions=np.arange(KV_BLOCK_SIZE, dtype=np.int32),
        segment_starts=np.array([0, KV_BLOCK_SIZE]),
        prefix_index=np.full(1, -1),
        prefix_lens=np.zeros(1, np.int64),
        prefixes=(),
        sequence_starts=np.array([0, KV_BLOCK_SIZE]),
        score_tokens=np.zeros(0, np.int64),
        label_ids=np.zeros((0, 1), np.int32),
        cache_segments=(0,),
    )
    running = backend.start(batch)
    running.wait()
    return running.blocks[0]
