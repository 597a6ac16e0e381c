"""A backend whose arithmetic you can do by hand, for tests of everything around it.

After the context c_0, c_1, ..., c_{n-1} the logit of token v is

    (v * (1 * c_0 + 2 * c_1 + ... + n * c_{n-1}) mod 97) / 10

so it depends on every token of the context, on their order and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from itemwise.backends.base import DEFAULT_TOKEN_BUDGETS, Backend, BackendInfo, ForwardBatch, ForwardOutput, PrefixState
from itemwise.contract.ragged import Int32Array
from itemwise.models.config import ModelConfig, RopeConfig

_MODULUS = 97


@dataclass(frozen=True)
class FakePrefix(PrefixState):
    """A prefix that remembers its tokens."""

    token_ids: Int32Array

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes


def fake_logits(context: Int32Array, token_ids: Int32Array) -> NDArray[np.float32]:
    """The logits of `token_ids` after `context`."""
    weighted = int((np.arange(1, len(context) + 1) * context.astype(np.int64)).sum())
    return ((token_ids.astype(np.int64) * weighted) % _MODULUS / 10).astype(np.float32)


class FakeBackend(Backend):
    """Scores at once and counts its forwards."""

    def __init__(self, vocab_size: int = 512, max_context_len: int = 4096, *, bit_equal: bool = True) -> None:
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
            "fake", "cpu", kind, "float32", bit_equal, token_multiple=1, token_budget=DEFAULT_TOKEN_BUDGETS[kind]
        )
        self.forwards: list[ForwardBatch] = []

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        self.forwards.append(batch)
        vocabulary = np.arange(self.config.vocab_size, dtype=np.int32)
        contexts = [self._context(batch, int(token)) for token in batch.score_tokens]
        rows = [fake_logits(context, ids) for context, ids in zip(contexts, batch.label_ids, strict=True)]
        logits = np.stack(rows) if rows else np.zeros(batch.label_ids.shape, np.float32)
        normalizers = None
        if batch.need_normalizers:
            every = (fake_logits(context, vocabulary).astype(np.float64) for context in contexts)
            normalizers = np.array([np.log(np.exp(row).sum()) for row in every], np.float32)
        kept = tuple(self._segment(batch, segment) for segment in batch.keep_segments)
        return ForwardOutput(logits, normalizers, tuple(FakePrefix(len(ids), ids) for ids in kept))

    @staticmethod
    def _segment(batch: ForwardBatch, segment: int) -> Int32Array:
        return batch.token_ids[batch.segment_starts[segment] : batch.segment_starts[segment + 1]]

    def _context(self, batch: ForwardBatch, token: int) -> Int32Array:
        """The tokens that `token` sees, itself last."""
        segment = int(np.searchsorted(batch.segment_starts, token, side="right")) - 1
        own = batch.token_ids[batch.segment_starts[segment] : token + 1]
        index = int(batch.prefix_index[segment])
        if index < 0:
            return own
        source = batch.prefixes[index]
        ids = self._segment(batch, source) if isinstance(source, int) else self._cached_ids(source)
        return np.concatenate([ids[: batch.prefix_lens[segment]], own])

    @staticmethod
    def _cached_ids(prefix: PrefixState) -> Int32Array:
        assert isinstance(prefix, FakePrefix), "a prefix of another backend"
        return prefix.token_ids
