"""One request in the scheduler: what was asked (`ScoringTask`, immutable) and how far it has come (`RequestState`).

A request is computed in *branches* (`plan/branches.py`): the query and the items behind it and, for each long item,
query and head of the item and its tail. A branch first computes the KV blocks of its prefix and then its units, in
their order: segments (the tokens of an item and a label stem), or whole sequences for serial and packed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.embed_overrides import Vectors
from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.engine.branch import Branch, is_computed, is_launched
from prefixwise.engine.loras import LoadedLora
from prefixwise.engine.prefix_cache import CacheEntry, Key, PinnedPrefix, PrefixCache, block_keys
from prefixwise.forward.batch import ForwardOutput
from prefixwise.plan.algorithms import ScorePlan
from prefixwise.plan.branches import BranchPlans

log = logging.getLogger("prefixwise")

OnChange = Callable[[], None]


@dataclass(frozen=True, eq=False)
class ScoringTask:
    """What one request asks of the device: a prefix in the KV cache, then (`plan`) items to score."""

    prefix_ids: Int32Array  # to be cached; empty if the plan needs no prefill
    plan: ScorePlan | None  # None: compute the prefix only
    need_logsumexp: bool = False  # also the logsumexp over the vocabulary
    need_hidden: bool = False  # also the hidden states at the scored positions
    top_k: int = 0  # also so many of the most likely tokens at the scored positions, and the logsumexp
    is_timed: bool = False  # run and wait for the prefill by itself, so that its seconds are exact
    deadline: float | None = None  # a value of time.monotonic()
    pin_seconds: float | None = None  # pin the prefix for this long
    priority: int = 0  # lower values run first
    vectors: Vectors | None = None  # of ids below 0 in the prefix, as in the plan's segments
    lora_id: int = 0  # of a LoRA adapter (`loras.py`); 0: the model itself

    @cached_property
    def branches(self) -> BranchPlans:
        return BranchPlans(self.plan, self.prefix_ids, self.vectors)

    @property
    def num_tokens(self) -> int:
        return self.branches.num_tokens

    @property
    def max_unit_tokens(self) -> int:
        """Tokens of the largest unit: it is never split."""
        return self.branches.max_unit_tokens


class BatchRecord(NamedTuple):
    """A forward that scored some segments of the request, for the debug block."""

    segments: int  # of this request
    num_tokens: int  # of this request's units; prefix blocks in the same forward are not counted
    forward_tokens: int  # of all requests
    bucket: int  # tokens after padding

    @property
    def fill(self) -> float:
        return round(self.forward_tokens / self.bucket, 4)


class Line:
    """Requests that have their turns in common (`step_filler.py`)."""

    def __init__(self) -> None:
        self.requests: dict[RequestState, None] = {}  # in the order of their arrival
        self.turn_tokens = 0.0  # the weight of a turn that the end of a step has cut short


class RequestState:
    """How far a request has come, and its outcome.

    The scheduler's thread owns it. Any thread may call `cancel()`, and read the outcome once `is_done`.
    """

    def __init__(self, task: ScoringTask, on_change: OnChange | None = None) -> None:
        self.task = task
        self._on_change = on_change  # called by the scheduler's thread; must be quick
        # Progress
        self._num_begun = 0
        self._open: dict[Branch, None] = {}  # begun and not done, in order
        self._trunk: Branch | None = None  # once it has begun
        self._expected_hit_tokens = 0  # of `tokens_left`: those of the prefix that were cached when it was submitted
        self.num_segments_scored = 0
        self.size = 0  # 0: one turn; 1: two; 2: up to four; 3: up to eight; and so on (`admission.py`)
        self.call_size = 0  # the largest of the requests that were submitted with it
        self.line = Line()  # whose turns it shares; at first its own
        self.num_in_flight = 0  # in-flight steps with parts of this request
        self.is_suspect = False  # a step with a part of it has failed: until items of it are scored, it runs alone
        self.is_finite = True  # all logits so far
        self.batches: list[BatchRecord] = []
        self.cached_tokens = 0
        self.submitted = monotonic()
        self.started: float | None = None
        self.prefill_seconds = 0.0
        self.extend_seconds = 0.0
        self.lora: LoadedLora | None = None  # held until the request is done, so that its slot stays
        # Outcome
        self.on_cancel: OnChange | None = None  # where another process computes it, and must be told
        self.is_refused = False  # it was never queued: `error` says why
        self.is_cancelled = False
        self.is_done = False
        self.error: BaseException | None = None
        self.pinned: PinnedPrefix | None = None
        self.label_logits, self.logsumexp = _allocate_outputs(task)
        self.hidden: NDArray[np.float32] | None = None  # [R, D], where the task needs it
        num_rows = len(self.label_logits)
        self.top_logits = np.empty((num_rows, task.top_k), np.float32)  # [R, K]
        self.top_ids = np.empty((num_rows, task.top_k), np.int32)

    # Computed when they are first needed, not before the request is submitted: a worker, whose engine is in another
    # process, needs none of them.

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """Of the query's KV blocks."""
        trunk, task = self.task.branches.trunk, self.task
        return () if trunk is None else block_keys(trunk.prefix_ids, trunk.block_starts, task.vectors, task.lora_id)

    @cached_property
    def _num_branches(self) -> int:
        return len(self.task.branches)

    @cached_property
    def tokens_left(self) -> int:
        """Tokens that are not computed yet; steps change it."""
        return self.task.num_tokens

    def cancel(self) -> None:
        """Drop the request before the next step; one that is done stays as it is. Any thread may call this."""
        if self.on_cancel is not None and not self.is_cancelled and not self.is_done:
            self.on_cancel()
        self.is_cancelled = True

    def has_expired(self, now: float) -> bool:
        return self.task.deadline is not None and now >= self.task.deadline

    @property
    def has_begun(self) -> bool:
        """A part of it was launched, or it holds KV blocks that others may wait for."""
        return self.started is not None or any(branch.entries is not None for branch in self._open)

    # Branches

    def branches(self) -> Iterator[Branch]:
        """Those that are not done, in order. The next one is begun when it is reached."""
        yield from list(self._open)
        while self._num_begun < self._num_branches:
            yield self._begin_branch()

    def weight(self, pairs_per_token: float) -> float:
        """Of all that is left of it, about (`step_limits.py`): its tokens weigh as those of the next branch do."""
        branch = next(iter(self._open), None) or next(self.branches(), None)
        pairs = 0.0 if branch is None else branch.pairs_per_unit_token
        return self.work_left * (1 + pairs / pairs_per_token)

    def _begin_branch(self) -> Branch:
        plan = self.task.branches[self._num_begun]
        keys = (*self.keys[: plan.num_query_blocks], *[None] * (plan.num_blocks - plan.num_query_blocks))
        branch = Branch(self, plan, keys)
        if plan is self.task.branches.trunk:
            self._trunk = branch
        self._num_begun += 1
        self._open[branch] = None
        return branch

    def retire_branches(self, cache: PrefixCache) -> None:
        """Release the KV blocks of branches that are computed; those of the query stay for the other branches."""
        if self._num_branches == 1:
            return
        for branch in [branch for branch in self._open if branch.is_computed]:
            del self._open[branch]
            if branch is not self._trunk:
                branch.release_prefix(cache)

    def give_way(self, cache: PrefixCache) -> bool:
        """A branch must wait for KV blocks: release the query's if they wait for further branches only, so that no
        request waits for room while it holds some. False if nothing was released."""
        if self._trunk is None or self._trunk in self._open or self._trunk.entries is None:
            return False
        self._trunk.release_prefix(cache)
        return True

    def expect_hits(self, cache: PrefixCache) -> None:
        """Look the query up, to estimate what the device will have to compute. Any thread may call this, before the
        request is queued: the trunk begins here, so that the scheduler's thread need not hash its blocks."""
        trunk = self.task.branches.trunk
        if trunk is not None:
            if not self._num_begun:
                self._begin_branch()
            num_found = cache.num_found(self.keys)
            # Blocks that are scored themselves are computed in any case.
            self._expected_hit_tokens = trunk.block_starts[num_found] - trunk.scored_block_tokens(num_found)

    def count_hits(self, branch: Branch, num_tokens: int) -> None:
        """So many tokens of a branch's prefix are cached. Those of the query count."""
        if branch is self._trunk:
            self.cached_tokens = num_tokens

    @property
    def entries(self) -> list[CacheEntry]:
        """The cache entries that it holds."""
        held = dict.fromkeys([*self._open] if self._trunk is None else [self._trunk, *self._open])
        return [entry for branch in held for entry in branch.entries or ()]

    def release_prefix(self, cache: PrefixCache) -> None:
        """Release the KV blocks of all branches."""
        for branch in self._open if self._trunk is None else (self._trunk, *self._open):
            branch.release_prefix(cache)

    def invalidate_prefix(self, cache: PrefixCache) -> int:
        """Release all KV blocks; branches that are not done compute them again. Returns how many tokens were lost."""
        lost = sum(branch.invalidate_prefix(cache) for branch in self._open)
        if self._trunk is not None and self._trunk not in self._open and (following := next(self.branches(), None)):
            lost += self._trunk.lose_query(following.plan)  # it is done, and the other branches read its blocks
        self.release_prefix(cache)
        self._expected_hit_tokens = 0
        self.tokens_left += lost
        return lost

    # Outputs

    def receive(self, rows: slice | Int64Array, output: ForwardOutput, found: slice) -> None:
        """Store rows `found` of a forward's output. It may have more columns than this request has labels."""
        self.label_logits[rows] = output.label_logits[found, : self.label_logits.shape[1]]
        self.is_suspect = False
        if self.logsumexp is not None and output.logsumexp is not None:
            self.logsumexp[rows] = output.logsumexp[found]
        if self.task.need_hidden and output.hidden is not None:
            if self.hidden is None:
                self.hidden = np.empty((len(self.label_logits), output.hidden.shape[1]), np.float32)
            self.hidden[rows] = output.hidden[found]
        if self.task.top_k and output.top_logits is not None and output.top_ids is not None:
            self.top_logits[rows] = output.top_logits[found, : self.task.top_k]
            self.top_ids[rows] = output.top_ids[found, : self.task.top_k]

    def check_finite(self, rows: slice | Int64Array) -> None:
        """Remember whether these rows of the outputs have NaN or infinity."""
        self.is_finite = self.is_finite and bool(np.isfinite(self.label_logits[rows]).all())

    # How far it has come

    @property
    def work_left(self) -> int:
        """Tokens that the device will probably compute for it."""
        return max(0, self.tokens_left - self._expected_hit_tokens)

    @property
    def is_launched(self) -> bool:
        """The device has been given the whole request."""
        return self._num_begun == self._num_branches and all(map(is_launched, self._open))

    @property
    def is_computed(self) -> bool:
        """The device has computed the whole request."""
        return self._num_begun == self._num_branches and all(map(is_computed, self._open))

    @property
    def num_items_done(self) -> int:
        plan = self.task.plan
        return 0 if plan is None else self.num_segments_scored // plan.segments.segments_per_item

    @property
    def queue_seconds(self) -> float:
        return (self.started or monotonic()) - self.submitted

    @property
    def device_seconds(self) -> float:
        return self.prefill_seconds + self.extend_seconds

    # The outcome

    def notify(self) -> None:
        """Call `on_change`. An exception in it is logged and does not reach the scheduler."""
        if self._on_change is None:
            return
        try:
            self._on_change()
        except Exception:
            log.exception("a request's on_change failed")

    def finish(self, error: BaseException | None = None) -> None:
        self.error = error
        self.is_done = True
        self.notify()
        self._on_change = self.on_cancel = None  # the caller holds this object, so a reference back would be a cycle
        self._open, self._trunk, self.lora = {}, None, None


def _allocate_outputs(task: ScoringTask) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Label logits [R, L], and logsumexp [R] if the task needs it."""
    if task.plan is None:
        return np.zeros((0, 0), np.float32), None
    segments = task.plan.segments
    num_rows = len(segments.score_offsets)
    logits = np.empty((num_rows, segments.label_ids.shape[1]), np.float32)
    return logits, np.empty(num_rows, np.float32) if task.need_logsumexp or task.top_k else None
