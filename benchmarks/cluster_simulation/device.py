"""How long a device takes for a step, and how much it keeps.

Fitted to three figures of PyTorch on an H200 with Qwen3-0.6B's shape, bfloat16, all of the engine with one request at a
time. The first two are of `benchmarks.contract` (benchmarks/results/2026-11-19-h200-goals-torch.json, `contract`), each
the slower of its two runs; the third is of `benchmarks.profile` (docs/performance.md):

    2000 + 500 x 20, cold prefix    29.93 ms = fixed + 2000 prefix + 10,000 item
    the same, prefix cached         26.18 ms = fixed + 10,000 item
    300 + 10 x 20, cold prefix       3.9 ms = fixed + 300 prefix + 200 item

The fit was not given the rate of many cold requests through HTTP, and predicts it: 17,144 items/s in full steps, where
17,185 and 17,420 were measured (`http8`). For 300 + 10 x 20 it is pessimistic: 896 requests/s, measured 1,000.
The engine bounds steps in time, too, so that they are shorter than `step_tokens`; here a full step has all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixwise.forward.batch import KV_BLOCK_SIZE


@dataclass(frozen=True)
class Device:
    """One replica's."""

    step_tokens: int = 16_384
    fixed_seconds: float = 2.9e-3  # of every step
    prefix_token_seconds: float = 1.87e-6
    item_token_seconds: float = 2.33e-6
    cache_tokens: int = 262_144  # that are kept: 28 GiB of this model's

    def seconds(self, prefix_tokens: int, item_tokens: int) -> float:
        """Of one step."""
        return self.fixed_seconds + prefix_tokens * self.prefix_token_seconds + item_tokens * self.item_token_seconds

    @property
    def cache_blocks(self) -> int:
        return self.cache_tokens // KV_BLOCK_SIZE
