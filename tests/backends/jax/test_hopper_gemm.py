"""The MLP's first GEMM as a kernel, against XLA's GEMM and activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.jax import gated_gemm, hopper_gemm
from prefixwise.backends.jax.assembly import _transformer
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.backends.jax.devices import DeviceChoice
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.linear import activate, linear
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.programs import COMPILER_OPTIONS
from prefixwise.backends.jax.row_tiles import RowTiles
from prefixwise.forward.backend import BackendOptions
from prefixwise.models.config import Activation, ExpertsConfig
from tests.backends.jax.attention.interpreter import has_races, interpret_quickly, interpreter_parameters
from tests.backends.jax.quick_compiler import QUICKLY

ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
DTYPES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    return test == "test_interpreted" and (parameters["activation"], parameters["dtype"]) == ("gelu_tanh", jnp.float16)


def is_hopper() -> bool:
    return DeviceChoice.resolve("gpu").kernel_platform == "hopper"


NEEDS_HOPPER = pytest.mark.skipif("not is_hopper()", reason="the GPU is not of compute capability 9")


@pytest.fixture(scope="module", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_quickly(patch)
        yield


def draw(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32) / shape[-1] ** 0.25
    return jnp.asarray(numbers).astype(dtype)


def plain(x: jax.Array, weights: jax.Array, layer: jax.Array, activation: Activation) -> jax.Array:
    gate, up = jnp.split(linear(x, weights[layer]), 2, axis=-1)
    return activate(gate, activation) * up


def one_rounding_apart(found: Any, expected: Any, dtype: Any) -> bool:
    """The interpreter's functions are another library's, and its sums have another order."""
    found, expected = (np.asarray(each, np.float32) for each in (found, expected))
    return bool((np.abs(found - expected) <= 4 * float(jnp.finfo(dtype).eps) * (np.abs(expected) + 0.1)).all())


@ACTIVATIONS
@DTYPES
def test_interpreted(monkeypatch: pytest.MonkeyPatch, activation: Activation, dtype: Any) -> None:
    """A whole band of tiles and a part of one, more tiles than CTAs, and the second of three layers."""
    monkeypatch.setattr(hopper_gemm, "BAND_TILES", 2)
    x, weights = draw(384, 512, dtype=dtype), draw(3, 512, 512, dtype=dtype, seed=1)
    found = hopper_gemm.gated_gemm(x, weights, jnp.int32(1), activation, interpreter_parameters())
    assert not has_races()
    expected = jax.jit(plain, static_argnums=3, compiler_options=QUICKLY)(x, weights, jnp.int32(1), activation)
    assert found.dtype == dtype
    assert one_rounding_apart(found, expected, dtype)


@ACTIVATIONS
@DTYPES
def test_it_lowers(activation: Activation, dtype: Any) -> None:
    """With the layer's number as data, in a loop."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((256, 1024), (28, 6144, 1024))]

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        def body(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return hopper_gemm.gated_gemm(x, weights, layer, activation)[:, :1024], None

        return lax.scan(body, x, jnp.arange(28))[0]

    text = jax.jit(layers).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("changes", "options", "platform", "dtype", "expected"),
    [
        ({}, {}, "hopper", "bfloat16", True),
        ({"activation": "gelu_tanh"}, {}, "hopper", "float16", True),
        ({}, {"max_loras": 2}, "hopper", "bfloat16", False),
        ({}, {}, "gpu", "bfloat16", False),
        ({}, {}, "hopper", "float32", False),
        ({}, {"tp_size": 2}, "hopper", "bfloat16", False),
        ({}, {"quantization": "fp8"}, "hopper", "bfloat16", False),
        ({"experts": ExpertsConfig(4, 2, True)}, {}, "hopper", "bfloat16", False),
        ({"mlp_size": 3008}, {}, "hopper", "bfloat16", False),
        ({"model_size": 992}, {}, "hopper", "bfloat16", False),
        ({"model_size": 448}, {}, "hopper", "bfloat16", False),
    ],
)
def test_which_models_have_it(
    monkeypatch: pytest.MonkeyPatch, changes: Any, options: Any, platform: str, dtype: str, expected: bool
) -> None:
    monkeypatch.setattr(gated_gemm, "_probe", lambda *_: True)
    monkeypatch.setattr(DeviceChoice, "kernel_platform", platform)
    arguments = replace(QWEN3_06B, **changes), BackendOptions("jax", **options), DeviceChoice.resolve("cpu")
    device = jax.devices()[0]
    assert gated_gemm.has_gated_gemm(*arguments, jnp.dtype(dtype), device, ExecutableStore()) is expected


def test_where_it_does_not_work_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a CPU."""
    monkeypatch.setattr(DeviceChoice, "kernel_platform", "hopper")
    arguments = QWEN3_06B, BackendOptions("jax"), DeviceChoice.resolve("cpu"), jnp.dtype("bfloat16")
    assert not gated_gemm.has_gated_gemm(*arguments, jax.devices()[0], ExecutableStore())
    assert "a faster GEMM for the MLP does not work here" in caplog.text


@pytest.mark.parametrize(("token_rows", "expected"), [(None, True), (2048, False)])
def test_tiles_of_rows_keep_the_gemm_of_xla(token_rows: int | None, expected: bool) -> None:
    choice, placement = DeviceChoice.resolve("cpu"), HeadPlacement.plan(16, 8, 1)
    rows = RowTiles(token_rows, score_rows=256)
    transformer = _transformer(QWEN3_06B, choice, jnp.dtype("bfloat16"), placement, rows, XlaAttention(), True)
    assert transformer.fuses_gate is expected


@pytest.mark.gpu
@NEEDS_HOPPER
class TestOnAGpu:
    def run(self, function: Any, x: jax.Array, weights: jax.Array, layer: int, activation: Activation) -> np.ndarray:
        program = jax.jit(partial(function, activation=activation), compiler_options=COMPILER_OPTIONS["gpu"])
        bits = lax.bitcast_convert_type(program(x, weights, layer=jnp.int32(layer)), jnp.uint16)
        return np.asarray(bits)

    @pytest.mark.parametrize("num_columns", [1024, 3072])
    def test_the_bits_are_those_of_xla_at_every_number_of_rows(self, num_columns: int) -> None:
        """2,176 rows are a band of tiles and a part of one."""
        x, weights = draw(4096, 1024), draw(2, 2 * num_columns, 1024, seed=1)
        expected = self.run(plain, x, weights, 1, "silu")
        for num_rows in (128, 256, 1024, 2048, 2176, 4096):
            assert np.array_equal(
                self.run(hopper_gemm.gated_gemm, x[:num_rows], weights, 1, "silu"), expected[:num_rows]
            )

    @ACTIVATIONS
    def test_every_gate(self, activation: Activation) -> None:
        """All numbers of bfloat16: SiLU has XLA's bits, GELU is near, since XLA adds 1 to a tanh of about -1."""
        gates = lax.bitcast_convert_type(jnp.arange(1 << 16, dtype=jnp.uint16), jnp.bfloat16)
        gates = jnp.where(jnp.isfinite(gates), gates, 0)
        x = jnp.zeros((1 << 16, 512), jnp.bfloat16).at[:, 0].set(gates).at[:, 1].set(1)
        weights = jnp.zeros((1, 256, 512), jnp.bfloat16).at[0, :128, 0].set(1).at[0, 128:, 1].set(1)
        found, expected = (self.run(each, x, weights, 0, activation) for each in (hopper_gemm.gated_gemm, plain))
        if activation == "silu":
            assert np.array_equal(found, expected)
            return
        found, expected = (each.view(jnp.bfloat16) for each in (found, expected))
        assert one_rounding_apart(found, expected, jnp.bfloat16)
