"""An implementation is tried before it is used, and one that does not work is passed over."""

from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from prefixwise.backends.jax.attention.api import choose_working
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.hopper import HopperAttention
from prefixwise.backends.jax.attention.pallas_gpu import PallasGpuAttention
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.attention.probe import try_attention
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.forward.tiles import DeviceTiles, TileSizes
from tests.backends.jax.attention.interpreter import interpreter_parameters
from tests.backends.jax.quick_compiler import QUICKLY

BFLOAT16 = jnp.dtype(jnp.bfloat16)
HEADS = (2, 2, 64)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(XlaAttention(), id="xla"),
        pytest.param(PallasGpuAttention(interpret=True), id="pallas_gpu"),
        pytest.param(PallasTpuAttention(interpret=True), id="pallas_tpu"),
        pytest.param(HopperAttention(interpret=interpreter_parameters()), id="hopper", marks=pytest.mark.slow),
    ],
)
def test_those_that_work_pass(implementation: AttentionImplementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICKLY))
    try_attention(implementation, HEADS, BFLOAT16)


class ZeroAttention(AttentionImplementation):
    """Wrong: it sees nothing."""

    name = "zero"
    needs_padding_tiles = False

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(32, 64, 64)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles) -> jax.Array:
        return jnp.zeros_like(heads.q)


def test_one_that_computes_something_else_does_not() -> None:
    with pytest.raises(ArithmeticError, match="attention over equal values of 1 gave 0"):
        try_attention(ZeroAttention(), HEADS, BFLOAT16)


class TestChoice:
    def choose(self, *broken: str, platform: str = "hopper") -> str:
        def probe_attention(candidate: AttentionImplementation) -> None:
            if candidate.name in broken:
                raise RuntimeError("no such instruction\nand many lines more")

        return choose_working(platform=platform, dtype=BFLOAT16, head_size=128, probe_attention=probe_attention).name

    def test_the_best_that_works(self) -> None:
        assert self.choose() == "hopper"

    def test_one_that_fails_is_passed_over_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "prefixwise"):
            assert self.choose("hopper") == "pallas_gpu"
        assert "attention 'hopper' does not work here, 'pallas_gpu' is used: no such instruction" in caplog.text
        assert "many lines" not in caplog.text

    def test_those_that_are_not_young_are_not_tried(self) -> None:
        assert self.choose("hopper", "pallas_gpu") == "pallas_gpu"

    def test_on_a_tpu_the_kernel_is_tried_too(self) -> None:
        assert self.choose(platform="tpu") == "pallas_tpu"
        assert self.choose("pallas_tpu", platform="tpu") == "xla"

    def test_on_a_cpu_nothing_is_tried(self) -> None:
        def fail(candidate: AttentionImplementation) -> None:
            raise AssertionError(candidate.name)

        assert choose_working(platform="cpu", dtype=BFLOAT16, head_size=128, probe_attention=fail).name == "xla"
