"""Every implementation faces the suite of `tests/attention_cases.py` and the named shapes of `shapes.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from prefixwise.backends.jax.attention.base import PLAIN, AttentionImplementation
from prefixwise.backends.jax.attention.hopper import HopperAttention
from prefixwise.backends.jax.attention.pallas_gpu import PallasGpuAttention
from prefixwise.backends.jax.attention.pallas_tpu import PallasTpuAttention
from prefixwise.backends.jax.attention.reference import ReferenceAttention
from prefixwise.backends.jax.attention.shapes import SHAPES, AttentionShape
from prefixwise.backends.jax.attention.xla import XlaAttention, as_float32
from prefixwise.backends.jax.devices import DeviceChoice
from prefixwise.forward.batch import ForwardBatch, Layout, MaskImpl
from prefixwise.forward.tiles import KEY_TILE, cut_tiles
from tests.attention_cases import (
    CASE_NAMED,
    CASES,
    HEAD_CASES,
    LAYOUT_CASES,
    PADDING,
    AttentionCase,
    AttentionInputs,
    Implementation,
    check,
    expected_output,
    make_batch,
    make_inputs,
    round_inputs,
)
from tests.backends.jax.attention.interpreter import (
    has_races,
    interpret_quickly,
    interpreter_parameters,
    tpu_has_races,
    tpu_interpreter_parameters,
)
from tests.backends.jax.attention.run_case import (
    LAYOUT_CAPACITY,
    Capacity,
    capacity_of,
    case_of,
    fill_up,
    make_dense,
    on_device,
    packed_program,
    prefix_tiles,
    runner,
    with_nan,
)

# One object each, since programs are shared by object.
XLA, REFERENCE = XlaAttention(), ReferenceAttention()
TPU_INTERPRETED = PallasTpuAttention(interpret=True)
TPU_COPIES_INTERPRETED = PallasTpuAttention(interpret=tpu_interpreter_parameters())
INTERPRETED, COMPILED = PallasGpuAttention(interpret=True), PallasGpuAttention()
HOPPER_INTERPRETED, HOPPER = HopperAttention(interpret=interpreter_parameters()), HopperAttention()

QUICK_CAPACITY = replace(LAYOUT_CAPACITY, is_optimised=False)  # of programs with few cases
FLOAT32_TOLERANCE = 2e-5
# Outputs reach 4, where half a unit in the last place is 2**-7 or 2**-10; rounded once more between the two parts.
HALF_TOLERANCES = {jnp.bfloat16: 0.02, jnp.float16: 0.0025}
ROUNDED_TO = pytest.mark.parametrize("dtype", HALF_TOLERANCES, ids=lambda dtype: np.dtype(dtype).name)

EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EACH_LAYOUT_CASE = pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)


def takes_heads(head_size: int) -> bool:
    """Does Hopper's kernel?"""
    return HOPPER.why_not("hopper", jnp.dtype(jnp.bfloat16), head_size) is None


# Still of several key tiles, the last of them not full.
SEVERAL_PREFIXES = replace(
    CASE_NAMED["several prefixes"], prefix_lens=(300, 31, 300, 5, 31), cached_prefix_lens=(300, 31, 5)
)
# With an odd number of query heads for each KV head Hopper's tiles are of twice as many tokens.
ODD_HEADS = replace(
    SEVERAL_PREFIXES,
    name="several prefixes, 3 query heads on 1 KV head of 128",
    num_heads=3,
    num_kv_heads=1,
    head_size=128,
)
TPU_ODD_HEADS = replace(
    SEVERAL_PREFIXES,
    name="several prefixes, 9 query heads on 3 KV heads of 96",
    num_heads=9,
    num_kv_heads=3,
    head_size=96,
)
ODD_CAPACITY = Capacity(192, 5, is_optimised=False)
HOPPER_CASES = tuple(
    case for case in (*CASES, ODD_HEADS) if case.layout is Layout.EXTEND and takes_heads(case.head_size)
)
EACH_HOPPER_CASE = pytest.mark.parametrize("case", HOPPER_CASES, ids=lambda case: case.name)
# Plain operations on whole arrays, for tiles and heads of any size the same.
REFERENCE_DAILY = {
    *("several prefixes", "one prefix read at several lengths", "some read no prefix", "serial sequences"),
    *("packed sequences", "9 query heads on 3 KV heads of 96"),
}
# Each has a program. The layouts have 2 query heads on a KV head, the named shapes 2 of 128 and 8 of 256.
HEADS_DAILY = {"4 query heads on 4 KV heads of 64", "9 query heads on 3 KV heads of 96"}
# What the interpreter, which takes seconds for each case and more for each program, has time for every day.
INTERPRETED_DAILY = (
    ("several prefixes", jnp.bfloat16),
    ("one prefix read at several lengths", jnp.bfloat16),
    ("some read no prefix", jnp.bfloat16),
    ("new KV blocks after cached ones", jnp.bfloat16),
)


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    if test == "test_float32_on_a_cpu":
        if parameters["implementation"] is REFERENCE:
            return parameters["case"].name not in REFERENCE_DAILY
        return parameters["case"] in HEAD_CASES and parameters["case"].name not in HEADS_DAILY
    if test == "test_small_on_a_cpu":  # the suite has such layouts, and other heads of each implementation
        return parameters["implementation"] is not XLA
    if test == "test_tpu_kernel_interpreted":  # odd heads are in the test of copies
        return parameters["case"] not in LAYOUT_CASES
    if test == "test_tpu_kernel_waits_for_its_copies":
        return parameters["case"] is not TPU_ODD_HEADS
    if test == "test_hopper_kernel_interpreted":
        return (parameters["case"].name, parameters["dtype"]) not in INTERPRETED_DAILY
    if test == "test_a_neighbour_in_the_same_tile_or_window_that_is_not_finite_stays_by_itself":
        return parameters["implementation"] is HOPPER_INTERPRETED
    return False


def is_hopper() -> bool:
    return DeviceChoice.resolve("gpu").kernel_platform == "hopper"


# Asked when a test begins, not when it is collected.
NEEDS_HOPPER = pytest.mark.skipif("not is_hopper()", reason="the GPU is not of compute capability 9")
ON_HOPPER = (pytest.mark.gpu, NEEDS_HOPPER)


@pytest.fixture(scope="module", autouse=True)
def quick_interpreters() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        interpret_quickly(patch)
        yield


class TestSuite:
    @EACH_CASE
    @pytest.mark.parametrize("implementation", [XLA, REFERENCE], ids=lambda each: each.name)
    def test_float32_on_a_cpu(self, implementation: AttentionImplementation, case: AttentionCase) -> None:
        check(runner(implementation, capacity_of(case)), case, FLOAT32_TOLERANCE)

    @EACH_LAYOUT_CASE
    def test_gpu_kernels_interpreted(self, case: AttentionCase) -> None:
        check(runner(INTERPRETED), case, FLOAT32_TOLERANCE)

    def test_gpu_kernels_interpreted_with_heads_that_fill_no_power_of_two(self) -> None:
        case = CASE_NAMED["9 query heads on 3 KV heads of 96"]
        check(runner(INTERPRETED, capacity_of(case)), case, FLOAT32_TOLERANCE)

    @EACH_CASE
    def test_tpu_kernel_interpreted(self, case: AttentionCase) -> None:
        check(runner(TPU_INTERPRETED, capacity_of(case)), case, FLOAT32_TOLERANCE)

    @pytest.mark.parametrize(
        "case",
        [
            TPU_ODD_HEADS,
            *(CASE_NAMED[name] for name in ("several prefixes", "packed sequences")),
            *(
                CASE_NAMED[name]
                for name in ("causal sequences of ragged lengths", "8 query heads on 1 KV heads of 256")
            ),
        ],
        ids=lambda case: case.name,
    )
    def test_tpu_kernel_waits_for_its_copies(self, case: AttentionCase) -> None:
        capacity = ODD_CAPACITY if case is TPU_ODD_HEADS else QUICK_CAPACITY
        check(runner(TPU_COPIES_INTERPRETED, capacity), case, FLOAT32_TOLERANCE)
        assert not tpu_has_races()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["several prefixes", "packed sequences", "12 query heads on 2 KV heads of 128"])
    def test_tpu_kernel_interpreted_in_half_precision(self, name: str) -> None:
        case = CASE_NAMED[name]
        run = runner(TPU_INTERPRETED, replace(capacity_of(case), is_optimised=False), jnp.bfloat16)
        check(run, case, HALF_TOLERANCES[jnp.bfloat16], dtype=jnp.bfloat16)

    @pytest.mark.gpu
    @ROUNDED_TO
    @EACH_CASE
    def test_gpu_kernels_on_a_gpu(self, case: AttentionCase, dtype: DTypeLike) -> None:
        run = runner(COMPILED, capacity_of(case), dtype, "gpu")
        check(run, case, HALF_TOLERANCES[dtype], dtype=dtype)

    @ROUNDED_TO
    @EACH_HOPPER_CASE
    def test_hopper_kernel_interpreted(self, case: AttentionCase, dtype: DTypeLike) -> None:
        run = runner(HOPPER_INTERPRETED, ODD_CAPACITY if case is ODD_HEADS else capacity_of(case), dtype)
        check(run, case, HALF_TOLERANCES[dtype], dtype=dtype)
        assert not has_races()

    @pytest.mark.gpu
    @NEEDS_HOPPER
    @ROUNDED_TO
    @EACH_HOPPER_CASE
    def test_hopper_kernel_on_a_gpu(self, case: AttentionCase, dtype: DTypeLike) -> None:
        run = runner(HOPPER, capacity_of(case), dtype, "gpu")
        check(run, case, HALF_TOLERANCES[dtype], dtype=dtype)

    @pytest.mark.gpu
    @EACH_CASE
    def test_float32_on_a_gpu(self, case: AttentionCase) -> None:
        check(runner(XLA, capacity_of(case), platform="gpu"), case, FLOAT32_TOLERANCE)


def small(shape: AttentionShape) -> AttentionShape:
    """For a CPU: the largest scale that fits, and of the KV heads, which know nothing of each other, only one."""
    scales = (shape.scaled(fraction) for fraction in (1.0, 0.5, 0.2, 0.1, 0.05))
    fitting = next(each for each in scales if each.num_tokens < SMALL_CAPACITY.num_tokens)
    return replace(fitting, num_heads=fitting.num_heads // fitting.num_kv_heads, num_kv_heads=1)


SMALL_CAPACITY = Capacity(256, 16, is_optimised=False)


class TestNamedShapes:
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
    @pytest.mark.parametrize(
        "implementation", [XLA, REFERENCE, INTERPRETED, TPU_INTERPRETED], ids=lambda each: each.name
    )
    def test_small_on_a_cpu(self, implementation: AttentionImplementation, shape: AttentionShape) -> None:
        check(runner(implementation, SMALL_CAPACITY), case_of(small(shape)), FLOAT32_TOLERANCE)

    @pytest.mark.gpu
    @ROUNDED_TO
    @pytest.mark.parametrize(
        ("implementation", "shape"),
        [
            *((COMPILED, shape) for shape in SHAPES),
            *(pytest.param(HOPPER, shape, marks=NEEDS_HOPPER) for shape in SHAPES if takes_heads(shape.head_size)),
        ],
        ids=lambda each: each.name,
    )
    def test_whole_on_a_gpu(
        self, implementation: AttentionImplementation, shape: AttentionShape, dtype: DTypeLike
    ) -> None:
        case = case_of(shape)
        num_blocks = sum(-(-length // KEY_TILE) for length in shape.prefix_lens)
        capacity = Capacity(-(-(shape.num_tokens + PADDING) // 256) * 256, num_blocks)
        batch, inputs = make_batch(case), round_inputs(make_inputs(case), dtype)
        found = runner(implementation, capacity, dtype, "gpu")(batch, inputs)[: batch.num_tokens]
        expected = runner(XLA, capacity, platform="gpu")(batch, inputs)[: batch.num_tokens]
        assert np.abs(found - expected).max() <= HALF_TOLERANCES[dtype]


class TestDenseMask:
    @pytest.mark.parametrize(
        "name",
        ["packed sequences", "one packed sequence of many items", "packed sequences whose prefixes are KV blocks"],
    )
    def test_it_gives_the_bits_of_segment(self, name: str) -> None:
        run, case = runner(XLA), CASE_NAMED[name]
        masks: tuple[MaskImpl, MaskImpl] = ("dense", "segment")
        dense, segment = (run(make_batch(case, mask), make_inputs(case)) for mask in masks)
        assert np.array_equal(dense, segment)

    def test_it_sees_what_the_tiles_leave_out(self) -> None:
        """It scores every pair: a key that the array shows and no tile visits must count."""
        case, capacity, sizes = CASE_NAMED["packed sequences"], LAYOUT_CAPACITY, XLA.tile_sizes(2)
        batch, inputs = make_batch(case, "dense"), make_inputs(case)
        tiles = cut_tiles(batch, sizes, prefix_tiles(batch, capacity))
        no_tiles = tiles._replace(
            counts=np.zeros_like(tiles.counts),
            token_segment=np.full_like(tiles.token_segment, capacity.num_tokens),
            token_prefix_len=np.zeros_like(tiles.token_prefix_len),
        )
        with on_device("cpu"):
            q, k, v = (jnp.asarray(with_nan(each, capacity.num_tokens)) for each in (inputs.q, inputs.k, inputs.v))
            device_tiles, dense = fill_up(no_tiles, sizes, capacity), make_dense(batch, capacity.num_tokens)
            # All that `runner` gives it, for its program.
            found = packed_program(q, k, v, device_tiles, implementation=XLA, dense=dense, scoring=PLAIN)
        assert np.abs(found[: batch.num_tokens] - expected_output(batch, inputs)).max() <= FLOAT32_TOLERANCE


def behind(
    offset: int, case: AttentionCase, inputs: AttentionInputs, segment: int
) -> tuple[ForwardBatch, AttentionInputs]:
    """One segment of the case behind another one, of `offset` tokens, that reads no prefix."""
    start, length = sum(case.segment_lens[:segment]), case.segment_lens[segment]
    others = bool(offset)
    moved = replace(
        case,
        segment_lens=(offset,) * others + (length,),
        prefix_index=(-1,) * others + (case.prefix_index[segment],),
        prefix_lens=(0,) * others + (case.prefix_lens[segment],),
        seed=1,
    )
    drawn = make_inputs(moved)
    for own, whole in ((drawn.q, inputs.q), (drawn.k, inputs.k), (drawn.v, inputs.v)):
        own[offset : offset + length] = whole[start : start + length]
    return make_batch(moved), replace(drawn, cached=inputs.cached)


def draw_segment(length: int) -> AttentionInputs:
    return make_inputs(AttentionCase("segment", (length,), seed=length))


def side_by_side(*segments: AttentionInputs) -> AttentionInputs:
    """Their tokens one after the other, without the padding of each."""
    q, k, v = (
        np.concatenate([array[:-PADDING] for array in arrays])
        for arrays in zip(*((each.q, each.k, each.v) for each in segments), strict=True)
    )
    return AttentionInputs(q, k, v, ())


# A prefix of 150 tokens, in blocks where it is in the batch, and items of 20 and 33.
EXTEND = AttentionCase("extend", (20, 33), (0, 0), (150, 150), (150,))
PACKED = AttentionCase(
    "packed",
    (128, 22, 20, 33),
    (-1, 0, 0, 0),
    (0, 128, 150, 150),
    batch_prefixes=(0,),
    sequence_starts=(0, 4),
    layout=Layout.PACKED,
)
SERIAL = AttentionCase(
    "serial",
    (128, 22, 20, 128, 22, 33),
    (-1, 0, 0, -1, 1, 1),
    (0, 128, 150, 0, 128, 150),
    batch_prefixes=(0, 3),
    sequence_starts=(0, 3, 6),
    layout=Layout.CAUSAL,
)


def check_a_broken_neighbour(run: Implementation, case: AttentionCase, mask: MaskImpl = "segment") -> None:
    """The second segment is not finite; all others have the bits that they had."""
    batch, inputs = make_batch(case, mask), make_inputs(case)
    before = run(batch, inputs)
    broken = slice(int(batch.segment_starts[1]), int(batch.segment_starts[2]))
    inputs.q[broken], inputs.k[broken], inputs.v[broken] = np.nan, np.nan, np.inf
    others = np.r_[0 : broken.start, broken.stop : batch.num_tokens]
    assert np.array_equal(run(batch, inputs)[others], before[others])


class TestIsolation:
    """A segment's bits follow from its own tokens and its prefix."""

    @pytest.mark.parametrize(
        ("implementation", "platform", "dtype"),
        [
            pytest.param(XLA, "cpu", jnp.float32, id="xla"),
            pytest.param(INTERPRETED, "cpu", jnp.float32, id="interpreted"),
            pytest.param(TPU_INTERPRETED, "cpu", jnp.float32, id="tpu interpreted"),
            pytest.param(HOPPER_INTERPRETED, "cpu", jnp.bfloat16, id="hopper interpreted", marks=pytest.mark.slow),
            pytest.param(COMPILED, "gpu", jnp.bfloat16, id="pallas_gpu", marks=pytest.mark.gpu),
            pytest.param(HOPPER, "gpu", jnp.bfloat16, id="hopper", marks=ON_HOPPER),
        ],
    )
    @pytest.mark.parametrize("name", ["ragged items over one prefix", "interleaved prefixes"])
    def test_a_segment_alone_and_at_any_place_has_the_bits_it_has_among_others(
        self, name: str, implementation: AttentionImplementation, platform: str, dtype: DTypeLike
    ) -> None:
        case, run = CASE_NAMED[name], runner(implementation, dtype=dtype, platform=platform)
        batch, inputs = make_batch(case), make_inputs(case)
        together = run(batch, inputs)
        for segment, (start, stop) in enumerate(pairwise(batch.segment_starts)):
            for offset in (0, 1, 77):
                found = run(*behind(offset, case, inputs, segment))
                assert np.array_equal(found[offset : offset + stop - start], together[start:stop]), (segment, offset)

    @pytest.mark.parametrize(
        ("implementation", "platform", "dtype"),
        [
            pytest.param(XLA, "cpu", jnp.float32, id="xla"),
            pytest.param(HOPPER, "gpu", jnp.bfloat16, id="hopper", marks=ON_HOPPER),
        ],
    )
    def test_a_program_of_another_size_gives_the_same_bits(
        self, implementation: AttentionImplementation, platform: str, dtype: DTypeLike
    ) -> None:
        case = CASE_NAMED["several prefixes"]
        batch, inputs = make_batch(case), make_inputs(case)
        small, large = (
            runner(implementation, capacity, dtype, platform)(batch, inputs)
            for capacity in (Capacity(200, 9), LAYOUT_CAPACITY)
        )
        assert np.array_equal(small[: batch.num_tokens], large[: batch.num_tokens])

    @pytest.mark.parametrize("implementation", [XLA, INTERPRETED, TPU_INTERPRETED], ids=lambda each: each.name)
    def test_all_layouts_give_the_same_bits(self, implementation: AttentionImplementation) -> None:
        prefix, first, second = (draw_segment(length) for length in (150, 20, 33))
        run = runner(implementation)
        cached = ((prefix.k[:150], prefix.v[:150]),)
        items = run(make_batch(EXTEND), replace(side_by_side(first, second), cached=cached))
        row = run(make_batch(PACKED), side_by_side(prefix, first, second))
        rows = run(make_batch(SERIAL), side_by_side(prefix, first, prefix, second))
        assert np.array_equal(row[150:203], items[:53])
        assert np.array_equal(rows[np.r_[150:170, 320:353]], items[:53])
        assert np.array_equal(rows[np.r_[:150, 170:320]], row[np.r_[:150, :150]])

    @pytest.mark.parametrize("implementation", [XLA, INTERPRETED, TPU_INTERPRETED], ids=lambda each: each.name)
    def test_a_block_has_the_same_bits_wherever_those_before_it_are(
        self, implementation: AttentionImplementation
    ) -> None:
        """In this batch's row, in pages that this batch fills, or in pages from before."""
        prefix, run = draw_segment(150), runner(implementation)
        row = run(make_batch(PACKED), side_by_side(prefix, draw_segment(20), draw_segment(33)))
        together = AttentionCase("together", (128, 22), (0, 0), (0, 128), batch_prefixes=(0,))
        assert np.array_equal(run(make_batch(together), prefix)[:150], row[:150])
        behind = AttentionCase("behind", (22,), (0,), (128,), (128,))
        last = AttentionInputs(prefix.q[128:], prefix.k[128:], prefix.v[128:], ((prefix.k[:128], prefix.v[:128]),))
        assert np.array_equal(run(make_batch(behind), last)[:22], row[128:150])

    @pytest.mark.parametrize(
        ("implementation", "platform"),
        [
            pytest.param(HOPPER_INTERPRETED, "cpu", id="hopper interpreted", marks=pytest.mark.slow),
            pytest.param(HOPPER, "gpu", id="hopper", marks=ON_HOPPER),
        ],
    )
    def test_a_block_has_the_same_bits_behind_pages_of_this_batch_and_from_before(
        self, implementation: AttentionImplementation, platform: str
    ) -> None:
        """For those that read pages only."""
        prefix, run = draw_segment(150), runner(implementation, dtype=jnp.bfloat16, platform=platform)
        together = AttentionCase("together", (128, 22), (0, 0), (0, 128), batch_prefixes=(0,))
        behind = AttentionCase("behind", (22,), (0,), (128,), (128,))
        last = AttentionInputs(prefix.q[128:], prefix.k[128:], prefix.v[128:], ((prefix.k[:128], prefix.v[:128]),))
        assert np.array_equal(run(make_batch(behind), last)[:22], run(make_batch(together), prefix)[128:150])

    @pytest.mark.parametrize(
        ("implementation", "mask"),
        [
            pytest.param(XLA, "segment", id="xla"),
            pytest.param(XLA, "dense", id="dense"),
            pytest.param(INTERPRETED, "segment", id="interpreted"),
            pytest.param(TPU_INTERPRETED, "segment", id="tpu interpreted"),
        ],
    )
    def test_a_neighbour_that_is_not_finite_stays_by_itself(
        self, implementation: AttentionImplementation, mask: MaskImpl
    ) -> None:
        check_a_broken_neighbour(runner(implementation), CASE_NAMED["packed sequences"], mask)

    @pytest.mark.parametrize("name", ["ragged items over one prefix", "interleaved prefixes"])
    @pytest.mark.parametrize(
        ("implementation", "platform"),
        [
            pytest.param(HOPPER_INTERPRETED, "cpu", id="hopper interpreted"),
            pytest.param(TPU_INTERPRETED, "cpu", id="tpu interpreted"),
            pytest.param(HOPPER, "gpu", id="hopper", marks=ON_HOPPER),
        ],
    )
    def test_a_neighbour_in_the_same_tile_or_window_that_is_not_finite_stays_by_itself(
        self, implementation: AttentionImplementation, platform: str, name: str
    ) -> None:
        capacity = QUICK_CAPACITY if implementation is TPU_INTERPRETED else LAYOUT_CAPACITY
        check_a_broken_neighbour(runner(implementation, capacity, jnp.bfloat16, platform), CASE_NAMED[name])


@pytest.mark.parametrize(
    ("implementation", "platform", "dtype"),
    [
        pytest.param(XLA, "cpu", jnp.float32, id="xla"),
        pytest.param(INTERPRETED, "cpu", jnp.float32, id="interpreted"),
        pytest.param(HOPPER_INTERPRETED, "cpu", jnp.bfloat16, id="hopper interpreted"),
        pytest.param(HOPPER, "gpu", jnp.bfloat16, id="hopper", marks=ON_HOPPER),
    ],
)
def test_a_prefix_token_that_is_not_finite_reaches_only_its_readers(
    implementation: AttentionImplementation, platform: str, dtype: DTypeLike
) -> None:
    run = runner(implementation, dtype=dtype, platform=platform)
    case = CASE_NAMED["one prefix read at several lengths"]
    batch, inputs = make_batch(case), make_inputs(case)
    before = run(batch, inputs)
    inputs.cached[0][1][-1] = np.inf  # a value of the last prefix token
    after = run(batch, inputs)
    reads_all = np.repeat(batch.prefix_lens == max(case.prefix_lens), case.segment_lens)
    assert np.array_equal(after[: batch.num_tokens][~reads_all], before[: batch.num_tokens][~reads_all])
    assert not np.isfinite(after[: batch.num_tokens][reads_all]).all()


def test_a_pool_of_bits_is_read_as_bfloat16() -> None:
    """As which a CPU keeps it."""
    values = jnp.asarray([1.5, -3.0, 2.0**-20], jnp.bfloat16)
    assert np.array_equal(as_float32(values.view(jnp.uint16)), values.astype(jnp.float32))
