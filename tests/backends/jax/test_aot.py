"""The real compiler for TPUs, on a machine that has none: slices, programs, and what the HLO says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks.random_checkpoint import QWEN3_06B
from prefixwise.aot.run import missing_packages, prepare_compiler
from prefixwise.backends.jax.aot import (
    CHIPS,
    Compilation,
    RecordingBackend,
    array_shapes,
    count_collectives,
    describe_slice,
    kernel_vmem_bytes,
    read_dump,
    resized,
)
from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation, Heads, Scoring, Source
from prefixwise.backends.jax.attention.pallas_tpu import MAX_TOKENS
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.programs import HeadSpec
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import BackendOptions
from prefixwise.forward.tiles import KEY_TILE, DeviceTiles, TileSizes
from prefixwise.models.config import ExpertsConfig, ModelConfig

# Heads that no number of chips divides, with norms of heads, in three layers: a loop and the last.
SMALL = replace(
    QWEN3_06B, vocab_size=1000, model_size=256, mlp_size=384, num_layers=3, num_heads=9, num_kv_heads=3, head_size=64
)
SMALL_ALONE = replace(SMALL, num_heads=3, num_kv_heads=1)  # for one chip, which shares heads with none
KV_CACHE_BYTES = 1 << 20
NUM_TOKENS = 1024  # the square of which no array of the small model has, however it is split
FEW_TOKENS = 256  # where their number does not matter
SEQUENCES = ProgramSpec(NUM_TOKENS, "batch", writes_cache=False)
PREFILL = ProgramSpec(NUM_TOKENS, "kv_cache", writes_cache=True)
EXTEND = ProgramSpec(NUM_TOKENS, "kv_cache", writes_cache=False)
SCORE, LABELS, LOGSUMEXP = HeadSpec("score", NUM_TOKENS), HeadSpec("labels"), HeadSpec("logsumexp")

# For tests that do not depend on the model.
LEAST = replace(SMALL, model_size=128, mlp_size=128, num_layers=1, num_heads=1, num_kv_heads=1)

# Of a trunk: one sum of embeddings, and two in the loop over layers, behind attention and MLP.
SUMS = {SEQUENCES: 3, PREFILL: 3, EXTEND: 3, SCORE: 2, LABELS: 1, LOGSUMEXP: 2}
# Trunks that are compiled every day: one with all that chips have to say to each other, and one that reads prefixes in
# the batch. Extend does less than prefill, and is compiled for real heads below.
EVERYDAY = {("v6e:2x4", PREFILL), ("v6e:1x1", SEQUENCES)}
SMALLEST = replace(EXTEND, num_tokens=FEW_TOKENS)  # where only the outcome matters
HLO = """
  %psum.1 = bf16[64,8]{1,0:T(8,128)} all-reduce(%a), replica_groups={{0,1}}
  %start = (f32[4], f32[8]) all-gather-start(%b), dimensions={0}
  %done = f32[8] all-gather-done(%start)
  %psum.2 = f32[64]{0} all-reduce(%psum.1)
  %k = bf16[64,4,2] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"scoped_memory_configs":\
[{"memory_space":"1","offset":"50","size":"900"}],"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"120"}]}
  %f = f32[] fusion(%x), backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"800"}]}
"""

Describe = Callable[..., RecordingBackend]


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    if test != "test_a_whole_model_compiles":
        return False
    topology, spec = parameters["topology"], parameters["spec"]
    return topology == "v6e:2x2" if isinstance(spec, HeadSpec) else (topology, spec) not in EVERYDAY


@pytest.fixture
def describe(restored_environment: None) -> Describe:
    """A model on a slice of TPUs that is not attached."""
    if missing_packages():
        pytest.skip("libtpu, the compiler for TPUs, is not installed")

    def make(
        topology: str,
        config: ModelConfig = SMALL,
        *,
        attention: AttentionImplementation | None = None,
        prefix_cache_bytes: int | None = KV_CACHE_BYTES,
    ) -> RecordingBackend:
        prepare_compiler()
        found = describe_slice(topology)
        options = BackendOptions(tp_size=found.num_chips, prefix_cache_bytes=prefix_cache_bytes)
        return RecordingBackend(config, options, found, attention)

    return make


def compiled(describe: Describe, topology: str, spec: ProgramSpec | HeadSpec, **described: Any) -> Compilation:
    found = describe(topology, **described).compile(spec)
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
    found = compiled(describe, topology, spec, config=SMALL_ALONE if tp_size == 1 else SMALL)
    assert found.collectives == ({} if tp_size == 1 else {"all-reduce": SUMS[spec]})
    assert squares(found, NUM_TOKENS) == []
    assert found.memory is not None
    assert 0 < found.memory.total < 64 << 20
    is_trunk = isinstance(spec, ProgramSpec)
    assert (found.kernel_vmem_bytes is not None) == is_trunk
    assert (found.kernel_vmem_bytes or 0) < 96 << 20


def test_a_dense_mask_is_the_square_that_the_others_do_not_have(describe: Describe) -> None:
    num_tokens = 512
    spec = ProgramSpec(num_tokens, "batch", writes_cache=False, dense_columns=num_tokens)
    found = compiled(describe, "v6e:1x1", spec, config=LEAST)
    assert (num_tokens, num_tokens) in squares(found, num_tokens)
    assert found.kernel_vmem_bytes is None, "XLA reads it"


@pytest.mark.parametrize(
    ("topology", "num_heads", "num_kv_heads", "head_size"),
    [
        pytest.param("v6e:1x1", 14, 2, 64, marks=pytest.mark.slow),  # a whole model above has 3 on 1 of this size
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
    assert compiled(describe, topology, SMALLEST, config=config).kernel_vmem_bytes


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"),
    [(2, 1), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((4, 2), (16, 8)))],
)
def test_no_program_copies_the_kv_cache(describe: Describe, num_heads: int, num_kv_heads: int) -> None:
    """The KV cache lays the heads of a shard, as Qwen's models have them at any number of chips, out for the kernel."""
    config = replace(SMALL, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=128)
    spec = replace(PREFILL, num_tokens=FEW_TOKENS)
    found = compiled(describe, "v6e:1x1", spec, config=config, prefix_cache_bytes=1 << 30)
    assert found.kernel_vmem_bytes
    assert found.memory is not None
    assert found.memory.arguments > 1 << 30
    assert found.memory.temporaries < 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_windows_do_not_copy_the_kv_cache_either(describe: Describe, num_kv_heads: int) -> None:
    """XLA's attention takes key tiles from it, in a layout of its own."""
    config = replace(SMALL, num_layers=2, num_heads=4, num_kv_heads=num_kv_heads, head_size=256, windows=(64, 0))
    spec = replace(PREFILL, num_tokens=FEW_TOKENS)
    found = compiled(describe, "v6e:1x1", spec, config=config, prefix_cache_bytes=1 << 30)
    assert found.kernel_vmem_bytes is None
    assert found.memory is not None
    assert found.memory.temporaries < 64 << 20


@pytest.mark.slow
def test_experts_compile_for_v5e(describe: Describe) -> None:
    experts = ExpertsConfig(num_experts=8, experts_per_token=2, norms_weights=True)
    compiled(describe, "v5e:1x1", SMALLEST, config=replace(SMALL_ALONE, experts=experts))


def test_a_program_with_the_most_tokens_of_the_kernel_compiles(describe: Describe) -> None:
    """Metadata of tiles are in SMEM, whatever the heads; prefixes in the batch have the most of them."""
    found = compiled(describe, "v6e:1x1", replace(SEQUENCES, num_tokens=MAX_TOKENS), config=LEAST)
    assert found.kernel_vmem_bytes


def test_a_longer_program_has_another_attention(describe: Describe) -> None:
    programs = describe("v6e:1x1").assembly.programs
    names = [programs.attention(replace(EXTEND, num_tokens=tokens)).name for tokens in (MAX_TOKENS, MAX_TOKENS + 256)]
    assert names == ["pallas_tpu", "xla"]


@pytest.mark.slow
def test_a_longer_program_compiles_without_the_kernel(describe: Describe) -> None:
    config = replace(SMALL, num_layers=1)
    found = compiled(describe, "v6e:1x1", replace(SEQUENCES, num_tokens=2 * MAX_TOKENS), config=config)
    assert found.kernel_vmem_bytes is None


class GatheringAttention(AttentionImplementation):
    """A kernel that reads rows of an array by an array of their numbers, which TPUs cannot."""

    name = "gathering"
    needs_padding_tiles = False

    def why_not(self, platform: str, dtype: jnp.dtype, head_size: int) -> str | None:
        return None

    def tile_sizes(self, heads_per_kv: int) -> TileSizes:
        return TileSizes(32, wide=KEY_TILE, prefix=KEY_TILE)

    def attend(self, heads: Heads, source: Source | None, tiles: DeviceTiles, scoring: Scoring = PLAIN) -> jax.Array:
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
    found = describe("v6e:1x1", LEAST, attention=GatheringAttention()).compile(SMALLEST)
    assert (found.outcome, found.memory) == ("fails", None)
    assert "gather" in (found.reason or "").lower()


def test_a_program_that_cannot_fit_is_reported_with_the_compilers_words(describe: Describe) -> None:
    found = describe("v6e:1x1", LEAST, prefix_cache_bytes=40 << 30).compile(SMALLEST)
    assert (found.outcome, found.memory) == ("out of memory", None)
    assert "hbm" in (found.reason or "").lower()
    assert len((found.reason or "").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        ProgramSpec(10_240, "kv_cache", writes_cache=False),
        ProgramSpec(2048, "kv_cache", writes_cache=True),
        ProgramSpec(12_288, "batch", writes_cache=False),
        ProgramSpec(16_384, "batch", writes_cache=False, dense_columns=4096),
    ],
    ids=lambda spec: spec.title,
)
@pytest.mark.parametrize("topology", ["v6e:1x1", "v5e:2x2"])
def test_the_contracts_programs_compile(describe: Describe, topology: str, spec: ProgramSpec) -> None:
    found = compiled(describe, topology, spec, config=QWEN3_06B, prefix_cache_bytes=None)
    assert found.memory is not None
    assert found.memory.total < 16 << 30


@pytest.mark.parametrize(
    "name", ["", "v6e", "v6e:", "v6e:2", "v6e:0x1", "v6e:2x2x2", "v4:2x2", "v7:2x2", "tpu", "v6e:2x2 "]
)
def test_a_topology_that_is_none(describe: Describe, name: str) -> None:
    with pytest.raises(BackendError, match=r"topology must be a generation \(v5e or v6e\) and a grid, as in v6e:2x2"):
        describe(name)


def test_a_grid_that_the_compiler_does_not_know(describe: Describe) -> None:
    with pytest.raises(BackendError, match=r"topology 'v6e:3x5' is unknown to the compiler: ."):
        describe("v6e:3x5")


@pytest.mark.parametrize(("topology", "num_chips"), [("v6e:1x1", 1), ("v5e:2x2", 4), ("v6e:2x4", 8), ("v6e:4x4", 16)])
def test_a_slice_has_the_chips_of_its_grid(describe: Describe, topology: str, num_chips: int) -> None:
    backend = describe(topology)
    chip = CHIPS[topology[:3]]
    assert backend.assembly.mesh.size == num_chips
    assert backend.info.device_kind == "tpu"
    assert {device.platform for device in backend.assembly.mesh.devices.flat} == {"tpu"}
    assert chip.hbm_bytes in (16 << 30, 32 << 30)


def test_a_fifth_of_the_memory_is_for_prefixes(describe: Describe) -> None:
    info = describe("v5e:1x1", prefix_cache_bytes=None).info
    assert info.num_kv_blocks * info.kv_block_bytes <= 0.2 * (16 << 30)
    assert info.attention == "pallas_tpu"


def test_no_tpu_is_looked_for(describe: Describe) -> None:
    describe("v6e:1x1")
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


def test_collectives_are_counted_once_by_kind() -> None:
    assert count_collectives(HLO) == {"all-reduce": 2, "all-gather": 1}
    assert count_collectives("") == {}


def test_the_vmem_of_kernels_is_what_they_use_and_not_what_they_may() -> None:
    assert kernel_vmem_bytes(HLO) == 70
    assert kernel_vmem_bytes("%f = f32[] fusion(%x)") is None


def test_shapes_of_all_arrays() -> None:
    assert array_shapes(HLO) == {(64, 8), (4,), (8,), (64,), (64, 4, 2)}
    assert array_shapes("") == set()


def test_a_dump_is_of_the_program_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "module_0.jit_trunk.cl_1.after_codegen.txt").write_text("this")
    (tmp_path / "module_0.jit_trunk.cl_1.after_optimizations.txt").write_text("before")
    (tmp_path / "module_2.extracted.cl_1.after_codegen.txt").write_text("a part")
    assert read_dump(tmp_path) == "this"


def test_a_dense_mask_grows_with_its_sequence() -> None:
    extend = ProgramSpec(512, "kv_cache", writes_cache=False)
    dense = extend.with_mask(512)
    assert resized(extend, 3000) == ProgramSpec(3000, "kv_cache", writes_cache=False)
    assert resized(dense, 3000) == ProgramSpec(3000, "kv_cache", writes_cache=False, dense_columns=4096)
