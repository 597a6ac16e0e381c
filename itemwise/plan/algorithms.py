"""Choosing the algorithm and laying out the forwards: from segments to a `ScorePlan`.

`auto` decides by model, device, configuration and the query's length. It looks at the number of items only
where all algorithms give the same bits (on a CPU), so that isolation holds for `auto` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from itemwise.backends.base import BackendInfo, MaskImpl
from itemwise.contract.errors import InvalidValueError
from itemwise.models.config import ModelConfig
from itemwise.plan.batches import PlannedBatch, Row, fill_rows, group_rows, one_row_each
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
    is_fallback: bool  # is it another algorithm than the one chosen, because that cannot run?
    mask: MaskImpl | None  # packed rows with a prefix only
    mask_note: str | None  # why the mask is not the one that the options might suggest
    segments: Segments
    batches: tuple[PlannedBatch, ...]

    @property
    def needs_prefill(self) -> bool:
        """Does a prefix have to be computed before the batches run?"""
        return self.algorithm == "prefill_extend" and len(self.segments.prefix_ids) > 0


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

    @cached_property
    def buckets(self) -> Buckets:
        if self.backend.token_buckets:
            return Buckets(self.backend.token_buckets)
        return Buckets.multiples(self.backend.token_multiple, self.token_budget)

    def plan(self, segments: Segments, algorithm: str = "auto") -> ScorePlan:
        """Raises InvalidValueError (`dense_mask_too_large`) for a dense mask that cannot be had."""
        tail_lens: list[int] = segments.tails.lens.tolist()
        prefix_len = len(segments.prefix_ids)  # whatever the items read of it: a choice is not theirs to move
        chunk = (self.options.chunk_size or 0) * segments.segments_per_item
        algorithm, reason = self._choose(algorithm, prefix_len, tail_lens, chunk)
        is_fallback = algorithm == "prefill_extend" and self._is_too_long(prefix_len)
        if is_fallback:
            longest = self.backend.max_prefix_len
            reason = f"the backend keeps prefixes of up to {longest} tokens, and this one has {prefix_len}"
            algorithm = "packed"
        rows = self._rows(algorithm, prefix_len, tail_lens, chunk)
        is_masked = algorithm == "packed" and prefix_len > 0  # only there do items share a row
        mask, note = self._choose_mask(is_masked, max(row.num_tokens for row in rows), is_fallback)
        batches = self._batches(algorithm, rows, chunk, is_dense=mask == "dense")
        return ScorePlan(algorithm, reason, is_fallback, mask, note, segments, batches)

    def _is_too_long(self, prefix_len: int) -> bool:
        """Too long to be kept between forwards?"""
        longest = self.backend.max_prefix_len
        return longest is not None and prefix_len > longest

    def _choose(self, asked: str, prefix_len: int, tail_lens: list[int], chunk: int) -> tuple[str, str]:
        """The algorithm, and the reason for it. `chunk`: most segments in a row or forward, 0 for no bound."""
        if asked != "auto":
            return asked, "asked for by the request"
        if self.options.algorithm != "auto":
            return self.options.algorithm, "set for this engine"
        if not prefix_len:
            return "prefill_extend", "the items share no prefix, so there is nothing to compute twice"
        may_look = self.backend.algorithms_bit_equal
        seen = tail_lens if may_look else _NOMINAL_TAIL_LENS
        estimates = self._estimates(prefix_len, seen, chunk)
        best = min(estimates, key=lambda name: estimates[name])
        figures = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in estimates.items())
        basis = f"{len(seen)} segments" if may_look else "a nominal request of this query length"
        return best, f"static estimate for {prefix_len} prefix tokens and {basis}: {figures}"

    def _estimates(self, prefix_len: int, tail_lens: list[int], chunk: int) -> dict[str, float]:
        """Seconds by algorithm; of equals the first is taken."""
        budget, multiple = self.token_budget, self.backend.token_multiple
        num_rows = len(self._rows("packed", prefix_len, tail_lens, chunk))
        work: dict[str, Work] = {
            "prefill_extend": extend_work(prefix_len, tail_lens, budget, multiple),
            "packed": packed_work(prefix_len, tail_lens, num_rows, budget, multiple),
            "serial": packed_work(prefix_len, tail_lens, len(tail_lens), budget, multiple),
        }
        figures = STATIC_FIGURES[self.backend.device_kind]
        return {name: estimate_seconds(self.model, each, figures) for name, each in work.items()}

    def _rows(self, algorithm: str, prefix_len: int, tail_lens: list[int], chunk: int) -> list[Row]:
        """The prefix and one segment (serial) or a chunk of them (packed); a chunk alone (prefill_extend)."""
        if algorithm == "serial":
            return fill_rows(tail_lens, prefix_len, chunk_size=1, max_row_len=self.token_budget)
        if algorithm == "packed":
            max_row_len = self._packed_row_len(prefix_len)
            if not chunk and self.backend.num_copies > 1:  # copies of the model share out whole rows
                chunk = -(-len(tail_lens) // self.backend.num_copies)
            return fill_rows(tail_lens, prefix_len, chunk_size=chunk, max_row_len=max_row_len)
        return fill_rows(tail_lens, 0, chunk_size=chunk, max_row_len=self.token_budget)

    def _packed_row_len(self, prefix_len: int) -> int:
        """The whole budget; but a dense row costs its square, so a short one unless a chunk size is given."""
        if self.options.mask == "dense" and self.options.chunk_size is None:
            return min(self.token_budget, DENSE_MAX_ROW_LEN, max(2 * prefix_len, _DENSE_ROW_LEN))
        return self.token_budget

    def _batches(self, algorithm: str, rows: list[Row], chunk: int, *, is_dense: bool) -> tuple[PlannedBatch, ...]:
        if algorithm == "prefill_extend":
            return one_row_each(rows, self.buckets)
        max_segments = chunk if algorithm == "serial" else 0
        # The masks of a forward are together no larger than that of the longest row.
        budget = min(self.token_budget, DENSE_MAX_ROW_LEN) if is_dense else self.token_budget
        return group_rows(rows, token_budget=budget, max_segments=max_segments, buckets=self.buckets)

    def _choose_mask(
        self, is_masked: bool, row_len: int, is_fallback: bool = False
    ) -> tuple[MaskImpl | None, str | None]:
        """The mask of packed rows of which the longest has `row_len` tokens, and a note where one is due."""
        if is_fallback:  # nobody asked for packed rows
            return "segment", None
        asked, threshold = self.options.mask, self.options.segment_fallback_threshold
        if not is_masked:
            return None, None if asked == "auto" else f"the mask option {asked} has no effect here"
        if asked == "segment" or (asked == "auto" and row_len <= threshold):
            return "segment", None
        if asked == "dense":
            if row_len > DENSE_MAX_ROW_LEN:
                raise _dense_too_large(row_len)
            return "dense", None
        above = f"a row of {row_len} tokens is above the segment threshold of {threshold}"
        if row_len <= DENSE_MAX_ROW_LEN:
            return "dense", above
        return "segment", f"{above}, but too long for a dense mask ({DENSE_MAX_ROW_LEN} tokens)"


def max_dense_row_len(options: PlanOptions) -> int:
    """The longest packed row that may get a dense mask; 0 where none can."""
    if options.mask == "segment" or (
        options.mask == "auto" and options.segment_fallback_threshold >= DENSE_MAX_ROW_LEN
    ):
        return 0
    return DENSE_MAX_ROW_LEN


def _dense_too_large(row_len: int) -> InvalidValueError:
    return InvalidValueError(
        f"a dense mask must cover at most {DENSE_MAX_ROW_LEN} packed tokens "
        f"({DENSE_MAX_ROW_LEN**2 >> 20} MiB), got a row of {row_len}; "
        "use a smaller chunk size, the segment mask or prefill_extend",
        code="dense_mask_too_large",
        param="algorithm",
    )
