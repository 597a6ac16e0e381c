"""Choosing the algorithm and laying out the forwards: from segments to a `ScorePlan`.

`auto` decides by model, device, configuration and the query's length. It looks at the number of items only
where all algorithms give the same bits (on a CPU), so that isolation holds for `auto` too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE, MaskImpl
from prefixwise.models.config import ModelConfig
from prefixwise.plan.batches import Row, fill_rows
from prefixwise.plan.cost_model import STATIC_FIGURES, TailSums, Work, estimate_seconds, extend_work, packed_work
from prefixwise.plan.label_rows import Segments
from prefixwise.plan.options import DENSE_MAX_ROW_LEN, PlanOptions

# What `auto` assumes of a request where it may not look at the items.
_NOMINAL_TAIL_LENS = np.full(64, 32, np.int64)
_PREFIXES_PER_ROW = 4  # a packed row is at least so many times as long as its prefix, which is computed for each
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
    rows: tuple[Row, ...] = ()  # of prefix and tails; none where tails run on their own
    max_segments: int = 0  # most segments of this request in one forward; 0: no bound
    token_budget: int = 1 << 30  # most of its tokens in one forward, unless one row or tail alone has more

    @property
    def needs_prefill(self) -> bool:
        """Do the tails read a prefix that is kept from a forward before?"""
        return not self.rows and len(self.segments.prefix_ids) > 0

    @property
    def num_tokens(self) -> int:
        """All that is to be computed, if nothing of it has been kept."""
        if self.rows:
            return sum(row.num_tokens for row in self.rows)
        return len(self.segments.prefix_ids) + len(self.segments.tails.flat)


@dataclass(frozen=True)
class Planner:
    """Everything that does not change from request to request."""

    model: ModelConfig
    backend: BackendInfo
    options: PlanOptions  # resolved
    keeps_prefixes: bool = False  # from one request to the next?

    @property
    def token_budget(self) -> int:
        assert self.options.token_budget is not None, "resolved options"
        return self.options.token_budget

    def plan(self, segments: Segments, algorithm: str = "auto") -> ScorePlan:
        """Raises InvalidValueError (`dense_mask_too_large`) for a dense mask that cannot be had."""
        prefix_len = len(segments.prefix_ids)  # whatever the items read of it: a choice is not theirs to move
        chunk = (self.options.chunk_size or 0) * segments.segments_per_item
        algorithm, reason = self._choose(algorithm, segments, chunk)
        is_fallback = algorithm == "prefill_extend" and prefix_len > self.backend.max_prefix_len
        if is_fallback:
            longest = self.backend.max_prefix_len
            reason = f"the backend keeps prefixes of up to {longest} tokens, and this one has {prefix_len}"
            algorithm = "packed"
        if algorithm == "prefill_extend" or not prefix_len:  # where nothing is shared, rows are tails alone
            _, note = self._choose_mask(False, 0)
            return ScorePlan(
                algorithm,
                reason,
                is_fallback,
                None,
                note,
                segments,
                max_segments=chunk,
                token_budget=self.token_budget,
            )
        rows = self._rows(algorithm, prefix_len, segments.tails.lens.tolist(), chunk)
        mask, note = self._choose_mask(algorithm == "packed", max(row.num_tokens for row in rows), is_fallback)
        max_segments = chunk if algorithm == "serial" else 0  # a chunk of packed items is a row
        # The masks of a forward are together no larger than that of the longest row.
        budget = min(self.token_budget, DENSE_MAX_ROW_LEN) if mask == "dense" else self.token_budget
        return ScorePlan(algorithm, reason, is_fallback, mask, note, segments, tuple(rows), max_segments, budget)

    def _choose(self, asked: str, segments: Segments, chunk: int) -> tuple[str, str]:
        """The algorithm, and the reason for it. `chunk`: most segments in a row or forward, 0 for no bound."""
        if asked != "auto":
            return asked, "asked for by the request"
        if self.options.algorithm != "auto":
            return self.options.algorithm, "set for this engine"
        prefix_len = len(segments.prefix_ids)
        if not prefix_len:
            return "prefill_extend", "the items share no prefix, so there is nothing to compute twice"
        if self.keeps_prefixes and KV_BLOCK_SIZE <= prefix_len <= self.backend.max_prefix_len:
            return "prefill_extend", "the prefix is kept for later requests"
        may_look = self.backend.algorithms_bit_equal
        seen = segments.tails.lens if may_look else _NOMINAL_TAIL_LENS
        estimates = self._estimates(prefix_len, seen, chunk)
        best = min(estimates, key=lambda name: estimates[name])
        figures = ", ".join(f"{name} {1000 * seconds:.3g} ms" for name, seconds in estimates.items())
        basis = f"{len(seen)} segments" if may_look else "a nominal request of this query length"
        return best, f"static estimate for {prefix_len} prefix tokens and {basis}: {figures}"

    def _estimates(self, prefix_len: int, tail_lens: Int64Array, chunk: int) -> dict[str, float]:
        """Seconds by algorithm; of equals the first is taken."""
        budget, multiple = self.token_budget, self.backend.token_multiple
        tails = TailSums.of(tail_lens)
        work: dict[str, Work] = {
            "prefill_extend": extend_work(prefix_len, tails, budget, multiple, joins=self.backend.joins_prefill),
            "packed": packed_work(prefix_len, tails, self._num_packed_rows(prefix_len, tails, chunk), budget, multiple),
            "serial": packed_work(prefix_len, tails, tails.num_tails, budget, multiple),
        }
        figures = STATIC_FIGURES[self.backend.device_kind]
        return {name: estimate_seconds(self.model, each, figures) for name, each in work.items()}

    def _num_packed_rows(self, prefix_len: int, tails: TailSums, chunk: int) -> int:
        """About as many as `_rows` would make: they are not laid out only to be counted."""
        room = max(1, self._packed_row_len(prefix_len) - prefix_len)
        by_chunk = -(-tails.num_tails // chunk) if chunk else self.backend.num_copies
        return min(tails.num_tails, max(by_chunk, -(-tails.num_tokens // room)))

    def _rows(self, algorithm: str, prefix_len: int, tail_lens: list[int], chunk: int) -> list[Row]:
        """The prefix and one segment (serial) or a chunk of them (packed)."""
        if algorithm == "serial":
            return fill_rows(tail_lens, prefix_len, chunk_size=1, max_row_len=self.token_budget)
        if not chunk and self.backend.num_copies > 1:  # copies of the model share out whole rows
            chunk = -(-len(tail_lens) // self.backend.num_copies)
        return fill_rows(tail_lens, prefix_len, chunk_size=chunk, max_row_len=self._packed_row_len(prefix_len))

    def _packed_row_len(self, prefix_len: int) -> int:
        """About a step of the scheduler, so that others wait no longer than that, unless the prefix is long.

        A dense row costs its square, so it is short unless a chunk size is given.
        """
        if self.options.mask == "dense" and self.options.chunk_size is None:
            return min(self.token_budget, DENSE_MAX_ROW_LEN, max(2 * prefix_len, _DENSE_ROW_LEN))
        return min(self.token_budget, max(self.backend.step_tokens, _PREFIXES_PER_ROW * prefix_len))

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
