"""How much a step may hold: what the device computes in its time (`plan/cost_model.py`), and what fits its memory.

The measure is *weight*: the tokens without attention that take as long. A token's weight is

    1 + tokens that it attends to / pairs_per_token

How long is a step? Whoever comes waits for the step that runs, so it is short where others would notice. On an
accelerator short steps cost throughput, so there are three bounds:

    parts of large requests    `BackendInfo.step_seconds`: they would make every step as long as they may
    small requests, whole      WHOLE_TIMES as long: who comes behind many small ones has to wait for them anyway
    all, for a while           about as long as the smallest request of late takes by itself, up to LONGEST_TIMES
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.cost_model import MeasuredCosts, tokens_of_step

SHARES = 4  # while several requests are live, one gets at most 1/SHARES of a step
LEAST_TOKENS_IN_MEMORY = KV_BLOCK_SIZE  # a step that runs out of memory is halved down to this
STEPS_UNTIL_GROWTH = 1000  # that end well, before steps may be twice as large again
WHOLE_TIMES, LONGEST_TIMES = 5 / 3, 3.0  # of `step_seconds`, on accelerators
STRETCH = 1.25  # of the smallest request: those that are a little larger are not cut either
RECENT_SECONDS = 1.0  # a request decides for so long, and up to twice as long, how long steps are


@dataclass(frozen=True)
class StepLimits:
    """How much a step may hold."""

    num_tokens: int  # their weight, where parts of large requests fill the step, and so their number
    max_prefill_tokens: int | None = None  # of one request; None: its share
    max_kv_blocks_read: int | None = None  # by one forward, a block counted once for every prefix that has it
    joins_prefill: bool = False  # join prefix blocks and items into one forward
    pairs_per_token: float = math.inf  # query-key pairs that weigh as much as a token
    least_share: int = 1  # tokens of a share, in any case
    wave_tokens: int = 1  # a step that is cut has a multiple of so many tokens
    whole_tokens: int = 0  # their weight, where whole requests fill it; at least `num_tokens`
    longest_tokens: int = 0  # their weight, where all requests are large; not less than `num_tokens` counts
    max_tokens: int | None = None  # their number; None: bounded by their weight alone

    @classmethod
    def of(cls, backend: BackendInfo, max_prefill_tokens: int | None) -> StepLimits:
        """Those of steps without a bound in time."""
        return cls(
            backend.step_tokens,
            max_prefill_tokens,
            backend.max_kv_blocks_read,
            backend.joins_prefill,
            least_share=max(1, min(KV_BLOCK_SIZE, backend.least_step_tokens // 2)),
            wave_tokens=backend.wave_tokens,
        )

    @cached_property
    def share(self) -> int:
        """What a request gets in one turn while several are live. One that needs no more is small."""
        return max(self.least_share, self.most_weight // SHARES)

    @cached_property
    def most_weight(self) -> int:
        """Of a step to which a small request is added. For others it is `num_tokens`."""
        return max(self.num_tokens, self.whole_tokens)

    def stretched(self, weight: float) -> StepLimits:
        """While no request has less than this weight: a newcomer waits about as long for a step as for itself."""
        num_tokens = int(min(STRETCH * weight, self.longest_tokens))
        if num_tokens <= self.num_tokens:
            return self
        return replace(self, num_tokens=num_tokens, whole_tokens=max(num_tokens, self.whole_tokens))

    @property
    def most_tokens(self) -> int:
        """Of any step: a token weighs at least 1."""
        longest = max(self.num_tokens, self.whole_tokens, self.longest_tokens)
        return longest if self.max_tokens is None else min(longest, self.max_tokens)

    def weight(self, num_tokens: int, num_pairs: float) -> float:
        return num_tokens + num_pairs / self.pairs_per_token

    def block_tokens_within(self, weight: float, tokens_before: int) -> int:
        """Most tokens of KV blocks behind so many tokens of their prefix that have at most this weight."""
        if self.pairs_per_token == math.inf:
            return int(weight)
        alone = self.pairs_per_token + tokens_before  # n (n / 2 + alone) = weight x pairs_per_token
        return int(math.sqrt(alone**2 + 2 * weight * self.pairs_per_token) - alone)


class StepBudget:
    """The limits of steps now: what their time allows, and less after one that ran out of memory.

    After many steps that did not, steps may be as large as before. Without `costs` time has no bound.
    """

    def __init__(
        self, limits: StepLimits, costs: MeasuredCosts | None = None, backend: BackendInfo | None = None
    ) -> None:
        self.limits = limits
        self._most_tokens = self._in_memory = limits.num_tokens
        self._steps_until_growth = 0
        self._costs = costs
        self._backend = backend
        self._window_end = -math.inf
        self._smallest = [math.inf, math.inf]  # weights of requests that came in this window, and in the one before
        self.follow_costs()

    def count_arrival(self, weight: float, now: float) -> None:
        """A request of this weight has come."""
        self._age(now)
        self._smallest[0] = min(self._smallest[0], weight)

    def limits_at(self, now: float) -> StepLimits:
        """Of a step that is filled now: longer than `limits` say where no small request has come for a while."""
        self._age(now)
        return self.limits.stretched(min(self._smallest))

    def _age(self, now: float) -> None:
        if now < self._window_end:
            return
        is_next = now < self._window_end + RECENT_SECONDS
        self._smallest = [math.inf, self._smallest[0] if is_next else math.inf]
        self._window_end = now + RECENT_SECONDS

    def follow_costs(self) -> None:
        """Replace the limits if the cost model has changed much."""
        known, backend = self.limits, self._backend
        if self._costs is None or backend is None or backend.step_seconds is None:
            if known.num_tokens != self._in_memory:
                self.limits = replace(known, num_tokens=self._in_memory)
            return
        model, is_cpu = self._costs.model, backend.device_kind == "cpu"
        tokens, whole = (
            min(tokens_of_step(model, backend, times), self._in_memory)
            for times in (1.0, 1.0 if is_cpu else WHOLE_TIMES)
        )
        pairs, sizes = model.pairs_per_token, (tokens, whole, self._in_memory)
        longest = tokens if is_cpu else model.tokens_within(LONGEST_TIMES * backend.step_seconds, num_forwards=1)
        is_near = math.isclose(pairs, known.pairs_per_token, rel_tol=0.01)
        is_near = is_near and math.isclose(longest, known.longest_tokens, rel_tol=0.05)
        if is_near and sizes == (known.num_tokens, known.whole_tokens, known.max_tokens):
            return
        self.limits = replace(
            known,
            num_tokens=tokens,
            whole_tokens=whole,
            longest_tokens=longest,
            max_tokens=self._in_memory,
            pairs_per_token=pairs,
        )

    def shrink(self, num_tokens: int) -> bool:
        """A step of so many tokens ran out of memory. False if steps cannot be made smaller for it."""
        fewer = max(LEAST_TOKENS_IN_MEMORY, num_tokens // 2)
        if num_tokens <= LEAST_TOKENS_IN_MEMORY or fewer >= self.limits.most_tokens:
            return False
        self._in_memory = fewer
        self._steps_until_growth = STEPS_UNTIL_GROWTH
        self.follow_costs()
        return True

    def count_step(self) -> None:
        """A step has ended well."""
        if self._in_memory == self._most_tokens:
            return
        self._steps_until_growth -= 1
        if not self._steps_until_growth:
            self._in_memory = min(self._most_tokens, 2 * self._in_memory)
            self._steps_until_growth = STEPS_UNTIL_GROWTH
            self.follow_costs()
