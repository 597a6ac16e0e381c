"""Which shard of the `tensor` axis holds which heads, for any number of heads and any number of shards.

Devices of one program hold arrays of one shape, so every shard has `Kl` KV slots, each with the `Gl` query heads that
read it. A KV head whose query heads do not fit on one shard is held by several, and what is left over is heads of
zeros, which add nothing to the output:

    12 query heads, 2 KV heads, 4 shards     Kl = 1, Gl = 3, nothing padded, each KV head twice
        [q0 q1 q2 | kv0]  [q3 q4 q5 | kv0]  [q6 q7 q8 | kv1]  [q9 q10 q11 | kv1]

    9 query heads, 3 KV heads, 2 shards      Kl = 2, Gl = 3, the last slot is zeros
        [q0 q1 q2 | kv0, q3 q4 q5 | kv1]  [q6 q7 q8 | kv2, - - - | -]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixwise.contract.ragged import Int64Array


@dataclass(frozen=True, eq=False)
class HeadPlacement:
    """The heads of every shard, in the order in which the shard holds them. Two plans are equal if they are one."""

    q_heads: Int64Array  # [tp, Kl, Gl] original query head, -1 for a head of zeros
    kv_heads: Int64Array  # [tp, Kl] original KV head, -1 for zeros

    @property
    def tp_size(self) -> int:
        return len(self.q_heads)

    @property
    def kv_heads_per_shard(self) -> int:
        """`Kl`."""
        return int(self.q_heads.shape[1])

    @property
    def heads_per_kv(self) -> int:
        """`Gl`."""
        return int(self.q_heads.shape[2])

    @classmethod
    def plan(cls, num_heads: int, num_kv_heads: int, tp_size: int) -> HeadPlacement:
        """The placement with the fewest rows of projections per shard, `Kl` x (Q and O of `Gl` heads, K, V)."""
        heads_per_kv = num_heads // num_kv_heads

        def slots_per_shard(width: int) -> int:
            return _ceil_div(num_kv_heads * _ceil_div(heads_per_kv, width), tp_size)

        # Of equals the wider: fewer copies of KV heads.
        width = min(range(heads_per_kv, 0, -1), key=lambda width: slots_per_shard(width) * (2 * width + 2))
        q_units, kv_units = _cut(num_kv_heads, heads_per_kv, width)
        num_slots = slots_per_shard(width)
        num_empty = tp_size * num_slots - len(kv_units)
        q_heads = np.pad(q_units, ((0, num_empty), (0, 0)), constant_values=-1)
        kv_heads = np.pad(kv_units, (0, num_empty), constant_values=-1)
        return cls(q_heads.reshape(tp_size, num_slots, width), kv_heads.reshape(tp_size, num_slots))


def _cut(num_kv_heads: int, heads_per_kv: int, width: int) -> tuple[Int64Array, Int64Array]:
    """Query heads [units, width] and KV head [units] of each unit: a KV head with up to `width` of its readers."""
    units_per_kv = _ceil_div(heads_per_kv, width)
    q_heads = np.arange(num_kv_heads * heads_per_kv).reshape(num_kv_heads, heads_per_kv)
    padded = np.pad(q_heads, ((0, 0), (0, units_per_kv * width - heads_per_kv)), constant_values=-1)
    return padded.reshape(-1, width), np.repeat(np.arange(num_kv_heads), units_per_kv)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
