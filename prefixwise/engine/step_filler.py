"""Fill a step: choose what the device computes next, from all live requests.

A step has up to three kinds of forwards (`step.py`): KV blocks of prefixes first, then items, also those whose prefix
is computed in this very step, then sequences of serial and packed. Where one large forward is faster than two
(`BackendInfo.joins_prefill`), blocks and items are joined into one.

Fairness: requests take turns. The request that was not served for the longest time comes first. While several requests
are live, each gets at most a share of the step in its turn; a turn that the end of the step cuts short goes on in the
next step. So a large request does not make a small one wait for all of it, and many small ones do not starve a
large one. This holds among requests of one priority; those of a later priority get the tokens that are left.

Steps are bounded in time (`step_limits.py`): what a part takes of a step is its *weight*.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby, islice

from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache
from prefixwise.engine.request_state import Branch, RequestState
from prefixwise.engine.step import Part, Step, StepForward
from prefixwise.engine.step_limits import StepLimits
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import ScorePlan

MAX_SKIPPED = 8  # the step counts as full after this many requests that are ready and do not fit
MANY_LABELS = 16  # more of them have forwards of their own: each scored token reads all labels of a forward
_HIDDEN = "hidden"  # stands for all requests that want hidden states, in the keys of forwards
_SHARED_ITEMS = ("items", None)  # the key of the forward with items of all requests with few labels


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
        self._num_skipped = 0  # requests that are ready and do not fit
        self._cut: dict[RequestState, float] = {}  # the weight of turns that the end of the step cuts short
        self._has_free_blocks = True  # for prefixes of further requests
        self._prefill_left: int | None = None  # prefix tokens that the request may still have in this step

    def fill(self, requests: Collection[RequestState]) -> Step | None:
        """Fill a step from requests, the longest unserved first. None if nothing can run now.

        The requests stay unchanged, except that KV blocks are reserved for their prefixes.
        """
        in_order = sorted(requests, key=_priority)  # stable: within a priority the order stays
        for _, of_one_priority in groupby(in_order, _priority):
            self._fill_from(list(of_one_priority))
            if self._weight_left <= 0:
                break
        forwards = self._forwards()
        for forward in forwards:
            forward.build_batch()
        return Step(forwards, self._num_tokens, self._cut, round(self._num_pairs)) if forwards else None

    def _forwards(self) -> list[StepForward]:
        """In the order in which they run. The prefill is joined with the shared items if the limits allow it."""
        separate = [forward for forward in (self._prefill, *self._scored.values()) if not forward.is_empty]
        items = self._scored.get(_SHARED_ITEMS)
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
        busy = (request for request in requests if not request.is_launched)
        is_alone = len(list(islice(busy, 2))) == 1
        share = self._limits.num_tokens if is_alone else self._limits.share
        for request in requests:
            if self._weight_left <= 0 or self._num_skipped == MAX_SKIPPED:
                break
            if not request.is_launched:
                before, left, turn = self._weight, self._weight_left, max(1, share - request.turn_tokens)
                self._serve(request, min(turn, left))
                if left < turn:
                    self._cut[request] = request.turn_tokens + self._weight - before
                # A request that waits for another one's block is not skipped for lack of tokens.
                self._num_skipped += self._weight == before and self._is_ready(request)

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

    def _serve_branch(self, branch: Branch, max_weight: float, *, is_served: bool) -> bool:
        """Add blocks and units of the branch. False if its request gets no more of this step: some are left, or it may
        have no more items in one forward. `is_served`: the request is in this step."""
        taken = self._take_blocks(branch, max_weight, is_served=is_served)
        plan = branch.plan.scoring
        if not self._has_prefix(branch):
            return False
        if plan is None or branch.are_units_launched:
            return True
        stop = self._take_units(branch, plan, max_weight - taken, is_served=is_served or taken > 0)
        return stop == branch.plan.num_units and not plan.max_segments

    def _is_ready(self, request: RequestState) -> bool:
        """The request could be served if more tokens were left."""
        branch = next((branch for branch in request.branches() if not branch.is_launched), None)
        if branch is None:  # its prefix was cached, and that is all it asks for
            return False
        first, stop = branch.blocks_to_compute(KV_BLOCK_SIZE)
        return first < stop or (not branch.are_units_launched and self._has_prefix(branch))

    @property
    def _weight_left(self) -> float:
        """However much attention a block has, the least share of another request fits beside it."""
        limits = self._limits
        least = min(2 * limits.least_share, limits.num_tokens)
        return max(limits.num_tokens - self._weight, least - self._num_tokens)

    def _take_blocks(self, branch: Branch, max_weight: float, *, is_served: bool) -> float:
        """Add prefix blocks of the branch that must be computed. Returns their weight.

        A block that is larger than the request's share is taken if it fits the step, or if it is the step's first.
        """
        tokens_before = branch.plan.block_starts[branch.num_blocks_launched]
        within = self._limits.block_tokens_within(max_weight, tokens_before)
        first, stop = branch.blocks_to_compute(
            within if self._prefill_left is None else min(within, self._prefill_left)
        )
        if first == stop and not is_served:
            left = self._limits.block_tokens_within(self._weight_left, tokens_before)
            first, stop = branch.blocks_to_compute(left if self._num_tokens else KV_BLOCK_SIZE)
            stop = min(stop, first + 1)
        if first == stop or not self._can_read(self._prefill, stop):
            return 0
        for entry in (branch.entries or [])[first:stop]:
            entry.owner = branch  # also of a block that another request reserved and left uncomputed
            self._blocks_in_step.add(entry)
        self._prefill.num_blocks_read += stop
        self._prefill.block_parts.append(Part(branch, first, stop))
        num_tokens = branch.plan.block_tokens(first, stop)
        if self._prefill_left is not None:
            self._prefill_left -= num_tokens
        return self._count(self._prefill, num_tokens, branch.plan.block_pairs(first, stop))

    def _can_read(self, forward: StepForward, num_blocks: int) -> bool:
        """The forward may read this many blocks more."""
        max_blocks = self._limits.max_kv_blocks_read
        return max_blocks is None or forward.is_empty or forward.num_blocks_read + num_blocks <= max_blocks

    def _has_prefix(self, branch: Branch) -> bool:
        """Every block of the prefix is launched, or in this step."""
        if branch.is_prefix_launched:
            return True
        unlaunched = (branch.entries or [])[branch.num_blocks_launched :]
        return branch.is_reserved and all(entry.is_launched or entry in self._blocks_in_step for entry in unlaunched)

    def _take_units(self, branch: Branch, plan: ScorePlan, max_weight: float, *, is_served: bool) -> int:
        """Add units that fit. Returns the end of those. `is_served`: the request has a part in this step.

        A unit that is larger than the request's share is taken if it fits the step. A unit that is larger than a step
        gets a step of its own.
        """
        forward = self._forward_for(branch.request, plan)
        is_new = not forward.has_prefix(branch)
        if not self._can_read(forward, len(branch.entries or ()) if is_new else 0):
            return 0
        budget = plan.token_budget - (forward.num_tokens if plan.mask == "dense" else 0)
        pairs = branch.pairs_per_unit_token
        per_token = self._limits.weight(1, pairs)
        first, stop = branch.units_to_score(min(int(max_weight / per_token), budget), at_least_one=not self._num_tokens)
        if first == stop and not is_served:
            left = int(self._weight_left / per_token)
            first, stop = branch.units_to_score(min(left, budget), at_least_one=False)
            stop = min(stop, first + 1)
        if first == stop:
            return 0
        if is_new:
            forward.add_prefix(branch)
        forward.scored_parts.append(Part(branch, first, stop))
        num_tokens = branch.plan.unit_tokens(first, stop)
        self._count(forward, num_tokens, num_tokens * pairs)
        return stop

    def _forward_for(self, request: RequestState, plan: ScorePlan) -> StepForward:
        """Requests with the same layout and few labels share a forward, and so do those with the same many labels, as
        the classes of a classifier are. Those that want hidden states share another: no other request pays for them."""
        labels, need_hidden = plan.segments.label_ids, request.task.need_hidden
        owner = (id(labels), need_hidden) if labels.shape[1] > MANY_LABELS else _HIDDEN if need_hidden else None
        key = (plan.algorithm, plan.mask, owner) if plan.sequences else ("items", owner)
        if key not in self._scored:
            self._scored[key] = StepForward(has_sequences=bool(plan.sequences))
        return self._scored[key]

    def _count(self, forward: StepForward, num_tokens: int, num_pairs: float) -> float:
        """Returns the weight."""
        forward.num_tokens += num_tokens
        self._num_tokens += num_tokens
        self._num_pairs += num_pairs
        weight = self._limits.weight(num_tokens, num_pairs)
        self._weight += weight
        return weight


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


def _priority(request: RequestState) -> int:
    return request.task.priority
