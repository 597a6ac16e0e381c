"""Runs a plan on a backend: the prefill if there is one, then batch after batch; logits in item order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from itemwise.backends.base import Backend, ForwardBatch, ForwardOutput, PrefixState
from itemwise.engine.forward_batches import extend_batch, prefill_batch, rows_batch
from itemwise.plan.algorithms import ScorePlan
from itemwise.plan.batches import PlannedBatch

OnProgress = Callable[[int, int], None]  # items done, items in all


@dataclass(frozen=True)
class PlanOutput:
    """All logits of a request, in the order of its segments."""

    label_logits: NDArray[np.float32]  # [R, L]
    log_normalizers: NDArray[np.float32] | None  # [R]
    prefill_seconds: float
    extend_seconds: float


class Executor:
    """One backend, one plan at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def run(
        self, plan: ScorePlan, *, normalize: bool, timed: bool = False, on_progress: OnProgress | None = None
    ) -> PlanOutput:
        """Run every forward of the plan. `normalize`: also the log-sum-exp over the vocabulary.

        `timed`: wait for the prefill, so that its seconds are its own; else the next forward is prepared beside it.
        """
        begin = perf_counter()
        prefix = self._prefill(plan) if plan.needs_prefill else None
        if timed:
            self._backend.synchronize()
        prefilled = perf_counter()
        try:
            outputs = self._run_batches(plan, prefix, normalize, on_progress)
        finally:
            if prefix is not None:
                prefix.release()
        logits = np.concatenate([output.label_logits for output in outputs])
        normalizers = [output.log_normalizers for output in outputs if output.log_normalizers is not None]
        return PlanOutput(
            label_logits=logits,
            log_normalizers=np.concatenate(normalizers) if normalize else None,
            prefill_seconds=prefilled - begin,
            extend_seconds=perf_counter() - prefilled,
        )

    def _run_batches(
        self, plan: ScorePlan, prefix: PrefixState | None, normalize: bool, on_progress: OnProgress | None
    ) -> list[ForwardOutput]:
        outputs: list[ForwardOutput] = []
        for batch in plan.batches:
            outputs.append(self._backend.forward(_assemble(plan, batch, prefix, normalize)))
            if on_progress is not None:
                per_item = plan.segments.segments_per_item
                on_progress(batch.stop // per_item, len(plan.segments.tails) // per_item)
        return outputs

    def _prefill(self, plan: ScorePlan) -> PrefixState:
        return self._backend.forward(prefill_batch(plan.segments.prefix_ids)).prefixes[0]


def _assemble(plan: ScorePlan, batch: PlannedBatch, prefix: PrefixState | None, normalize: bool) -> ForwardBatch:
    if plan.algorithm == "prefill_extend":
        return extend_batch(plan, batch, prefix, normalize=normalize)
    return rows_batch(plan, batch, normalize=normalize)
