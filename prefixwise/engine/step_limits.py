"""How much a step may hold: what the device computes in its time (`plan/cost_model.py`), and what fits its memory.

The measure is *weight*: the tokens without attention that take as long. A token's weight is

    1 + tokens that it attends to / pairs_per_token
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from prefixwise.forward.backend import BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.cost_model import MeasuredCosts, tokens_of_step

SHARES = 4  # while several requests are live, one gets at most 1/SHARES of a step
LEAST_TOKENS_IN_MEMORY = KV_BLOCK_SIZE  # a step that runs out of memory is halved down to this
STEPS_UNTIL_GROWTH = 1000  # that end well, before steps may be twice as large again


@dataclass(frozen=True)
class StepLimits:
    """How much a step may hold."""

    num_tokens: int  # their weight, and so their number
    max_prefill_tokens: int | None = None  # of one request; None: its share
    max_kv_blocks_read: int | None = None  # by one forward, a block counted once for every prefix that has it
    joins_prefill: bool = False  # join prefix blocks and items into one forward
    pairs_per_token: float = math.inf  # query-key pairs that weigh as much as a token
    least_share: int = 1  # tokens of a share, in any case
    wave_tokens: int = 1  # a step that is cut has a multiple of so many tokens

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

    @property
    def share(self) -> int:
        """What a request gets in one turn while several are live."""
        return max(self.least_share, self.num_tokens // SHARES)

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
        self.follow_costs()

    def follow_costs(self) -> None:
        """Replace the limits if the cost model has changed much."""
        num_tokens, pairs_per_token = self._most_tokens, math.inf
        if self._costs is not None and self._backend is not None and self._backend.step_seconds is not None:
            model = self._costs.model
            num_tokens, pairs_per_token = tokens_of_step(model, self._backend), model.pairs_per_token
        num_tokens, known = min(num_tokens, self._in_memory), self.limits
        if num_tokens != known.num_tokens or not math.isclose(pairs_per_token, known.pairs_per_token, rel_tol=0.01):
            self.limits = replace(known, num_tokens=num_tokens, pairs_per_token=pairs_per_token)

    def shrink(self, num_tokens: int) -> bool:
        """A step of so many tokens ran out of memory. False if steps cannot be made smaller for it."""
        fewer = max(LEAST_TOKENS_IN_MEMORY, num_tokens // 2)
        if num_tokens <= LEAST_TOKENS_IN_MEMORY or fewer >= self.limits.num_tokens:
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
