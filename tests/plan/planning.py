"""Segments and planners for tests of the plan, from lengths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.ragged import Ragged
from prefixwise.forward.backend import BackendInfo
from prefixwise.plan.algorithms import Planner, PlanOptions
from prefixwise.plan.cost_model import MeasuredCosts
from prefixwise.plan.segments import Segments, SplitItems, lay_out_segments, plan_labels


def segments_of(prefix_len: int, segment_lens: Sequence[int], prefix_lens: Sequence[int] | None = None) -> Segments:
    """One segment per tail; `prefix_lens` where not every item reads the whole prefix."""
    shared = np.full(len(segment_lens), prefix_len) if prefix_lens is None else np.array(prefix_lens)
    items = Ragged.from_sequences([[1] * length for length in segment_lens])
    split = SplitItems(np.ones(prefix_len, np.int32), shared.astype(np.int64), items)
    return lay_out_segments(split, plan_labels(((1,),)))


def planner_of(
    *,
    bit_equal: bool = True,
    multiple: int = 1,
    kind: Literal["cpu", "gpu"] = "cpu",
    buckets: tuple[int, ...] = (),
    num_copies: int = 1,
    num_kv_blocks: int | None = None,
    caches_prefixes: bool = False,
    joins_prefill: bool = False,
    max_whole_item: int = 1 << 20,
    reads_short_blocks: bool = False,
    step_seconds: float | None = None,
    measured: MeasuredCosts | None = None,
    **options: Any,
) -> Planner:
    backend = BackendInfo(
        "fake",
        kind,
        kind,
        "float32",
        bit_equal,
        token_multiple=multiple,
        token_buckets=buckets,
        num_copies=num_copies,
        joins_prefill=joins_prefill,
        step_seconds=step_seconds,
        max_whole_item=max_whole_item,
        reads_short_blocks=reads_short_blocks,
    )
    if num_kv_blocks is not None:
        backend = replace(backend, num_kv_blocks=num_kv_blocks)
    resolved = PlanOptions(**options).resolve(backend)
    return Planner(FakeBackend().config, backend, resolved, caches_prefixes, measured)
