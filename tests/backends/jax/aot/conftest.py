from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.jax.aot.environment import missing_packages, prepare_compiler
from prefixwise.backends.jax.aot.recorder import RecordingBackend
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import ModelConfig

# Heads that no number of chips divides, with norms of heads, in three layers: a loop and the last.
SMALL = replace(
    QWEN3_06B, vocab_size=1000, model_size=256, mlp_size=384, num_layers=3, num_heads=9, num_kv_heads=3, head_size=64
)
POOL_BYTES = 1 << 20

Describe = Callable[..., RecordingBackend]


@pytest.fixture
def describe(restored_environment: None) -> Describe:
    """A model on a slice of TPUs that is not there."""
    if missing_packages():
        pytest.skip("libtpu, the compiler for TPUs, is not installed")

    def make(
        topology: str,
        config: ModelConfig = SMALL,
        *,
        attention: AttentionImplementation | None = None,
        prefix_cache_bytes: int | None = POOL_BYTES,
    ) -> RecordingBackend:
        prepare_compiler()
        from prefixwise.backends.jax.aot.topology import describe_slice

        found = describe_slice(topology)
        options = BackendOptions(tp_size=found.num_chips, prefix_cache_bytes=prefix_cache_bytes)
        return RecordingBackend(config, options, found, attention)

    return make
