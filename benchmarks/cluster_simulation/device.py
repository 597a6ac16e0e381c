"""How long a device takes for a step, and how much it keeps.

Fitted to three figures of PyTorch on an H200 with Qwen3-0.6B's shape, all of the engine with one request at a time
(benchmarks/results/2026-11-15-h200-goals-torch.json):

    2000 + 500 x 20, new prefix    33.0 ms = fixed + 2000 prefix + 10,000 item
    the same, prefix cached          28.4 ms = fixed + 10,000 item
    300 + 10 x 20, new prefix       4.0 ms = fixed + 300 prefix + 200 item
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixwise.forward.batch import KV_BLOCK_SIZE


@dataclass(frozen=True)
class Device:
    """One replica's."""

    step_tokens: int = 16_384
    fixed_seconds: float = 2.8e-3  # of every step
    prefix_token_seconds: float = 2.3e-6
    item_token_seconds: float = 2.56e-6
    cache_tokens: int = 262_144  # that are kept: 28 GiB of this model's

    def seconds(self, prefix_tokens: int, item_tokens: int) -> float:
        """Of one step."""
        return self.fixed_seconds + prefix_tokens * self.prefix_token_seconds + item_tokens * self.item_token_seconds

    @property
    def cache_blocks(self) -> int:
        return self.cache_tokens // KV_BLOCK_SIZE
