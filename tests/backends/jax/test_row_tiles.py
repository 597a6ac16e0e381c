from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.jax import invariant_rows
from prefixwise.backends.jax.backend import _exact_assembly
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.linear import layer_linear
from prefixwise.backends.jax.mesh import make_mesh
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.row_tiles import (
    ACCELERATOR_ROWS,
    COARSE_STEP,
    CPU_SMALLEST,
    CPU_STEP,
    CPU_TILE_ROWS,
    INVARIANT_ROWS,
    dense_columns,
    dense_columns_up_to,
)
from prefixwise.backends.jax.weights import LayerWeights, weight_shapes
from prefixwise.forward.backend import BackendOptions
from prefixwise.forward.buckets import token_buckets
from prefixwise.models.lora import Matrix


class TestTokenBuckets:
    @pytest.mark.parametrize(
        ("largest", "smallest", "step", "sizes"),
        [
            (32_768, CPU_SMALLEST, CPU_STEP, (512, 4096, 32_768)),
            (1024, CPU_SMALLEST, CPU_STEP, (512, 1024)),
            (100, CPU_SMALLEST, CPU_STEP, (512,)),
            (2048, 256, None, (256, 512, 768, 1024, 1280, 1536, 1792, 2048)),
            (4097, 2048, None, (2048, 4096, 6144)),
            (65_536, 256, COARSE_STEP, (256, 1024, 4096, 16_384, 65_536)),
            (70_000, 256, COARSE_STEP, (256, 1024, 4096, 16_384, 65_536, 70_144)),
        ],
    )
    def test_sizes_we_name(self, largest: int, smallest: int, step: int | None, sizes: tuple[int, ...]) -> None:
        assert token_buckets(largest, smallest=smallest, step=step) == sizes

    @given(
        largest=st.integers(1, 1 << 18),
        smallest=st.sampled_from([ACCELERATOR_ROWS, CPU_SMALLEST, INVARIANT_ROWS]),
        step=st.sampled_from([None, COARSE_STEP, CPU_STEP]),
    )
    def test_ascending_multiples_the_last_of_which_just_holds_the_largest(
        self, largest: int, smallest: int, step: int | None
    ) -> None:
        sizes = token_buckets(largest, smallest=smallest, step=step)
        assert all(size % smallest == 0 for size in sizes)
        assert all(first < second for first, second in pairwise(sizes))
        assert 0 <= sizes[-1] - largest < smallest

    @given(largest=st.integers(1, 1 << 18), smallest=st.sampled_from([256, 2048]))
    def test_fine_ones_waste_a_fifth_at_most(self, largest: int, smallest: int) -> None:
        """From 4 x `smallest` on: below, the multiples themselves are further apart."""
        sizes = token_buckets(largest, smallest=smallest, step=None)
        for first, second in pairwise(sizes):
            assert second - first == smallest or second <= 1.25 * first

    @given(largest=st.integers(1, 1 << 18), smallest=st.sampled_from([256, 2048]))
    def test_coarse_ones_are_no_more_than_fine_ones(self, largest: int, smallest: int) -> None:
        fine, coarse = (token_buckets(largest, smallest=smallest, step=step) for step in (None, COARSE_STEP))
        assert len(coarse) <= len(fine)
        assert set(coarse) <= set(fine)

    def test_tiles_of_rows_fill_every_bucket_of_a_cpu(self) -> None:
        assert CPU_SMALLEST % CPU_TILE_ROWS == 0


class TestDenseColumns:
    @pytest.mark.parametrize(
        ("row_len", "columns"), [(1, 512), (512, 512), (513, 1024), (1024, 1024), (9000, 16_384), (16_384, 16_384)]
    )
    def test_widths_are_powers_of_two(self, row_len: int, columns: int) -> None:
        assert dense_columns(row_len) == columns

    def test_none_without_dense_masks(self) -> None:
        assert dense_columns_up_to(0) == ()

    @given(longest=st.integers(1, 16_384), data=st.data())
    def test_every_row_up_to_the_longest_has_its_width(self, longest: int, data: st.DataObject) -> None:
        widths = dense_columns_up_to(longest)
        assert dense_columns(data.draw(st.integers(1, longest))) in widths
        assert widths[-1] == dense_columns(longest)
        assert list(widths) == sorted(set(widths))


@pytest.mark.parametrize(
    ("others", "least"), [((), 256), ((256,), 320), ((320,), 512), ((256, 1024), 2048), ((4096,), None)]
)
def test_buckets_up_to_one_with_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch, others: Collection[int], least: int | None
) -> None:
    """Of one matrix of two, in the last row alone."""

    def linear(layer: LayerWeights, name: str, x: jax.Array, *dtype: object, bias: object = None) -> jax.Array:
        rows = x[:, :1].astype(jnp.float32)
        return rows.at[-1].add(0.5) if name == "down" and len(x) in others else rows

    monkeypatch.setattr(invariant_rows, "layer_linear", linear)
    monkeypatch.setattr(invariant_rows, "_MATRICES", ("o", "down"))  # a program is compiled for each and every bucket
    buckets = (256, 320, 512, 1024, 2048, 4096, 8192)
    expected = None if least is None else buckets[buckets.index(least) :]
    found = invariant_rows.invariant_buckets(small_layers(), jnp.bfloat16, buckets, jax.devices()[0], False)
    assert found == expected


@dataclass(frozen=True)
class FakeInfo:
    """Of `BackendInfo`."""

    batch_invariant: bool
    token_buckets: tuple[int, ...] = (256, 512)


@dataclass(frozen=True)
class FakeAssembly:
    """Of `Assembly`."""

    dtype: Any
    info: FakeInfo
    programs: Any
    mesh: Any


@pytest.mark.parametrize(
    ("options", "dtype", "agree", "expected"),
    [
        ({}, jnp.bfloat16, (512,), FakeInfo(True, (512,))),
        ({"batch_invariant": True}, jnp.float16, (256, 512), FakeInfo(True, (256, 512))),
        ({}, jnp.bfloat16, None, FakeInfo(False)),
        ({"batch_invariant": True}, jnp.bfloat16, None, FakeInfo(True, (4096,))),  # tiles
        ({"batch_invariant": False}, jnp.bfloat16, (512,), FakeInfo(False)),
        ({}, jnp.float32, (512,), FakeInfo(False)),
        ({"batch_invariant": True}, jnp.float32, (512,), FakeInfo(True, (4096,))),
        ({"max_loras": 2}, jnp.bfloat16, (512,), FakeInfo(False)),
        ({"batch_invariant": True, "max_loras": 2}, jnp.bfloat16, (512,), FakeInfo(True, (4096,))),
    ],
)
def test_what_batch_invariant_means_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, options: Any, dtype: Any, agree: tuple[int, ...] | None, expected: FakeInfo
) -> None:
    monkeypatch.setattr("prefixwise.backends.jax.backend.invariant_buckets", lambda *_: agree)

    def make(chosen: BackendOptions) -> Any:
        info = FakeInfo(True, (4096,)) if chosen.batch_invariant else FakeInfo(False)
        weights, mesh = SimpleNamespace(layers=None), SimpleNamespace(local_devices=[None])
        transformer = SimpleNamespace(fuses_gate=False)
        programs = SimpleNamespace(weights=weights, store=ExecutableStore(), transformer=transformer)
        return FakeAssembly(dtype, info, programs, mesh)

    choice: Any = SimpleNamespace(platform="gpu")
    found: Any = _exact_assembly(make, BackendOptions("jax", **options), choice).info
    assert found == expected


def small_layers(*, has_bias: bool = False, is_fp8: bool = False) -> LayerWeights:
    """Shapes of a small model's matrices."""
    config = replace(QWEN3_06B, num_layers=1, model_size=32, mlp_size=48, num_heads=2, num_kv_heads=1, head_size=16)
    config = replace(config, vocab_size=64, qkv_bias=has_bias, qk_norm=False)
    mesh = make_mesh(jax.devices()[:1], 1, 1)
    return weight_shapes(config, jnp.bfloat16, mesh, HeadPlacement.plan(2, 1, 1), is_fp8=is_fp8).layers


@pytest.mark.parametrize(
    ("has_bias", "is_fp8", "fuses_gate"),
    [(False, False, False), (True, False, False), (True, True, False), (False, False, True)],
)
def test_gemms_of_buckets_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, has_bias: bool, is_fp8: bool, fuses_gate: bool
) -> None:
    """Every matrix that XLA multiplies, as the model does, with as many rows as each bucket has."""
    layers, seen = small_layers(has_bias=has_bias, is_fp8=is_fp8), set()

    def linear(layer: LayerWeights, name: Matrix, x: jax.Array, *dtype: Any, bias: Any = None) -> jax.Array:
        out = layer_linear(layer, name, x, *dtype, bias=bias)
        seen.add((name, *out.shape, str(out.dtype), bias is not None))
        return out

    monkeypatch.setattr(invariant_rows, "layer_linear", linear)
    invariant_rows.invariant_buckets(layers, jnp.bfloat16, (8, 16), jax.devices()[0], fuses_gate)
    columns = {"qkv": 64, "o": 32, "down": 32} | ({} if fuses_gate else {"gate_up": 96})
    assert seen == {
        (name, rows, width, "bfloat16", has_bias and name == "qkv")
        for name, width in columns.items()
        for rows in (8, 16)
    }
