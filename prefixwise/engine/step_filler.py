"""Fill a step: choose what the device computes next, from all live requests.

A step has up to three kinds of forwards (`step.py`): KV blocks of prefixes first, then items, also those whose prefix
is computed in this very step, then sequences of serial and packed. Where one large forward is faster than two
(`BackendInfo.joins_prefill`), blocks and items are joined into one.

Fairness: requests take turns. The request that was not served for the longest time comes first. While several requests
are live, each gets at most a share of the step in its turn; a turn that the end of the step cuts short goes on in the
next step. So a large request does not make a small one wait for all of it, and many small ones do not starve a
large one. This holds among requests of one priority; those of a later priority get the tokens that are left.

Lines: requests of about the same size, within a factor of two, that need more than one turn stand in one line. Their
turns, at most `SHARES` of them in a round, go to the oldest. So they end one after the other: the last one not later
than if all had been served side by side, the others earlier. The next one begins when the ones before it leave a share
of the line's turn. From then on it has its own share, as other requests may wait for its KV blocks.

Steps are bounded in time (`step_limits.py`): what a part takes of a step is its *weight*. Small requests, which need
no more than a share, may be added to a step to which no part of a large one may.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

from prefixwise.engine.branch import Branch
from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache
from prefixwise.engine.request_state import Line, RequestState
from prefixwise.engine.step import BlockPart, Step, StepForward, UnitPart
from prefixwise.engine.step_limits import SHARES, StepLimits
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import ScorePlan

MAX_COMPARED = 16  # with more requests than this, a step is full without looking at what each leaves
MAX_SKIPPED = 8  # the step counts as full after this many requests that are ready and do not fit
MANY_LABELS = 16  # more of them have forwards of their own: each scored token reads all labels of a forward
_HIDDEN = "hidden"  # stands for all requests that want hidden states, in the keys of forwards
_VOCABULARY = "vocabulary"  # for all requests that read the whole vocabulary after every token
_SHARED_ITEMS = ("items", None)  # the key of the forward with items of all requests with few labels
# One of these runs with the prefill; where that reads the vocabulary after its own tokens, only the second.
_JOINABLE = (_SHARED_ITEMS, ("items", _VOCABULARY))

_priority, _line = attrgetter("task.priority"), attrgetter("line")


class StepFiller:
    """Fills one step."""

    def __init__(self, limits: StepLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._prefill = StepForward()
        self._scored: dict[object, StepForward] = {}
        self._blocks_in_step: set[CacheEntry] = set()
        self._num_tokens = 0
        self._num_pairs = 0.0
        self._weight = 0.0
        self._max_tokens = math.inf if limits.max_tokens is None else limits.max_tokens  # however little they weigh
        self._max_weight = limits.most_weight  # for the request that is being added
        self._least_weight = min(2 * limits.least_share, limits.num_tokens)  # that fits beside a block, in any case
        self._num_skipped = 0  # requests that are ready and do not fit
        self._cut: dict[Line, float] = {}  # the weight of turns that the end of the step cuts short
        self._filling: RequestState | None = None  # the only one that needs more than its share: it fills the step,
        self._tokens_beside = 0  # with so many tokens of the other ones,
        self._tokens_filling = 0  # and so many of its own so far
        self._has_free_blocks = True  # for prefixes of further requests
        self._prefill_left: int | None = None  # prefix tokens that the request may still have in this step

    def fill(self, requests: Collection[RequestState]) -> Step | None:
        """Fill a step from requests, line by line, the longest unserved first. None if nothing can run now.

        No request is launched as a whole. They stay unchanged, except that KV blocks are reserved for their prefixes.
        """
        in_order = sorted(requests, key=_priority)  # stable: within a priority the order stays
        for _, of_one_priority in groupby(in_order, _priority):
            self._fill_from(list(of_one_priority))
            self._max_weight = self._limits.most_weight
            if self._weight_left <= 0:
                break
        forwards = self._forwards()
        for forward in forwards:
            forward.build_batch()
        return Step(forwards, self._num_tokens, self._cut, round(self._num_pairs)) if forwards else None

    def _forwards(self) -> list[StepForward]:
        """In the order in which they run. The prefill is joined with the shared items if the limits allow it."""
        separate = [forward for forward in (self._prefill, *self._scored.values()) if not forward.is_empty]
        joinable = _JOINABLE[1:] if self._prefill.scores_blocks else _JOINABLE
        items = next((self._scored[key] for key in joinable if key in self._scored), None)
        if items is None or items.is_empty or self._prefill.is_empty or not self._limits.joins_prefill:
            return separate
        if any(part.request.task.is_timed for part in self._prefill.block_parts):  # needs the seconds of its prefill
            return separate
        joined, max_blocks = items.joined_with(self._prefill), self._limits.max_kv_blocks_read
        if max_blocks is not None and joined.num_blocks_read > max_blocks:
            return separate
        return [joined, *(forward for forward in separate if forward is not self._prefill and forward is not items)]

    def _fill_from(self, requests: Sequence[RequestState]) -> None:
        """Fill the tokens that are left from requests of one priority."""
        limits, share = self._limits, self._share(requests)
        for line, of_line in groupby(requests, _line):
            self._max_weight = limits.most_weight
            before, left = self._weight, self._weight_left
            if left <= 0 or self._num_skipped == MAX_SKIPPED:
                break
            in_line = list(of_line)
            if len(in_line) > 1 or in_line[0].weight(limits.pairs_per_token) > limits.share:
                self._max_weight = limits.num_tokens
                left = self._weight_left
            if left <= 0:
                self._num_skipped += 1
                continue  # a small one may fit
            turn = max(1, min(share * min(len(in_line), SHARES), self._max_weight) - line.turn_tokens)
            if len(in_line) == 1:
                self._serve(in_line[0], min(turn, left))
            else:
                self._serve_line(in_line, min(turn, left), share)
            if left < turn:
                self._cut[line] = line.turn_tokens + self._weight - before

    def _share(self, requests: Sequence[RequestState]) -> float:
        """What a request gets in its turn: a share of the step, and more where the other ones need less than theirs."""
        share, tokens = self._limits.share, self._num_tokens
        if not 0 < len(requests) <= MAX_COMPARED:
            return share
        pairs_per_token = self._limits.pairs_per_token
        by_weight = sorted(((request.weight(pairs_per_token), request) for request in requests), key=itemgetter(0))
        self._max_weight = self._limits.most_weight if by_weight[-1][0] <= share else self._limits.num_tokens
        left = self._weight_left
        for number, (weight, request) in enumerate(by_weight):
            level = left / (len(by_weight) - number)
            if weight > level:
                if request is by_weight[-1][1]:
                    self._filling, self._tokens_beside = request, tokens
                return max(share, level) if level >= KV_BLOCK_SIZE or len(requests) == 1 else share
            left -= weight
            tokens += request.work_left
        return max(share, self._max_weight)

    def _serve_line(self, requests: Sequence[RequestState], max_weight: float, share: float) -> None:
        """Serve the oldest of the requests, those that have begun, and the next one where there is a share for it."""
        end, begun = self._weight + max_weight, [request.has_begun for request in requests]
        num_behind = sum(begun)
        for position, (request, has_begun) in enumerate(zip(requests, begun, strict=True)):
            num_behind -= has_begun
            left = end - self._weight
            if left <= 0 or self._num_skipped == MAX_SKIPPED:
                break
            if position and not has_begun and left < share:
                if num_behind:
                    continue
                break
            self._serve(request, max(min(share, left), left - share * num_behind))

    def _reserve_prefix(self, branch: Branch) -> bool:
        """Once a branch must wait for KV blocks, the requests after it get none either. Else it would starve. A request
        that waits for blocks holds none that it does not compute with: two such requests would wait for each other."""
        if branch.is_reserved:
            return True
        if self._has_free_blocks and branch.reserve_prefix(self._cache):
            return True
        if branch.request.give_way(self._cache) and self._has_free_blocks and branch.reserve_prefix(self._cache):
            return True
        self._has_free_blocks = False
        return False

    def _serve(self, request: RequestState, max_weight: float) -> None:
        """Serve its branches in order: the next one once the device has all of the one before."""
        before, self._prefill_left = self._weight, self._limits.max_prefill_tokens
        for branch in request.branches():
            if branch.is_launched:
                continue
            left = max_weight - (self._weight - before)
            if left <= 0 or not self._reserve_prefix(branch):
                break
            if not self._serve_branch(branch, left, is_served=self._weight > before):
                break
        if self._weight == before:  # one that waits for another one's block is not skipped for lack of tokens
            self._num_skipped += self._is_ready(request)

    def _serve_branch(self, branch: Branch, max_weight: float, *, is_served: bool) -> bool:
        """Add blocks and units of the branch. False if its request gets no more of this step: some are left, or it may
        have no more items in one forward. `is_served`: the request is in this step."""
        before = self._weight
        in_blocks = self._take_blocks(branch, max_weight, is_served=is_served)
        plan, taken = branch.plan.scoring, self._weight - before
        if not self._has_prefix(branch):
            return False
        if plan is None or branch.next_unit(in_blocks) == branch.plan.num_units:
            return True
        stop = self._take_units(branch, plan, max_weight - taken, in_blocks, is_served=is_served or taken > 0)
        return stop == branch.plan.num_units and not plan.max_segments

    def _is_ready(self, request: RequestState) -> bool:
        """The request could be served if more tokens were left."""
        branch = next((branch for branch in request.branches() if not branch.is_launched), None)
        if branch is None:  # its prefix was cached, and that is all it asks for
            return False
        first = branch.num_blocks_launched
        if first < branch.blocks_within(first, KV_BLOCK_SIZE):
            return True
        return branch.next_unit() < branch.plan.num_units and self._has_prefix(branch)

    @property
    def _weight_left(self) -> float:
        """However much attention a block has, the least share of another request fits beside it."""
        if self._num_tokens >= self._max_tokens:
            return 0
        return max(self._max_weight - self._weight, self._least_weight - self._num_tokens)

    @property
    def _tokens_left(self) -> float:
        return self._max_tokens - self._num_tokens

    def _take_blocks(self, branch: Branch, max_weight: float, *, is_served: bool) -> list[int]:
        """Add prefix blocks of the branch that must be computed. Returns those of its units that are such blocks.

        A block that is larger than the request's share is taken if it fits the step, or if it is the step's first.
        """
        first = branch.num_blocks_launched
        if first == branch.plan.num_blocks:
            return []
        tokens_before = branch.plan.block_starts[first]
        within = self._whole_waves(branch, self._limits.block_tokens_within(max_weight, tokens_before))
        within = int(min(within, self._tokens_left))
        stop = branch.blocks_within(first, within if self._prefill_left is None else min(within, self._prefill_left))
        if first == stop and not is_served:
            left = int(min(self._limits.block_tokens_within(self._weight_left, tokens_before), self._tokens_left))
            stop = min(branch.blocks_within(first, left if self._num_tokens else KV_BLOCK_SIZE), first + 1)
        if first == stop or not self._can_read(self._prefill, stop):
            return []
        part = BlockPart(branch, first, stop)
        for entry in part.entries:
            entry.owner = branch  # also of a block that another request reserved and left uncomputed
        self._blocks_in_step.update(part.entries)
        self._prefill.num_blocks_read += stop
        self._prefill.block_parts.append(part)
        if self._prefill_left is not None:
            self._prefill_left -= part.num_tokens
        self._count(branch, self._prefill, part.num_tokens, branch.plan.block_pairs(first, stop))
        return part.units

    def _whole_waves(self, branch: Branch, num_tokens: int) -> int:
        """Of the tokens of a part that fills the step: as many as make it whole waves, with those beside."""
        if branch.request is not self._filling:
            return num_tokens
        wave, beside = self._limits.wave_tokens, self._tokens_beside + self._tokens_filling
        all_tokens = beside + num_tokens
        if all_tokens < wave:
            return num_tokens
        return max(0, all_tokens // wave * wave - beside)

    def _can_read(self, forward: StepForward, num_blocks: int) -> bool:
        """The forward may read this many blocks more."""
        max_blocks = self._limits.max_kv_blocks_read
        return max_blocks is None or forward.is_empty or forward.num_blocks_read + num_blocks <= max_blocks

    def _has_prefix(self, branch: Branch) -> bool:
        """Every block of the prefix is launched, or in this step."""
        for entry in branch.entries or ():
            if not entry.is_launched and entry not in self._blocks_in_step:
                return False
        return branch.is_reserved

    def _take_units(
        self, branch: Branch, plan: ScorePlan, max_weight: float, in_blocks: Sequence[int], *, is_served: bool
    ) -> int:
        """Add units that fit. Returns the end of those. `in_blocks`: those that this step computes as KV blocks.
        `is_served`: the request has a part in this step.

        A unit that is larger than the request's share is taken if it fits the step. A unit that is larger than a step
        gets a step of its own.
        """
        forward = self._forward_for(branch.request, plan)
        is_new = not forward.has_prefix(branch)
        if not self._can_read(forward, len(branch.entries or ()) if is_new else 0):
            return 0
        budget = int(min(plan.token_budget - (forward.num_tokens if plan.mask == "dense" else 0), self._tokens_left))
        pairs = branch.pairs_per_unit_token
        per_token = self._limits.weight(1, pairs)
        within = self._whole_waves(branch, int(max_weight / per_token))
        first, stop = branch.units_to_score(min(within, budget), in_blocks, at_least_one=not self._num_tokens)
        if first == stop and not is_served:
            left = min(int(self._weight_left / per_token), budget)
            first, stop = branch.units_to_score(left, in_blocks)
            stop = min(stop, first + 1)
        if first == stop:
            return 0
        if is_new:
            forward.add_prefix(branch)
        part = UnitPart(branch, first, stop)
        forward.scored_parts.append(part)
        self._count(branch, forward, part.num_tokens, part.num_tokens * pairs)
        return stop

    def _forward_for(self, request: RequestState, plan: ScorePlan) -> StepForward:
        """The forward of a request's items. Requests with the same layout and few labels share one, and so do those
        with the same many labels, as the classes of a classifier are. Those that want hidden states share another: no
        other request pays for them; and so do those that read the whole vocabulary."""
        labels, need_hidden = plan.segments.label_ids, request.task.need_hidden
        owner = (id(labels), need_hidden) if labels.shape[1] > MANY_LABELS else _HIDDEN if need_hidden else None
        owner = _VOCABULARY if request.task.top_k else owner
        key = (plan.algorithm, plan.mask, owner) if plan.sequences else ("items", owner)
        forward = self._scored.get(key)
        if forward is None:
            forward = self._scored[key] = StepForward(has_sequences=bool(plan.sequences))
        return forward

    def _count(self, branch: Branch, forward: StepForward, num_tokens: int, num_pairs: float) -> None:
        forward.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self._tokens_filling += num_tokens if branch.request is self._filling else 0
        self._num_pairs += num_pairs
        self._weight += self._limits.weight(num_tokens, num_pairs)


def fill_step(limits: StepLimits, cache: PrefixCache, requests: Sequence[RequestState]) -> Step | None:
    """Fill a step from requests, the longest unserved first. None if nothing can run now.

    Suspects come first, each in a step of its own. Where one waits for a KV block, the request that computes it runs.
    """
    for request in requests:
        step = StepFiller(limits, cache).fill([request]) if request.is_suspect else None
        if step is not None:
            return step
    trusted = [request for request in requests if not request.is_suspect]
    return StepFiller(limits, cache).fill(trusted) if trusted else None
