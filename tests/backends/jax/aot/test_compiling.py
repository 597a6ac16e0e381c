"""The real compiler for TPUs, on a machine that has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.backends.jax.aot.compiling import Compilation, compile_program
from prefixwise.backends.jax.aot.hlo import array_shapes
from prefixwise.backends.jax.attention.base import AttentionImplementation, Heads, Source
from prefixwise.backends.jax.attention.pallas_tpu import MAX_TOKENS
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.programs import HeadSpec
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes
from tests.backends.jax.aot.conftest import SMALL, Describe

NUM_TOKENS = 1024  # the square of which no array of the small model has, however it is split
FEW_TOKENS = 256  # where their number does not matter
ROWS = ProgramSpec(NUM_TOKENS, "batch", keeps=False)
PREFILL = ProgramSpec(NUM_TOKENS, "pool", keeps=True)
EXTEND = ProgramSpec(NUM_TOKENS, "pool", keeps=False)
SCORE, LABELS, NORMALIZERS = HeadSpec("score", NUM_TOKENS), HeadSpec("labels"), HeadSpec("normalizers")

# For what does not depend on the model.
LEAST = replace(SMALL, model_size=128, mlp_size=128, num_layers=1, num_heads=1, num_kv_heads=1)

# Of a trunk: one sum of embeddings, and two in the loop over layers, behind attention and MLP.
SUMS = {ROWS: 3, PREFILL: 3, EXTEND: 3, SCORE: 2, LABELS: 1, NORMALIZERS: 2}
# Trunks that are compiled every day: each once, and with all that chips have to say to each other.
EVERYDAY = {("v6e:2x4", ROWS), ("v6e:2x4", PREFILL), ("v6e:1x1", EXTEND)}


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    if test != "test_a_whole_model_compiles" or isinstance(parameters["spec"], HeadSpec):
        return False
    return (parameters["topology"], parameters["spec"]) not in EVERYDAY


def compiled(describe: Describe, topology: str, spec: ProgramSpec | HeadSpec, **described: Any) -> Compilation:
    found = compile_program(describe(topology, **described).assembly.programs, spec)
    assert (found.outcome, found.reason) == ("compiles", None)
    return found


def squares(found: Compilation, num_tokens: int) -> list[tuple[int, ...]]:
    return [shape for shape in array_shapes(found.hlo) if prod(shape) >= num_tokens**2]


@pytest.mark.parametrize("spec", SUMS, ids=lambda spec: spec.title)
@pytest.mark.parametrize(("topology", "tp_size"), [("v6e:1x1", 1), ("v6e:2x2", 4), ("v6e:2x4", 8)])
def test_a_whole_model_compiles(describe: Describe, topology: str, tp_size: int, spec: ProgramSpec | HeadSpec) -> None:
    """At any number of chips that share the heads, of which some are repeated and some padded. Chips speak to each
    other where sums over heads, columns and the vocabulary end, and nowhere else; nothing grows with the square of the
    tokens."""
    found = compiled(describe, topology, spec)
    assert found.collectives == ({} if tp_size == 1 else {"all-reduce": SUMS[spec]})
    assert squares(found, NUM_TOKENS) == []
    assert found.memory is not None
    assert 0 < found.memory.total < 64 << 20
    is_trunk = isinstance(spec, ProgramSpec)
    assert (found.kernel_vmem_bytes is not None) == is_trunk
    assert (found.kernel_vmem_bytes or 0) < 96 << 20


def test_a_dense_mask_is_the_square_that_the_others_do_not_have(describe: Describe) -> None:
    num_tokens = 512
    spec = ProgramSpec(num_tokens, "batch", keeps=False, dense_columns=num_tokens)
    found = compiled(describe, "v6e:1x1", spec, config=LEAST)
    assert (num_tokens, num_tokens) in squares(found, num_tokens)
    assert found.kernel_vmem_bytes is None, "XLA reads it"


@pytest.mark.parametrize(
    ("topology", "num_heads", "num_kv_heads", "head_size"),
    [
        ("v6e:1x1", 14, 2, 64),
        ("v5e:1x1", 8, 1, 256),
        pytest.param("v6e:1x1", 8, 1, 256, marks=pytest.mark.slow),
        pytest.param("v5e:1x1", 16, 8, 128, marks=pytest.mark.slow),
    ],
)
def test_the_kernel_compiles_for_real_heads(
    describe: Describe, topology: str, num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    """Those of Qwen3 on a v6e are below."""
    config = replace(SMALL, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    assert compiled(describe, topology, replace(EXTEND, num_tokens=FEW_TOKENS), config=config).kernel_vmem_bytes


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 1), (4, 2), pytest.param(16, 8, marks=pytest.mark.slow)])
def test_no_program_copies_the_pool(describe: Describe, num_heads: int, num_kv_heads: int) -> None:
    """Heads of a shard, as Qwen's models have them at one chip or many, lie in the pool as the kernel wants them."""
    config = replace(SMALL, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128)
    spec = replace(PREFILL, num_tokens=FEW_TOKENS)
    found = compiled(describe, "v6e:1x1", spec, config=config, prefix_cache_bytes=1 << 30)
    assert found.kernel_vmem_bytes
    assert found.memory is not None
    assert found.memory.arguments > 1 << 30
    assert found.memory.temporaries < 64 << 20


def test_a_program_with_the_most_tokens_of_the_kernel_compiles(describe: Describe) -> None:
    """Metadata of tiles are in SMEM, whatever the heads; prefixes in the batch have the most of them."""
    found = compiled(describe, "v6e:1x1", replace(ROWS, num_tokens=MAX_TOKENS), config=LEAST)
    assert found.kernel_vmem_bytes


def test_a_longer_program_has_another_attention(describe: Describe) -> None:
    programs = describe("v6e:1x1").assembly.programs
    names = [programs.attention(replace(EXTEND, num_tokens=tokens)).name for tokens in (MAX_TOKENS, MAX_TOKENS + 256)]
    assert names == ["pallas_tpu", "xla"]


@pytest.mark.slow
def test_a_longer_program_compiles_without_the_kernel(describe: Describe) -> None:
    config = replace(SMALL, num_layers=1)
    found = compiled(describe, "v6e:1x1", replace(ROWS, num_tokens=2 * MAX_TOKENS), config=config)
    assert found.kernel_vmem_bytes is None


class GatheringAttention(AttentionImplementation):
    """A kernel that reads rows of an array by an array of their numbers, which TPUs cannot."""

    name = "gathering"
    needs_padding_tiles = False

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(32, wide=KEY_TILE, prefix=KEY_TILE)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles) -> jax.Array:
        def kernel(rows: Any, queries: Any, out: Any) -> None:
            out[...] = queries[...][rows[...], :]

        flat = heads.q.reshape(len(heads.q), -1)
        rows, queries = tiles.token_segment[:KEY_TILE], flat[:KEY_TILE]
        vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
        gathered = pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype), in_specs=[vmem, vmem], out_specs=vmem
        )(rows, queries)
        return flat.at[:KEY_TILE].set(gathered).reshape(heads.q.shape)


def test_a_kernel_with_a_row_gather_is_caught(describe: Describe) -> None:
    backend = describe("v6e:1x1", attention=GatheringAttention())
    found = compile_program(backend.assembly.programs, EXTEND)
    assert (found.outcome, found.memory) == ("fails", None)
    assert "gather" in (found.reason or "").lower()


def test_a_program_that_cannot_fit_is_reported_with_the_compilers_words(describe: Describe) -> None:
    backend = describe("v6e:1x1", prefix_cache_bytes=40 << 30)
    found = compile_program(backend.assembly.programs, EXTEND)
    assert (found.outcome, found.memory) == ("out of memory", None)
    assert "hbm" in (found.reason or "").lower()
    assert len((found.reason or "").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        ProgramSpec(10_240, "pool", keeps=False),
        ProgramSpec(2048, "pool", keeps=True),
        ProgramSpec(12_288, "batch", keeps=False),
        ProgramSpec(16_384, "batch", keeps=False, dense_columns=4096),
    ],
    ids=lambda spec: spec.title,
)
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:2x2"])
def test_the_contracts_programs_compile(describe: Describe, topology: str, spec: ProgramSpec) -> None:
    found = compiled(describe, topology, spec, config=QWEN3_06B, prefix_cache_bytes=None)
    assert found.memory is not None
    assert found.memory.total < 16 << 30
