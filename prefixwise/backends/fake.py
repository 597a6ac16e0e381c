"""A backend whose arithmetic you can do by hand, for tests of everything around it.

After the context c_0, c_1, ..., c_{n-1} the logit of token v is

    (v * (1 * c_0 + 2 * c_1 + ... + n * c_{n-1}) mod 97) / 10

so it depends on every token of the context and on their order, and on nothing else. The hidden state has eight numbers,
which are the logits of tokens 1 to 8. The embedding of token c is (c, 0, 0, ...), so a token with another vector counts
as the vector's first number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from time import sleep
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from prefixwise.contract.ragged import Int32Array, Int64Array
from prefixwise.forward.backend import DEFAULT_TOKEN_BUDGETS, Backend, BackendInfo
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, ForwardOutput, KVBlock, Prefix, RunningForward
from prefixwise.models.config import ModelConfig, RopeConfig

_MODULUS = 97
_MAX_FORWARDS = 1000  # recorded in `forwards`


@dataclass(frozen=True, eq=False)
class FakeBlock(KVBlock):
    """A KV block that holds its tokens."""

    token_ids: Int32Array


def fake_logits(context: Int32Array, token_ids: Int32Array) -> NDArray[np.float32]:
    """The logits of `token_ids` after `context`."""
    weighted = int((np.arange(1, len(context) + 1) * context.astype(np.int64)).sum())
    return ((token_ids.astype(np.int64) * weighted) % _MODULUS / 10).astype(np.float32)


class FakeBackend(Backend):
    """Scores at once, or after a given time, and records its forwards."""

    def __init__(
        self,
        vocab_size: int = 512,
        max_context_len: int = 4096,
        *,
        bit_equal: bool = True,
        num_kv_blocks: int = 1024,
        step_tokens: int = 2048,
        step_seconds: float | None = None,
        least_step_tokens: int = 1,
        max_whole_item: int = 1 << 20,
        reads_short_blocks: bool = False,
        max_kv_blocks_read: int | None = None,
        joins_prefill: bool = False,
        async_scheduling: bool = False,
        seconds_per_forward: float = 0.0,
        seconds_per_token: float = 0.0,
    ) -> None:
        self.config = ModelConfig(
            family="fake",
            vocab_size=vocab_size,
            model_size=8,
            mlp_size=16,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=8,
            norm_eps=1e-6,
            rope=RopeConfig(10_000.0),
            qkv_bias=False,
            qk_norm=False,
            tied_head=True,
            max_context_len=max_context_len,
        )
        kind: Literal["cpu", "gpu"] = "cpu" if bit_equal else "gpu"
        self.info = BackendInfo(
            "fake",
            "cpu",
            kind,
            "float32",
            bit_equal,
            token_multiple=1,
            token_budget=DEFAULT_TOKEN_BUDGETS[kind],
            num_kv_blocks=num_kv_blocks,
            kv_block_bytes=4 * KV_BLOCK_SIZE,
            max_kv_blocks_read=max_kv_blocks_read,
            step_tokens=step_tokens,
            step_seconds=step_seconds,
            least_step_tokens=least_step_tokens,
            max_whole_item=max_whole_item,
            reads_short_blocks=reads_short_blocks,
            joins_prefill=joins_prefill,
            async_scheduling=async_scheduling,
        )
        self.seconds_per_forward = seconds_per_forward
        self.seconds_per_token = seconds_per_token
        self.forwards: list[ForwardBatch] = []  # at least the newest _MAX_FORWARDS

    def start(self, batch: ForwardBatch) -> RunningForward:
        if len(self.forwards) >= 2 * _MAX_FORWARDS:
            del self.forwards[:_MAX_FORWARDS]
        self.forwards.append(batch)
        batch = _overridden(batch)
        num_listed = sum(len(prefix.blocks) for prefix in batch.prefixes) + len(batch.cache_segments)
        limit = self.info.max_kv_blocks_read
        assert limit is None or num_listed <= limit, f"a forward lists {num_listed} KV blocks, and may list {limit}"
        for prefix in batch.prefixes if not self.info.reads_short_blocks else ():
            full = prefix.blocks if prefix.segment is not None else prefix.blocks[:-1]
            assert all(block.num_tokens == KV_BLOCK_SIZE for block in full), "a short block in the middle of a prefix"
        blocks = tuple(self._cache(batch, segment) for segment in batch.cache_segments)
        return RunningForward(blocks, lambda: self._finish(batch, blocks))

    def _finish(self, batch: ForwardBatch, blocks: tuple[KVBlock, ...]) -> ForwardOutput:
        if self.seconds_per_forward or self.seconds_per_token:
            sleep(self.seconds_per_forward + self.seconds_per_token * batch.num_tokens)
        weights = self._context_weights(batch) % _MODULUS
        logits = (batch.label_ids * weights[:, None] % _MODULUS / 10).astype(np.float32)
        lse = self._logsumexp[weights] if batch.need_logsumexp or batch.top_k else None
        hidden = None
        if batch.need_hidden:
            hidden = (np.outer(weights, np.arange(1, self.config.model_size + 1)) % _MODULUS / 10).astype(np.float32)
        if not batch.top_k:
            return ForwardOutput(logits, lse, blocks, hidden)
        top_ids = self._best_tokens[weights, : batch.top_k]
        top_logits = self._vocabulary_logits[weights[:, None], top_ids]
        return ForwardOutput(logits, lse, blocks, hidden, top_logits, top_ids)

    @cached_property
    def _vocabulary_logits(self) -> NDArray[np.float32]:
        """[97, V]: by the weight of the context modulo 97, on which all logits depend."""
        logits = np.outer(np.arange(_MODULUS), np.arange(self.config.num_head_rows)) % _MODULUS / 10
        return logits.astype(np.float32)

    @cached_property
    def _best_tokens(self) -> NDArray[np.int32]:
        """[97, V]: those with the largest logits first."""
        return np.argsort(-self._vocabulary_logits, axis=1, kind="stable").astype(np.int32)

    @cached_property
    def _logsumexp(self) -> NDArray[np.float32]:
        """[97]: by the weight of the context modulo 97."""
        sums: NDArray[np.float64] = np.exp(self._vocabulary_logits.astype(np.float64)).sum(1)
        return np.log(sums).astype(np.float32)

    @staticmethod
    def _cache(batch: ForwardBatch, segment: int) -> FakeBlock:
        ids = batch.token_ids[batch.segment_starts[segment] : batch.segment_starts[segment + 1]].copy()
        assert len(ids) <= KV_BLOCK_SIZE, "a cached segment is one KV block"
        return FakeBlock(len(ids), ids)

    def _context_weights(self, batch: ForwardBatch) -> Int64Array:
        """[R]: 1 c_0 + 2 c_1 + ... over the context of each scored token, itself last."""
        tokens = batch.score_tokens
        segments = np.searchsorted(batch.segment_starts, tokens, side="right") - 1
        sums = _sums(batch.token_ids, batch.positions.astype(np.int64) + 1)
        self_weights = sums[tokens + 1] - sums[batch.segment_starts[segments]]
        return self_weights + self._prefix_weights(batch)[segments]

    def _prefix_weights(self, batch: ForwardBatch) -> Int64Array:
        """[segments]: the part of the weight that comes from a segment's prefix."""
        weights = np.zeros(len(batch.prefix_lens), np.int64)
        for number, prefix in enumerate(batch.prefixes):
            readers = np.flatnonzero((batch.prefix_index == number) & (batch.prefix_lens > 0))
            if len(readers):
                ids = _prefix_ids(batch, prefix)
                weights[readers] = _sums(ids, np.arange(1, len(ids) + 1))[batch.prefix_lens[readers]]
        return weights


def _overridden(batch: ForwardBatch) -> ForwardBatch:
    """The batch with the tokens that its embedding overrides stand for."""
    overrides = batch.embed_overrides
    if overrides is None:
        return batch
    token_ids = batch.token_ids.copy()
    token_ids[overrides.tokens] = overrides.vectors[:, 0].round().astype(np.int32)
    return replace(batch, token_ids=token_ids, embed_overrides=None)


def _sums(ids: Int32Array, factors: Int64Array) -> Int64Array:
    """[n + 1]: the weighted sum of the first 0, 1, ..., n ids."""
    sums = np.zeros(len(ids) + 1, np.int64)
    np.cumsum(ids * factors, out=sums[1:])
    return sums


def _prefix_ids(batch: ForwardBatch, prefix: Prefix) -> Int32Array:
    """The cached tokens of a prefix, and the tokens of the batch that follow."""
    pieces = [np.zeros(0, np.int32)]
    for block in prefix.blocks:
        assert isinstance(block, FakeBlock), "a block of another backend"
        pieces.append(block.token_ids)
    if prefix.segment is not None:
        pieces.append(batch.token_ids[batch.segment_starts[prefix.segment] :])
    return np.concatenate(pieces)
