from __future__ import annotations

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise.backends.jax.attention import api
from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.hopper import HopperAttention
from prefixwise.backends.jax.attention.pallas_gpu import PallasGpuAttention
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.contract.errors import BackendError
from prefixwise.forward.tiles import DeviceTiles, TileSizes, cut_tiles
from tests.attention_cases import AttentionCase, expected_output, make_batch, make_inputs
from tests.backends.jax.attention.interpreter import interpreter_parameters
from tests.backends.jax.attention.run_case import Capacity, fill_up, with_nan
from tests.backends.jax.quick_compiler import QUICKLY

FLOAT32, BFLOAT16, FLOAT16 = (jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))
PROBE_HEADS = (2, 1, 64)


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
            ("tpu", BFLOAT16, 128, "pallas_tpu"),
            ("tpu", BFLOAT16, 64, "pallas_tpu"),
            ("tpu", FLOAT32, 256, "pallas_tpu"),
            ("tpu", BFLOAT16, 80, "xla"),
            ("tpu", FLOAT16, 128, "xla"),
        ],
    )
    def test_the_best_that_runs(self, platform: str, dtype: jnp.dtype, head_size: int, expected: str) -> None:
        assert api.choose_implementation(platform=platform, dtype=dtype, head_size=head_size).name == expected

    @pytest.mark.parametrize("name", api.IMPLEMENTATIONS)
    def test_one_that_is_named(self, name: str) -> None:
        platform = "tpu" if name == "pallas_tpu" else "hopper"
        assert api.choose_implementation(name, platform=platform, dtype=BFLOAT16, head_size=128).name == name

    @pytest.mark.parametrize(
        ("name", "platform", "dtype", "head_size", "reason"),
        [
            (
                "pallas_gpu",
                "cpu",
                BFLOAT16,
                128,
                "it needs an NVIDIA GPU of compute capability 8.0 or later, and this is: cpu",
            ),
            ("pallas_gpu", "gpu", FLOAT32, 128, "it computes in bfloat16 or float16, and this is float32"),
            ("pallas_gpu", "gpu", BFLOAT16, 320, "it takes head sizes from 16 to 256, and this is 320"),
            ("pallas_tpu", "cpu", BFLOAT16, 128, "it needs a TPU, and this is: cpu"),
            ("pallas_tpu", "tpu", FLOAT16, 128, "it computes in bfloat16 or float32, and this is float16"),
            ("pallas_tpu", "tpu", BFLOAT16, 80, "it takes head sizes of 32, 64, 96, 128 and 256, and this is 80"),
            ("hopper", "cpu", BFLOAT16, 128, "it needs an NVIDIA GPU of compute capability 9, and this is: cpu"),
            ("hopper", "gpu", BFLOAT16, 128, "it needs an NVIDIA GPU of compute capability 9, and this is: gpu"),
            ("hopper", "hopper", FLOAT32, 128, "it computes in bfloat16 or float16, and this is float32"),
            ("hopper", "hopper", BFLOAT16, 256, "it takes head sizes of 64 and 128, and this is 256"),
            ("hopper", "hopper", FLOAT16, 96, "it takes head sizes of 64 and 128, and this is 96"),
        ],
    )
    def test_one_that_is_named_and_cannot_run_says_why(
        self, name: str, platform: str, dtype: jnp.dtype, head_size: int, reason: str
    ) -> None:
        with pytest.raises(BackendError, match=f"attention '{name}' cannot run here: {reason}$"):
            api.choose_implementation(name, platform=platform, dtype=dtype, head_size=head_size)

    def test_without_absl_the_one_for_hopper_says_what_to_install_and_the_next_best_serves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("prefixwise.backends.jax.attention.hopper.find_spec", lambda _: None)
        choose = partial(api.choose_implementation, platform="hopper", dtype=BFLOAT16, head_size=128)
        with pytest.raises(BackendError, match=r"absl-py, which is not installed \(pip install absl-py\)"):
            choose("hopper")
        assert choose().name == "pallas_gpu"

    def test_a_name_that_nobody_has(self) -> None:
        known = ", ".join(api.IMPLEMENTATIONS)
        with pytest.raises(BackendError, match=f"unknown attention 'flash'; expected one of {known}"):
            api.choose_implementation("flash", platform="cpu", dtype=FLOAT32, head_size=64)


class TestChoiceForRows:
    @pytest.mark.parametrize(
        ("name", "dtype", "head_size", "expected"),
        [
            ("hopper", BFLOAT16, 128, "pallas_gpu"),
            ("hopper", FLOAT16, 64, "pallas_gpu"),
            ("pallas_gpu", BFLOAT16, 128, "pallas_gpu"),
            ("xla", BFLOAT16, 128, "xla"),
            ("reference", FLOAT32, 128, "reference"),
        ],
    )
    def test_one_that_reads_pages_only_leaves_them_to_the_best_that_reads_batches(
        self, name: str, dtype: jnp.dtype, head_size: int, expected: str
    ) -> None:
        chosen = api.choose_implementation(name, platform="hopper", dtype=dtype, head_size=head_size)
        found = api.choose_for_batch_prefixes(chosen, platform="hopper", dtype=dtype, head_size=head_size)
        assert found.name == expected
        assert found.reads_batches

    def test_one_that_reads_batches_serves_itself(self) -> None:
        chosen = api.choose_implementation("xla", platform="cpu", dtype=FLOAT32, head_size=64)
        assert api.choose_for_batch_prefixes(chosen, platform="cpu", dtype=FLOAT32, head_size=64) is chosen

    def test_where_no_kernel_runs_xla_reads_the_batches(self) -> None:
        """As beside an interpreted kernel on a CPU."""
        chosen = HopperAttention(interpret=interpreter_parameters())
        assert chosen.why_not("cpu", BFLOAT16, 128) is None
        assert api.choose_for_batch_prefixes(chosen, platform="cpu", dtype=BFLOAT16, head_size=128).name == "xla"


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
        kv_cache = Source(jnp.zeros((256, 1, 8), dtype), jnp.zeros((256, 1, 8), dtype), jnp.int32(0))
        with jax.default_device(jax.devices("cpu")[0]):
            for attend in (
                partial(api.packed_attention, Heads.of(q, k, k)),
                partial(api.extend_attention, Heads.of(q, k, k), kv_cache),
            ):
                found = jax.eval_shape(partial(attend, implementation=implementation), tiles)
                assert (found.shape, found.dtype) == (q.shape, dtype)


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(XlaAttention(), id="xla"),
        pytest.param(PallasGpuAttention(interpret=True), id="pallas_gpu"),
        pytest.param(PallasTpuAttention(interpret=True), id="pallas_tpu"),
        pytest.param(HopperAttention(interpret=interpreter_parameters()), id="hopper", marks=pytest.mark.slow),
    ],
)
def test_working_implementations_pass(implementation: AttentionImplementation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICKLY))
    api.probe_attention(implementation, PROBE_HEADS, BFLOAT16)


class ZeroAttention(AttentionImplementation):
    """Wrong: it sees nothing."""

    name = "zero"
    needs_padding_tiles = False

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(32, 64, 64)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
        return jnp.zeros_like(heads.q)


def test_wrong_values_fail() -> None:
    with pytest.raises(ArithmeticError, match="attention over equal values of 1 gave 0"):
        api.probe_attention(ZeroAttention(), PROBE_HEADS, BFLOAT16)


class TestProbedChoice:
    def choose(self, *broken: str, platform: str = "hopper") -> str:
        def probe(candidate: AttentionImplementation) -> None:
            if candidate.name in broken:
                raise RuntimeError("no such instruction\nand many lines more")

        return api.choose_working(platform=platform, dtype=BFLOAT16, head_size=128, probe=probe).name

    def test_the_best_that_works(self) -> None:
        assert self.choose() == "hopper"

    def test_one_that_fails_is_passed_over_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, "prefixwise"):
            assert self.choose("hopper") == "pallas_gpu"
        assert "attention 'hopper' does not work here, 'pallas_gpu' is used: no such instruction" in caplog.text
        assert "many lines" not in caplog.text

    def test_only_experimental_ones_are_probed(self) -> None:
        assert self.choose("hopper", "pallas_gpu") == "pallas_gpu"

    def test_on_a_tpu_the_kernel_is_probed_too(self) -> None:
        assert self.choose(platform="tpu") == "pallas_tpu"
        assert self.choose("pallas_tpu", platform="tpu") == "xla"

    def test_on_a_cpu_nothing_is_probed(self) -> None:
        def fail(candidate: AttentionImplementation) -> None:
            raise AssertionError(candidate.name)

        assert api.choose_working(platform="cpu", dtype=BFLOAT16, head_size=128, probe=fail).name == "xla"
