from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from itemwise.backends.jax.attention import api
from itemwise.backends.jax.attention.base import Heads, Source
from itemwise.backends.layout.tiles import TileSizes, cut_tiles
from itemwise.contract.errors import BackendError
from tests.attention_cases import AttentionCase, expected_output, make_batch, make_inputs
from tests.backends.jax.attention.run_case import Capacity, fill_up, with_nan

FLOAT32, BFLOAT16, FLOAT16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


class TestChoice:
    @pytest.mark.parametrize(
        ("platform", "dtype", "head_size", "expected"),
        [
            ("gpu", BFLOAT16, 128, "pallas_gpu"),
            ("gpu", FLOAT16, 96, "pallas_gpu"),
            ("hopper", BFLOAT16, 128, "hopper"),
            ("hopper", FLOAT16, 64, "hopper"),
            ("hopper", BFLOAT16, 256, "pallas_gpu"),
            ("hopper", FLOAT32, 128, "xla"),
            ("gpu", FLOAT32, 128, "xla"),
            ("gpu", BFLOAT16, 512, "xla"),
            ("cpu", FLOAT32, 64, "xla"),
            ("cpu", BFLOAT16, 64, "xla"),
            ("tpu", FLOAT32, 128, "xla"),
        ],
    )
    def test_the_best_that_runs(self, platform: str, dtype: jnp.dtype, head_size: int, expected: str) -> None:
        assert api.choose_implementation(platform=platform, dtype=dtype, head_size=head_size).name == expected

    @pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
    def test_one_that_is_named(self, name: str) -> None:
        assert api.choose_implementation(name, platform="hopper", dtype=BFLOAT16, head_size=128).name == name

    @pytest.mark.parametrize(
        ("platform", "dtype", "head_size", "reason"),
        [
            ("cpu", BFLOAT16, 128, "it needs an NVIDIA GPU of compute capability 8.0 or later, and this is: cpu"),
            ("gpu", FLOAT32, 128, "it computes in bfloat16 or float16, and this is float32"),
            ("gpu", BFLOAT16, 320, "it takes head sizes from 16 to 256, and this is 320"),
        ],
    )
    def test_one_that_is_named_and_cannot_run_says_why(
        self, platform: str, dtype: jnp.dtype, head_size: int, reason: str
    ) -> None:
        with pytest.raises(BackendError, match=f"attention 'pallas_gpu' cannot run here: {reason}"):
            api.choose_implementation("pallas_gpu", platform=platform, dtype=dtype, head_size=head_size)

    def test_a_name_that_nobody_has(self) -> None:
        known = ", ".join(api.IMPLEMENTATIONS)
        with pytest.raises(BackendError, match=f"unknown attention 'flash'; expected one of {known}"):
            api.choose_implementation("flash", platform="cpu", dtype=FLOAT32, head_size=64)


class TestFunctions:
    CASE = AttentionCase("tiny", (3, 9), num_heads=2, num_kv_heads=1, head_size=8)

    def test_a_name_serves_as_well_as_an_implementation(self) -> None:
        batch, inputs = make_batch(self.CASE), make_inputs(self.CASE)
        q, k, v = (jnp.asarray(with_nan(each, 20)) for each in (inputs.q, inputs.k, inputs.v))
        sizes = TileSizes(32, 128, 64)
        tiles = fill_up(cut_tiles(batch, sizes, []), sizes, Capacity(20, 1))
        found = api.packed_attention(Heads.of(q, k, v), tiles, "reference")[: batch.num_tokens]
        assert np.abs(found - expected_output(batch, inputs)).max() <= 1e-5

    @pytest.mark.parametrize("implementation", [None, "xla", "reference"])
    @pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
    def test_outputs_have_the_shape_and_dtype_of_the_queries(
        self, implementation: str | None, dtype: jnp.dtype
    ) -> None:
        sizes = TileSizes(32, 128, 64)
        tiles = fill_up(cut_tiles(make_batch(self.CASE), sizes, []), sizes, Capacity(20, 1))
        q, k = jnp.zeros((20, 2, 8), dtype), jnp.zeros((20, 1, 8), dtype)
        pool = Source(jnp.zeros((256, 1, 8), dtype), jnp.zeros((256, 1, 8), dtype), jnp.int32(0))
        with jax.default_device(jax.devices("cpu")[0]):
            for attend in (
                partial(api.packed_attention, Heads.of(q, k, k)),
                partial(api.extend_attention, Heads.of(q, k, k), pool),
            ):
                found = jax.eval_shape(partial(attend, implementation=implementation), tiles)
                assert (found.shape, found.dtype) == (q.shape, dtype)
