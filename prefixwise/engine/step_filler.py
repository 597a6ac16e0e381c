"""Fill a step: choose what the device computes next, from all live requests.

A step has up to three kinds of forwards (`step.py`): KV blocks of prefixes first, then items, also those whose prefix
is computed in this very step, then sequences of serial and packed. Where one large forward is faster than two
(`BackendInfo.joins_prefill`), blocks and items are joined into one.

Fairness: requests take turns. The request that was not served for the longest time comes first. While several requests
are live, each gets at most a share of the step in its turn; a turn that the end of the step cuts short goes on in the
next step. So a large request does not make a small one wait for all of it, and many small ones do not starve a
large one. This holds among requests of one priority; those of a later priority get the tokens that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice

from prefixwise.engine.prefix_cache import CacheEntry, PrefixCache
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.step import Part, Step, StepForward
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.algorithms import ScorePlan

SHARES = 4  # while several requests are live, one gets at most 1/SHARES of a step
MAX_SKIPPED = 8  # the step counts as full after this many requests that are ready and do not fit
MANY_LABELS = 16  # more of them have forwards of their own: each scored token reads all labels of a forward
LEAST_STEP_TOKENS = KV_BLOCK_SIZE  # a step that runs out of memory is halved down to this
STEPS_UNTIL_GROWTH = 1000  # that end well, before steps may be twice as large again
_HIDDEN = "hidden"  # stands for all requests that want hidden states, in the keys of forwards
_SHARED_ITEMS = ("items", None)  # the key of the forward with items of all requests with few labels


@dataclass(frozen=True)
class StepLimits:
    """How much a step may hold."""

    num_tokens: int
    max_prefill_tokens: int | None = None  # of one request; None: its share
    max_kv_blocks_read: int | None = None  # by one forward, a block counted once for every prefix that has it
    joins_prefill: bool = False  # join prefix blocks and items into one forward


class StepBudget:
    """The limits of steps: smaller after one that ran out of memory, and as large as before after many that did not."""

    def __init__(self, limits: StepLimits) -> None:
        self.limits = limits
        self._most_tokens = limits.num_tokens
        self._steps_until_growth = 0

    def shrink(self, num_tokens: int) -> bool:
        """A step of so many tokens ran out of memory. False if steps cannot be made smaller for it."""
        fewer = max(LEAST_STEP_TOKENS, num_tokens // 2)
        if num_tokens <= LEAST_STEP_TOKENS or fewer >= self.limits.num_tokens:
            return False
        self.limits = replace(self.limits, num_tokens=fewer)
        self._steps_until_growth = STEPS_UNTIL_GROWTH
        return True

    def count_step(self) -> None:
        """A step has ended well."""
        if self.limits.num_tokens == self._most_tokens:
            return
        self._steps_until_growth -= 1
        if not self._steps_until_growth:
            self.limits = replace(self.limits, num_tokens=min(self._most_tokens, 2 * self.limits.num_tokens))
            self._steps_until_growth = STEPS_UNTIL_GROWTH


class StepFiller:
    """Fills one step."""

    def __init__(self, limits: StepLimits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._prefill = StepForward()
        self._scored: dict[object, StepForward] = {}
        self._blocks_in_step: set[CacheEntry] = set()
        self._num_tokens = 0
        self._num_skipped = 0  # requests that are ready and do not fit
        self._cut: dict[RequestState, int] = {}  # the tokens of turns that the end of the step cuts short
        self._has_free_blocks = True  # for prefixes of further requests

    def fill(self, requests: Collection[RequestState]) -> Step | None:
        """Fill a step from requests, the longest unserved first. None if nothing can run now.

        The requests stay unchanged, except that KV blocks are reserved for their prefixes.
        """
        in_order = sorted(requests, key=_priority)  # stable: within a priority the order stays
        for _, of_one_priority in groupby(in_order, _priority):
            self._fill_from(list(of_one_priority))
            if self._tokens_left <= 0:
                break
        forwards = self._forwards()
        for forward in forwards:
            forward.build_batch()
        return Step(forwards, self._num_tokens, self._cut) if forwards else None

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
        share = self._limits.num_tokens if is_alone else max(1, self._limits.num_tokens // SHARES)
        for request in requests:
            if self._tokens_left <= 0 or self._num_skipped == MAX_SKIPPED:
                break
            if not request.is_launched and self._reserve_prefix(request):
                before, turn = self._num_tokens, max(1, share - request.turn_tokens)
                self._serve(request, min(turn, self._tokens_left))
                if self._limits.num_tokens - before < turn:
                    self._cut[request] = request.turn_tokens + self._num_tokens - before
                # A request that waits for another one's block is not skipped for lack of tokens.
                self._num_skipped += self._num_tokens == before and self._is_ready(request)

    def _reserve_prefix(self, request: RequestState) -> bool:
        """Once a request must wait for KV blocks, the requests after it get none either. Else it would starve."""
        if request.entries is None and request.keys:
            self._has_free_blocks = self._has_free_blocks and request.reserve_prefix(self._cache)
            return self._has_free_blocks
        return True

    def _serve(self, request: RequestState, max_tokens: int) -> None:
        num_taken = self._take_blocks(request, max_tokens)
        plan = request.task.plan
        if plan is not None and not request.are_units_launched and self._has_prefix(request):
            self._take_units(request, plan, max_tokens - num_taken, is_served=num_taken > 0)

    def _is_ready(self, request: RequestState) -> bool:
        """The request could be served if more tokens were left."""
        first, stop = request.blocks_to_compute(KV_BLOCK_SIZE)
        return first < stop or (not request.are_units_launched and self._has_prefix(request))

    @property
    def _tokens_left(self) -> int:
        return self._limits.num_tokens - self._num_tokens

    def _take_blocks(self, request: RequestState, max_tokens: int) -> int:
        """Add prefix blocks of the request that must be computed. Returns how many tokens they have.

        A block that is larger than the request's share is taken if it fits the step, or if it is the step's first.
        """
        within = min(max_tokens, self._limits.max_prefill_tokens or max_tokens)
        first, stop = request.blocks_to_compute(within)
        if first == stop:
            first, stop = request.blocks_to_compute(self._tokens_left if self._num_tokens else KV_BLOCK_SIZE)
            stop = min(stop, first + 1)
        if first == stop or not self._can_read(self._prefill, stop):
            return 0
        for entry in (request.entries or [])[first:stop]:
            entry.owner = request  # also of a block that another request reserved and left uncomputed
            self._blocks_in_step.add(entry)
        self._prefill.num_blocks_read += stop
        self._prefill.block_parts.append(Part(request, first, stop))
        return self._count(self._prefill, request.task.block_tokens(first, stop))

    def _can_read(self, forward: StepForward, num_blocks: int) -> bool:
        """The forward may read this many blocks more."""
        max_blocks = self._limits.max_kv_blocks_read
        return max_blocks is None or forward.is_empty or forward.num_blocks_read + num_blocks <= max_blocks

    def _has_prefix(self, request: RequestState) -> bool:
        """Every block of the prefix is launched, or in this step."""
        return all(entry.is_launched or entry in self._blocks_in_step for entry in request.entries or ())

    def _take_units(self, request: RequestState, plan: ScorePlan, max_tokens: int, *, is_served: bool) -> None:
        """Add units that fit. `is_served`: the request has blocks in this step.

        A unit that is larger than the request's share is taken if it fits the step. A unit that is larger than a step
        gets a step of its own.
        """
        forward = self._forward_for(request, plan)
        is_new = not forward.has_prefix(request)
        if not self._can_read(forward, len(request.entries or ()) if is_new else 0):
            return
        budget = plan.token_budget - (forward.num_tokens if plan.mask == "dense" else 0)
        first, stop = request.units_to_score(min(max_tokens, budget), at_least_one=not self._num_tokens)
        if first == stop and not is_served:
            first, stop = request.units_to_score(min(self._tokens_left, budget), at_least_one=False)
            stop = min(stop, first + 1)
        if first == stop:
            return
        if is_new:
            forward.add_prefix(request)
        forward.scored_parts.append(Part(request, first, stop))
        self._count(forward, request.task.unit_tokens(first, stop))

    def _forward_for(self, request: RequestState, plan: ScorePlan) -> StepForward:
        """Requests with the same layout and few labels share a forward, and so do those with the same many labels, as
        the classes of a classifier are. Those that want hidden states share another: no other request pays for them."""
        labels, need_hidden = plan.segments.label_ids, request.task.need_hidden
        owner = (id(labels), need_hidden) if labels.shape[1] > MANY_LABELS else _HIDDEN if need_hidden else None
        key = (plan.algorithm, plan.mask, owner) if plan.sequences else ("items", owner)
        if key not in self._scored:
            self._scored[key] = StepForward(has_sequences=bool(plan.sequences))
        return self._scored[key]

    def _count(self, forward: StepForward, num_tokens: int) -> int:
        forward.num_tokens += num_tokens
        self._num_tokens += num_tokens
        return num_tokens


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
