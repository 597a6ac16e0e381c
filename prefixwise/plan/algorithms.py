"""The algorithm and its packed sequences: from segments to a `ScorePlan`.

    serial           every segment is a sequence of prefix + item tokens
    packed           sequences of prefix + up to `chunk_size` segments
    prefill_extend   no sequences: item tokens run by themselves, as many as fit a step of the scheduler

`auto` decides by model, device, configuration and the query's length. It looks at the items, and at costs measured on
this machine, only if all algorithms give the same bits (on a CPU). So isolation holds for `auto` too, and replicas
agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from prefixwise.contract.errors import InvalidValueError
from prefixwise.contract.ragged import Int64Array
from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE, MaskImpl
from prefixwise.models.config import ModelConfig
from prefixwise.plan.cost_model import (
    CostModel,
    MeasuredCosts,
    SegmentSums,
    cached_extend_work,
    extend_work,
    packed_work,
    static_costs,
    tokens_of_step,
)
from prefixwise.plan.long_items import ItemCut
from prefixwise.plan.segments import Segments, without_shared_prefix

MaskOption = Literal["auto", "dense", "segment"]

DENSE_MAX_SEQUENCE_LEN = 16_384  # tokens; the dense mask has the square of that, 256 MiB
TIE = 1.03  # estimates whose ratio is below this are equal
_CACHED = "the prefix is cached for later requests"
_BIDIRECTIONAL = (
    "bidirectional attention: every token sees the whole pair, so no prefix can be shared, and each pair is a sequence "
    "of its own"
)
# What `auto` assumes of a request if it may not look at the items.
_NOMINAL_SEGMENT_LENS = np.full(64, 32, np.int64)
_PREFIXES_PER_SEQUENCE = 4  # a packed sequence is at least this many times as long as its prefix, which it computes
_DENSE_SEQUENCE_LEN = 2048  # tokens; the aim with a dense mask and no chunk size, as the cost grows with the square


# Options


@dataclass(frozen=True)
class PlanOptions:
    """How requests are split into forwards. `resolve()` settles the token budget for a device."""

    algorithm: str = "auto"  # for requests that say auto: auto, serial, packed or prefill_extend
    # Most items in one packed sequence, or in one forward of another algorithm. 0: no bound; None: from the geometry.
    chunk_size: int | None = None
    mask: MaskOption = "auto"
    segment_fallback_threshold: int = 32_768  # `auto` mask: segment up to this packed length
    token_budget: int | None = None  # most tokens in one forward, unless one context alone is longer

    def __post_init__(self) -> None:
        _check(self.algorithm in ("auto", "serial", "packed", "prefill_extend"), "algorithm", self.algorithm)
        _check(self.mask in ("auto", "dense", "segment"), "mask", self.mask)
        _check(self.chunk_size is None or _is_at_least(self.chunk_size, 0), "chunk_size", self.chunk_size)
        _check(self.token_budget is None or _is_at_least(self.token_budget, 1), "token_budget", self.token_budget)
        threshold = self.segment_fallback_threshold
        _check(_is_at_least(threshold, 0), "segment_fallback_threshold", threshold)

    def resolve(self, backend: BackendInfo) -> PlanOptions:
        if self.token_budget is not None:
            return self
        return replace(self, token_budget=backend.token_budget)


_EXPECTED = {
    "algorithm": "auto, serial, packed or prefill_extend",
    "mask": "auto, dense or segment",
    "chunk_size": "a whole number of 0 or more items",
    "token_budget": "a whole number of at least 1 token",
    "segment_fallback_threshold": "a whole number of 0 or more tokens",
}


def _is_at_least(value: object, least: int) -> bool:
    """Callers without a type checker send strings and floats, too."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(is_legal: bool, name: str, got: object) -> None:
    if not is_legal:
        message = f"{name} must be {_EXPECTED[name]}, got {got!r}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)


# Packed sequences


@dataclass(frozen=True)
class PackedSequence:
    """A prefix and the segments from `first` to `stop` after it; consecutive, so that they stay in order."""

    first: int
    stop: int
    num_tokens: int  # the prefix included


def fill_sequences(
    segment_lens: Sequence[int], prefix_len: int, *, chunk_size: int, max_len: int
) -> list[PackedSequence]:
    """Sequences of at most `chunk_size` segments (0: no bound) and, with the prefix, `max_len` tokens.

    A segment that is too long for that has a sequence of its own.
    """
    sequences: list[PackedSequence] = []
    first, num_tokens = 0, prefix_len
    for segment, length in enumerate(segment_lens):
        is_full = chunk_size and segment - first >= chunk_size
        if segment > first and (is_full or num_tokens + length > max_len):
            sequences.append(PackedSequence(first, segment, num_tokens))
            first, num_tokens = segment, prefix_len
        num_tokens += length
    if segment_lens:
        sequences.append(PackedSequence(first, len(segment_lens), num_tokens))
    return sequences


# Plans


@dataclass(frozen=True)
class ScorePlan:
    """The computation of one request."""

    algorithm: str  # serial, packed or prefill_extend
    reason: str
    is_fallback: bool  # the chosen algorithm cannot run, and another one replaces it
    mask: MaskImpl | None  # of packed sequences with a prefix
    mask_note: str | None  # why the mask differs from the options
    segments: Segments  # of all items
    sequences: tuple[PackedSequence, ...] = ()  # of `whole_segments`; empty if the item tokens run by themselves
    max_segments: int = 0  # most segments of this request in one forward; 0: no bound
    token_budget: int = 1 << 30  # most of its tokens in one forward, unless one sequence or segment alone has more
    cut: ItemCut | None = None  # of long items
    long_items: tuple[int, ...] = ()  # computed in pieces, each by itself (`branches.py`)
    splits_sequences: bool = False  # the prefix of a sequence becomes KV blocks of its own, its segments follow
    pairs_per_square: float = 0.5  # query-key pairs of a segment of n tokens: n^2 / 2 where attention is causal

    @property
    def needs_prefill(self) -> bool:
        """Whether the item tokens read a prefix that is computed before them, for all of them."""
        return self.algorithm == "prefill_extend" and len(self.segments.prefix_ids) > 0

    @property
    def num_unit_tokens(self) -> int:
        """The tokens of sequences; without them, of segments."""
        if self.sequences:
            return sum(sequence.num_tokens for sequence in self.sequences)
        return len(self.segments.tokens.flat)

    @property
    def num_unit_pairs(self) -> int:
        """Query-key pairs of these tokens."""
        lens, prefix_len = self.segments.tokens.lens, len(self.segments.prefix_ids)
        segment_pairs = int(np.dot(lens, self.segments.prefix_lens) + self.pairs_per_square * np.dot(lens, lens))
        return segment_pairs + len(self.sequences) * prefix_len**2 // 2

    @cached_property
    def whole_indices(self) -> Int64Array:
        """The segments of the items that are not long."""
        is_whole = np.ones(len(self.segments.tokens), bool)
        is_whole.reshape(-1, self.segments.segments_per_item)[list(self.long_items)] = False
        return np.flatnonzero(is_whole)

    @cached_property
    def whole_segments(self) -> Segments:
        return self.segments.take(self.whole_indices) if self.long_items else self.segments


@dataclass(frozen=True)
class _Estimate:
    """The estimated cost of a request with one algorithm."""

    seconds: float
    num_forwards: int


def _fewest_forwards_of_ties(estimates: Mapping[str, _Estimate]) -> str:
    """The fastest algorithm. Among those that are as fast, the one with the fewest forwards; then the first."""
    fastest = min(each.seconds for each in estimates.values())
    tied = {name: each for name, each in estimates.items() if each.seconds <= TIE * fastest}
    return min(tied, key=lambda name: tied[name].num_forwards)


@dataclass(frozen=True)
class Planner:
    """Makes plans. Holds what is the same for all requests."""

    model: ModelConfig
    backend: BackendInfo
    options: PlanOptions  # resolved
    caches_prefixes: bool = False  # from one request to the next
    measured: MeasuredCosts | None = None  # of this machine; None: static figures

    @property
    def token_budget(self) -> int:
        assert self.options.token_budget is not None, "resolved options"
        return self.options.token_budget

    def plan(self, segments: Segments, algorithm: str = "auto") -> ScorePlan:
        """Raises InvalidValueError: `dense_mask_too_large`; `too_many_tokens` where no prefix can be shared."""
        if not self.model.is_causal:
            return self._plan_bidirectional(segments, algorithm)
        prefix_len = len(segments.prefix_ids)  # not what the items read of it: items must not change the choice
        chunk = (self.options.chunk_size or 0) * segments.segments_per_item
        algorithm, reason = self._choose(algorithm, segments, chunk)
        is_fallback = algorithm == "prefill_extend" and prefix_len > self.backend.max_prefix_len
        if is_fallback:
            longest = self.backend.max_prefix_len
            reason = f"the backend caches prefixes of up to {longest} tokens, and this one has {prefix_len}"
            algorithm = "packed"
        long_items = self._cut.long_items(segments, self.backend.num_kv_blocks)
        if algorithm == "prefill_extend" or not prefix_len:  # without a prefix, sequences are item tokens alone
            _, note = self._choose_mask(False, 0)
            shape = ((), chunk, self.token_budget, self._cut, long_items)
            return ScorePlan(algorithm, reason, is_fallback, None, note, segments, *shape)
        plan = ScorePlan(algorithm, reason, is_fallback, None, None, segments, cut=self._cut, long_items=long_items)
        sequences = self._sequences(algorithm, prefix_len, plan.whole_segments.tokens.lens.tolist(), chunk)
        longest_sequence = max((each.num_tokens for each in sequences), default=0)
        mask, note = self._choose_mask(algorithm == "packed", longest_sequence, is_fallback)
        return replace(
            plan,
            mask=mask,
            mask_note=note,
            sequences=tuple(sequences),
            max_segments=chunk if algorithm == "serial" else 0,  # a chunk of packed items is a sequence
            # All masks of a forward are together no larger than that of the longest sequence.
            token_budget=min(self.token_budget, DENSE_MAX_SEQUENCE_LEN) if mask == "dense" else self.token_budget,
            splits_sequences=mask != "dense" and self._is_long_prefix(prefix_len),
        )

    @property
    def may_make_sequences(self) -> bool:
        """Whether requests that do not name their algorithm may be packed or serial. Where estimates of a nominal
        request decide, they are tried for prefixes of 1, 2, 4, .. tokens."""
        longest = self.model.max_context_len
        if not self.model.is_causal or self.backend.max_prefix_len < longest:
            return True
        if self.options.algorithm != "auto" or self.backend.algorithms_bit_equal:
            return self.options.algorithm != "prefill_extend"
        lens = [1 << power for power in range(longest.bit_length())]
        sums, chunk = SegmentSums.of(_NOMINAL_SEGMENT_LENS), self.options.chunk_size or 0
        estimates = [self._estimates(each, sums, chunk) for each in lens if not self._is_cached(each)]
        return any(_fewest_forwards_of_ties(each) != "prefill_extend" for each in estimates)

    def _plan_bidirectional(self, segments: Segments, algorithm: str) -> ScorePlan:
        """Whole pairs, as many in a forward as fit, none of them cut."""
        asked = self.options.algorithm if algorithm == "auto" else algorithm
        _, note = self._choose_mask(False, 0)
        return ScorePlan(
            "serial",
            _BIDIRECTIONAL,
            asked in ("packed", "prefill_extend"),
            None,
            note,
            without_shared_prefix(segments),
            max_segments=(self.options.chunk_size or 0) * segments.segments_per_item,
            token_budget=self.token_budget,
            pairs_per_square=1.0,
        )

    @cached_property
    def _cut(self) -> ItemCut:
        return ItemCut(self.backend.max_whole_item, self.backend.reads_short_blocks)

    def _is_long_prefix(self, prefix_len: int) -> bool:
        """Whether sequences of serial and packed are computed in pieces. The query and fixed facts decide: bits may
        differ. A shorter prefix stays whole, as its sequences are what these algorithms are about."""
        longest = self.backend.max_whole_item * (1 if self.backend.algorithms_bit_equal else _PREFIXES_PER_SEQUENCE)
        return longest < prefix_len <= self.backend.max_prefix_len

    def _choose(self, asked: str, segments: Segments, chunk: int) -> tuple[str, str]:
        """The algorithm and the reason. `chunk`: most segments in a sequence or forward, 0 for no bound."""
        if asked != "auto":
            return asked, "asked for by the request"
        if self.options.algorithm != "auto":
            return self.options.algorithm, "set for this engine"
        prefix_len = len(segments.prefix_ids)
        if not prefix_len:
            return "prefill_extend", "the items share no prefix"
        if self._is_cached(prefix_len):
            return "prefill_extend", _CACHED
        may_look = self.backend.algorithms_bit_equal
        seen = segments.tokens.lens if may_look else _NOMINAL_SEGMENT_LENS
        estimates = self._estimates(prefix_len, SegmentSums.of(seen), chunk)
        best = _fewest_forwards_of_ties(estimates)
        figures = ", ".join(f"{name} {1000 * each.seconds:.3g} ms" for name, each in estimates.items())
        basis = f"{len(seen)} segments" if may_look else "a nominal request of this query length"
        reason = f"{self._costs[1]} estimate for {prefix_len} prefix tokens and {basis}: {figures}"
        return best, f"{reason}; {_CACHED}" if best == "prefill_extend" and self.caches_prefixes else reason

    def _is_cached(self, prefix_len: int) -> bool:
        """For later requests, at least a whole block of it."""
        return self.caches_prefixes and KV_BLOCK_SIZE <= prefix_len <= self.backend.max_prefix_len

    @property
    def _costs(self) -> tuple[CostModel, str]:
        """The cost model to choose by, and what its figures are."""
        if self.measured is not None and self.backend.algorithms_bit_equal:
            return self.measured.model, self.measured.source
        return static_costs(self.model, self.backend.device_kind), "static"

    @property
    def _step_tokens(self) -> int:
        """About as many as the scheduler's steps have. A measurement decides only where all algorithms agree."""
        if not self.backend.algorithms_bit_equal:
            return min(self.token_budget, self.backend.step_tokens)
        return min(self.token_budget, tokens_of_step(self._costs[0], self.backend))

    def _estimates(self, prefix_len: int, sums: SegmentSums, chunk: int) -> dict[str, _Estimate]:
        """By algorithm; the first one wins a tie. Prefixes that are cached count once for every two requests."""
        (costs, _), step_tokens, multiple = self._costs, self._step_tokens, self.backend.token_multiple
        num_sequences = self._num_packed_sequences(prefix_len, sums, chunk)
        extend = extend_work(prefix_len, sums, step_tokens, multiple, joins=self.backend.joins_prefill)
        packed = packed_work(prefix_len, sums, num_sequences, step_tokens, multiple)
        serial = packed_work(prefix_len, sums, sums.num_segments, step_tokens, multiple)
        extend_seconds = costs.seconds(extend)
        if self.caches_prefixes and prefix_len <= self.backend.max_prefix_len:
            extend_seconds += costs.seconds(cached_extend_work(prefix_len, sums, step_tokens, multiple))
            extend_seconds /= 2
        return {
            "prefill_extend": _Estimate(extend_seconds, extend.num_forwards),
            "packed": _Estimate(costs.seconds(packed), packed.num_forwards),
            "serial": _Estimate(costs.seconds(serial), serial.num_forwards),
        }

    def _num_packed_sequences(self, prefix_len: int, sums: SegmentSums, chunk: int) -> int:
        """About as many as `_sequences` makes, without making them."""
        room = max(1, self._packed_len(prefix_len) - prefix_len)
        by_chunk = -(-sums.num_segments // chunk) if chunk else self.backend.num_copies
        return min(sums.num_segments, max(by_chunk, -(-sums.num_tokens // room)))

    def _sequences(self, algorithm: str, prefix_len: int, segment_lens: list[int], chunk: int) -> list[PackedSequence]:
        """The prefix and one segment (serial) or a chunk of them (packed)."""
        if algorithm == "serial":
            return fill_sequences(segment_lens, prefix_len, chunk_size=1, max_len=self.token_budget)
        if not chunk and self.backend.num_copies > 1:  # each copy of the model gets whole sequences
            chunk = -(-len(segment_lens) // self.backend.num_copies)
        return fill_sequences(segment_lens, prefix_len, chunk_size=chunk, max_len=self._packed_len(prefix_len))

    def _packed_len(self, prefix_len: int) -> int:
        """About a step of the scheduler, so that no request waits longer than that, unless the prefix is long.

        The cost of a dense mask grows with the square, so its sequences are short unless a chunk size is given.
        """
        if self.options.mask == "dense" and self.options.chunk_size is None:
            return min(self.token_budget, DENSE_MAX_SEQUENCE_LEN, max(2 * prefix_len, _DENSE_SEQUENCE_LEN))
        return min(self.token_budget, max(self._step_tokens, _PREFIXES_PER_SEQUENCE * prefix_len))

    def _choose_mask(
        self, is_masked: bool, sequence_len: int, is_fallback: bool = False
    ) -> tuple[MaskImpl | None, str | None]:
        """The mask of packed sequences, the longest of `sequence_len` tokens, and a note if it needs one."""
        if is_fallback:  # the mask option is for requests that chose packed
            return "segment", None
        asked, threshold = self.options.mask, self.options.segment_fallback_threshold
        if not is_masked:
            return None, None if asked == "auto" else f"the mask option {asked} has no effect here"
        if asked == "segment" or (asked == "auto" and sequence_len <= threshold):
            return "segment", None
        if asked == "dense":
            if sequence_len > DENSE_MAX_SEQUENCE_LEN:
                raise _dense_too_large(sequence_len)
            return "dense", None
        above = f"a sequence of {sequence_len} tokens is above the segment threshold of {threshold}"
        if sequence_len <= DENSE_MAX_SEQUENCE_LEN:
            return "dense", above
        return "segment", f"{above}, but too long for a dense mask ({DENSE_MAX_SEQUENCE_LEN} tokens)"


def max_dense_len(options: PlanOptions) -> int:
    """The longest packed sequence that may get a dense mask; 0 if none may."""
    if options.mask == "segment" or (
        options.mask == "auto" and options.segment_fallback_threshold >= DENSE_MAX_SEQUENCE_LEN
    ):
        return 0
    return DENSE_MAX_SEQUENCE_LEN


def _dense_too_large(sequence_len: int) -> InvalidValueError:
    return InvalidValueError(
        f"a dense mask must cover at most {DENSE_MAX_SEQUENCE_LEN} packed tokens "
        f"({DENSE_MAX_SEQUENCE_LEN**2 >> 20} MiB), got a sequence of {sequence_len}; "
        "use a smaller chunk size, the segment mask or prefill_extend",
        code="dense_mask_too_large",
        param="algorithm",
    )
