"""Choosing the algorithm and laying out the forwards: from segments to a `ScorePlan`.

`auto` decides by model, device, configuration and the query's length. It looks at the number of items only where all
algorithms give the same bits (on a CPU), so that isolation holds for `auto` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from itemwise.backends.base import BackendInfo, MaskImpl
from itemwise.contract.errors import InvalidValueError
from itemwise.models.config import ModelConfig
from itemwise.plan.batches import PlannedBatch, fill_rows, group_rows
from itemwise.plan.buckets import Buckets
from itemwise.plan.cost_model import STATIC_FIGURES, Work, estimate_seconds, extend_work, packed_work
from itemwise.plan.label_rows import Segments
from itemwise.plan.options import DENSE_MAX_ROW_LEN, PlanOptions

# What `auto` assumes of a request where it may not look at the items.
_NOMINAL_TAIL_LENS = [32] * 64
_DENSE_ROW_LEN = 2048  # a dense row costs its square: with no chunk size given, aim for rows of this length


@dataclass(frozen=True)
class ScorePlan:
    """What shall be computed for one request."""

    algorithm: str  # serial, packed or prefill_extend
    reason: str
    mask: MaskImpl | None  # packed only
    mask_note: str | None  # why the mask is not the one that the options might suggest
    segments: Segments
    batches: tuple[PlannedBatch, ...]

    @property
    def needs_prefill(self) -> bool:
        """Does a prefix have to be computed before the batches run?"""
        return self.algorithm == "prefill_extend" and bool(self.segments.prefix_lens.any())


@dataclass(frozen=True)
class Planner:
    """Everything that does not change from request to request."""

    model: ModelConfig
    backend: BackendInfo
    options: PlanOptions  # resolved

    @property
    def token_budget(self) -> int:
        assert self.options.token_budget is not None, "resolved options"
        return self.options.token_budget

    @property
    def buckets(self) -> Buckets:
        return Buckets.multiples(self.backend.token_multiple, self.token_budget)

    def plan(self, segments: Segments, algorithm: str = "auto") -> ScorePlan:
        """Raises InvalidValueError (`dense_mask_too_large`) where a dense mask was asked for and cannot be had."""
        tail_lens = segments.tails.lens.tolist()
        prefix_len = len(segments.prefix_ids) if segments.prefix_lens.any() else 0
        algorithm, reason = self._choose(algorithm, prefix_len, tail_lens)
        mask: MaskImpl | None = None
        note: str | None = None
        if algorithm == "serial":
            batches = self._fill(tail_lens, prefix_len, rows_of=1)
        elif algorithm == "packed":
            batches, mask, note = self._plan_packed(tail_lens, prefix_len)
        else:
            batches = self._fill(tail_lens, 0, rows_of=0)
        return ScorePlan(algorithm, reason, mask, note, segments, batches)

    def _choose(self, asked: str, prefix_len: int, tail_lens: list[int]) -> tuple[str, str]:
        if asked != "auto":
            return asked, "asked for by the request"
        if self.options.algorithm != "auto":
            return self.options.algorithm, "set for this engine"
        if not prefix_len:
            return "prefill_extend", "nothing is shared between the items, so there is no prefix to compute twice"
        seen = tail_lens if self.backend.algorithms_bit_equal else _NOMINAL_TAIL_LENS
        estimates = self._estimates(prefix_len, seen)
        best = min(estimates, key=lambda name: estimates[name])
        figures = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in estimates.items())
        basis = f"{len(seen)} segments" if seen is tail_lens else "a nominal request of this query length"
        return best, f"static estimate for {prefix_len} prefix tokens and {basis}: {figures}"

    def _estimates(self, prefix_len: int, tail_lens: list[int]) -> dict[str, float]:
        budget, multiple = self.token_budget, self.backend.token_multiple
        rows_of = partial(fill_rows, tail_lens, prefix_len, max_row_len=budget)
        num_rows = sum(1 for _ in rows_of(chunk_size=self.options.chunk_size or 0))
        work: dict[str, Work] = {
            "prefill_extend": extend_work(prefix_len, tail_lens, budget, multiple),
            "packed": packed_work(prefix_len, tail_lens, num_rows, budget, multiple),
            "serial": packed_work(prefix_len, tail_lens, len(tail_lens), budget, multiple),
        }
        figures = STATIC_FIGURES[self.backend.device_kind]
        return {name: estimate_seconds(self.model, each, figures) for name, each in work.items()}

    def _fill(self, tail_lens: list[int], prefix_len: int, *, rows_of: int) -> tuple[PlannedBatch, ...]:
        """Forwards of rows with `rows_of` segments each (0: as many as fit), at most `chunk_size` in a forward."""
        chunk = self.options.chunk_size or 0
        rows = fill_rows(tail_lens, prefix_len, chunk_size=rows_of or chunk, max_row_len=self.token_budget)
        if not rows_of:  # a row of tails is a forward already
            return tuple(group_rows([row], token_budget=0, buckets=self.buckets)[0] for row in rows)
        return group_rows(rows, token_budget=self.token_budget, max_segments=chunk, buckets=self.buckets)

    def _plan_packed(
        self, tail_lens: list[int], prefix_len: int
    ) -> tuple[tuple[PlannedBatch, ...], MaskImpl, str | None]:
        """Chunks as rows, rows side by side in one forward up to the token budget."""
        rows = list(fill_rows(tail_lens, prefix_len, chunk_size=self._chunk(), max_row_len=self._row_len(prefix_len)))
        longest = max(row.num_tokens for row in rows)
        mask, note = self._choose_mask(longest)
        return group_rows(rows, token_budget=self.token_budget, buckets=self.buckets), mask, note

    def _chunk(self) -> int:
        return self.options.chunk_size or 0

    def _row_len(self, prefix_len: int) -> int:
        """How long a packed row may get: the whole budget, except that dense rows cost their square."""
        if self.options.mask == "dense":
            if self.options.chunk_size is None:
                return min(self.token_budget, max(2 * prefix_len, _DENSE_ROW_LEN))
            return max(self.token_budget, DENSE_MAX_ROW_LEN + 1) if self.options.chunk_size == 0 else self.token_budget
        return self.token_budget

    def _choose_mask(self, row_len: int) -> tuple[MaskImpl, str | None]:
        fits_dense = row_len <= DENSE_MAX_ROW_LEN
        if self.options.mask == "segment":
            return "segment", None
        if self.options.mask == "dense":
            if not fits_dense:
                raise _dense_too_large(row_len)
            return "dense", None
        threshold = self.options.segment_fallback_threshold
        if row_len <= threshold:
            return "segment", None
        if fits_dense:
            return "dense", f"a row of {row_len} tokens is above the segment threshold of {threshold}"
        return "segment", f"a row of {row_len} tokens is above the threshold of {threshold}, and too long for dense"


def _dense_too_large(row_len: int) -> InvalidValueError:
    return InvalidValueError(
        f"a dense mask must cover at most {DENSE_MAX_ROW_LEN} packed tokens ({DENSE_MAX_ROW_LEN**2 >> 20} MiB), "
        f"got a row of {row_len}; use a smaller chunk size, the segment mask or prefill_extend",
        code="dense_mask_too_large",
        param="algorithm",
    )
