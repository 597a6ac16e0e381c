"""Forwards made by hand: a token's bits do not depend on which blocks were cached before, nor on who else is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise.backends.jax.assembly import MAX_TABLE_ENTRIES_PER_PAGE
from prefixwise.backends.jax.attention.pallas_gpu import PallasGpuAttention
from prefixwise.backends.jax.attention.xla import SIZES as XLA_SIZES
from prefixwise.backends.jax.backend import JaxBackend
from prefixwise.backends.jax.executables import ExecutableStore
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.kv_cache import JaxKVBlock, KVCacheArrays, KVCacheShape
from prefixwise.backends.jax.programs import RESULT_MEMORY
from prefixwise.backends.jax.runner import Runner, list_programs
from prefixwise.contract.errors import BackendError
from prefixwise.contract.ragged import Int32Array
from prefixwise.forward.backend import PROBE, BackendOptions
from prefixwise.forward.batch import KV_BLOCK_SIZE, ForwardBatch, ForwardOutput, Layout, MaskImpl, Prefix
from prefixwise.models.sources import open_checkpoint
from tests.backends.jax.batches import (
    Blocks,
    Segment,
    Suffix,
    cut_blocks,
    draw_ids,
    extend_batch,
    prefill_batch,
    segments_batch,
    sequences_batch,
)

# Two blocks and 14 tokens. Together with the others or the suffixes it fits the smallest program, of 512 tokens.
(PREFIX,) = draw_ids(1, 270)
OTHERS = draw_ids(2, 140, 90, 1)
LENS = (270, 270, 269, 256, 260, 0)  # how much each suffix reads
SUFFIXES = [Suffix(ids, length) for ids, length in zip(draw_ids(3, 20, 1, 140, 33, 7, 12), LENS, strict=True)]
(LONG,) = draw_ids(4, 580)  # four blocks and 68 tokens, in a program of another size

pytestmark = pytest.mark.usefixtures("programs_on_disk")


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every day in float32; in bfloat16 that blocks and sequences have the same bits, which need few programs."""
    if parameters.get("backend") != "cpu-bfloat16":
        return False
    if test == "test_sequences_have_the_bits_of_extend":
        return bool(parameters["mask"] == "dense")
    return test != "test_a_prefix_that_is_cached_in_steps_has_the_bits_of_one_forward"


@pytest.fixture(
    scope="module", params=["cpu-float32", "cpu-bfloat16", pytest.param("cuda-bfloat16", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> JaxBackend:
    """On a GPU with blocks of rows of one size: forwards of other sizes would round otherwise."""
    device, dtype = request.param.split("-")
    options = BackendOptions(
        device=device,
        dtype=dtype,
        token_budget=4096,
        batch_invariant=True,
        prefix_cache_bytes=1 << 26,  # as in `test_isolation.py`, for its programs
    )
    return JaxBackend(open_checkpoint(checkpoint_of("medium")), options)


@pytest.fixture(autouse=True)
def all_pages_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "backend" in request.fixturenames:
        kv_cache = request.getfixturevalue("backend")._runner.kv_cache
        assert kv_cache.num_free == kv_cache.num_pages


def prefill(backend: JaxBackend, *prefixes: Int32Array) -> list[Blocks]:
    """Their blocks, from one forward."""
    return share_out(backend.forward(prefill_batch(prefixes)).blocks, prefixes)


def share_out(blocks: Blocks, prefixes: tuple[Int32Array, ...]) -> list[Blocks]:
    found, rest = [], blocks
    for ids in prefixes:
        count = -(-len(ids) // KV_BLOCK_SIZE)
        found.append(rest[:count])
        rest = rest[count:]
    assert not rest
    return found


def prefill_in_steps(backend: JaxBackend, ids: Int32Array, *stops: int) -> Blocks:
    """One forward up to each of these numbers of tokens, which reads what those before it have cached."""
    blocks: Blocks = ()
    for stop in (*stops, len(ids)):
        blocks += backend.forward(prefill_batch([ids[:stop]], [blocks])).blocks
    return blocks


def contents(backend: JaxBackend, blocks: Blocks) -> list[Any]:
    """Keys and values of every token in every layer: [layers, tokens, K, H], twice."""
    kv_cache = backend._runner.kv_cache
    slots = np.concatenate([kv_cache.address(block) + np.arange(block.num_tokens) for block in blocks])
    arrays = [np.asarray(array) for array in kv_cache.arrays]
    return [array.reshape(backend.config.num_layers, -1, *array.shape[1:])[:, slots] for array in arrays]


def assert_same_contents(backend: JaxBackend, found: Blocks, expected: Blocks) -> None:
    assert [block.num_tokens for block in found] == [block.num_tokens for block in expected]
    for one, other in zip(contents(backend, found), contents(backend, expected), strict=True):
        assert one.any(axis=(-1, -2)).all(), "a token that was not cached"
        assert np.array_equal(one, other)


def assert_same_scores(found: ForwardOutput, expected: ForwardOutput) -> None:
    assert found.logsumexp is not None
    assert expected.logsumexp is not None
    assert np.isfinite(expected.label_logits).all()
    assert np.array_equal(found.label_logits, expected.label_logits)
    assert np.array_equal(found.logsumexp, expected.logsumexp)


class TestCachedBlocks:
    @pytest.mark.parametrize("stops", [(128,), (128, 256), (256,)], ids=str)
    def test_a_prefix_that_is_cached_in_steps_has_the_bits_of_one_forward(
        self, backend: JaxBackend, stops: tuple[int, ...]
    ) -> None:
        (whole,), steps = prefill(backend, PREFIX), prefill_in_steps(backend, PREFIX, *stops)
        assert_same_contents(backend, steps, whole)
        assert_same_scores(
            backend.forward(extend_batch(SUFFIXES, [steps])), backend.forward(extend_batch(SUFFIXES, [whole]))
        )

    def test_programs_of_two_sizes_cache_the_same_bits(self, backend: JaxBackend) -> None:
        assert_same_contents(backend, prefill_in_steps(backend, LONG, 256, 512), prefill(backend, LONG)[0])

    def test_several_prefixes_in_one_forward_have_the_bits_that_they_have_alone(self, backend: JaxBackend) -> None:
        prefixes = (OTHERS[0], PREFIX, *OTHERS[1:])
        for together, ids in zip(prefill(backend, *prefixes), prefixes, strict=True):
            (alone,) = prefill(backend, ids)
            assert_same_contents(backend, together, alone)

    def test_some_behind_cached_blocks_and_some_from_their_start(self, backend: JaxBackend) -> None:
        begun, (whole, other) = prefill(backend, PREFIX[:128])[0], prefill(backend, PREFIX, OTHERS[0])
        found = backend.forward(prefill_batch([OTHERS[0], PREFIX], [(), begun])).blocks
        assert_same_contents(backend, found[:2], other)
        assert_same_contents(backend, (*begun, *found[2:]), whole)

    def test_a_last_block_that_is_not_full_is_computed_again_for_a_longer_prefix(self, backend: JaxBackend) -> None:
        (short,), (whole,) = prefill(backend, PREFIX[:200]), prefill(backend, PREFIX)
        longer = short[:1] + backend.forward(prefill_batch([PREFIX], [short[:1]])).blocks
        assert_same_contents(backend, longer, whole)

    def test_items_of_several_requests_share_a_forward_and_no_bit(self, backend: JaxBackend) -> None:
        prefixes = prefill(backend, PREFIX, *OTHERS)
        suffixes = [
            *SUFFIXES,
            Suffix(SUFFIXES[0].ids, 140, 1),
            Suffix(SUFFIXES[3].ids, 1, 3),
            Suffix(SUFFIXES[2].ids, 128, 1),
            Suffix(SUFFIXES[4].ids, 90, 2),
        ]
        suffixes = suffixes[::2] + suffixes[1::2]
        together = backend.forward(extend_batch(suffixes, prefixes))
        for number, suffix in enumerate(suffixes):
            alone = backend.forward(extend_batch([Suffix(suffix.ids, suffix.prefix_len)], [prefixes[suffix.prefix]]))
            assert np.array_equal(alone.label_logits[0], together.label_logits[number])

    def test_prefixes_of_one_forward_may_share_blocks(self, backend: JaxBackend) -> None:
        fork = np.concatenate([PREFIX[:256], OTHERS[0]])
        (whole,), (alone,) = prefill(backend, PREFIX), prefill(backend, fork)
        shared = whole[:2] + backend.forward(prefill_batch([fork], [whole[:2]])).blocks
        assert_same_contents(backend, shared, alone)
        suffixes = [Suffix(SUFFIXES[0].ids, len(PREFIX), 0), Suffix(SUFFIXES[0].ids, len(fork), 1)]
        assert_same_scores(
            backend.forward(extend_batch(suffixes, [whole, shared])),
            backend.forward(extend_batch(suffixes, [whole, alone])),
        )


class TestSequences:
    @pytest.mark.parametrize(
        ("prefix_len", "rows", "layout", "mask"),
        [
            pytest.param(270, [SUFFIXES], Layout.PACKED, "segment", id="packed"),
            pytest.param(270, [SUFFIXES], Layout.PACKED, "dense", id="dense"),
            # A block and two tokens, so that several sequences fit the program of one.
            pytest.param(130, [SUFFIXES[:2], SUFFIXES[3:]], Layout.PACKED, "segment", id="chunks"),
            pytest.param(130, [[SUFFIXES[i]] for i in (0, 3, 5)], Layout.CAUSAL, "segment", id="serial"),
            pytest.param(
                *(270, [SUFFIXES[:2], SUFFIXES[2:5], SUFFIXES[5:]], Layout.PACKED, "segment"),
                id="long chunks",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                *(270, [[suffix] for suffix in SUFFIXES], Layout.CAUSAL, "segment"),
                id="long serial",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_sequences_have_the_bits_of_extend(
        self, backend: JaxBackend, prefix_len: int, rows: list[list[Suffix]], layout: Layout, mask: MaskImpl
    ) -> None:
        prefix = PREFIX[:prefix_len]
        rows = [[replace(each, prefix_len=min(each.prefix_len, prefix_len)) for each in row] for row in rows]
        (cached,) = prefill(backend, prefix)
        found = backend.forward(sequences_batch(prefix, rows, layout, mask))
        expected = backend.forward(extend_batch([suffix for row in rows for suffix in row], [cached]))
        is_other_kernel = mask == "dense" or backend.info.attention == "hopper"  # which reads no rows
        if is_other_kernel and backend.info.device_kind != "cpu":  # another order of additions
            assert np.abs(found.label_logits - expected.label_logits).max() <= 0.05
        else:
            assert_same_scores(found, expected)

    def test_a_dense_mask_always_has_the_tiles_of_xla(self, four_pages: JaxBackend) -> None:
        """The GPU kernels' are wider where every query head has a KV head of its own."""
        programs = four_pages._runner.programs
        transformer = replace(
            programs.transformer, attention=PallasGpuAttention(), batch_attention=PallasGpuAttention(), heads_per_kv=1
        )
        rows = ProgramSpec(512, reads="batch", writes_cache=False)
        on_gpu = replace(programs, transformer=transformer)
        assert on_gpu.tile_sizes(rows.with_mask(512)) == XLA_SIZES != on_gpu.tile_sizes(rows)

    def test_one_program_prefills_and_extends_where_a_kernel_writes_the_cache(self, four_pages: JaxBackend) -> None:
        """As on a GPU; not on a CPU, where a write is a pass of its own."""
        assembly, runner = four_pages._assembly, four_pages._runner
        transformer = replace(assembly.programs.transformer, fuses_heads=True)
        fused = replace(assembly, programs=replace(assembly.programs, transformer=transformer))
        new, (block,) = prefill_batch([PREFIX[:100]]), runner.kv_cache.take([100])
        extend = extend_batch([Suffix(PREFIX[:5], 100)], [(block,)])
        block.release()
        assert fused.spec(new, 100) == fused.spec(extend, 100) == assembly.spec(new, 100) != assembly.spec(extend, 100)
        info = replace(four_pages.info, token_buckets=(512,))

        def titles(runner: Runner, *, has_sequences: bool) -> set[str]:
            programs = list_programs(runner, info, max_dense_len=0, has_sequences=has_sequences)
            return {program.title for program in programs}

        on_gpu = replace(runner, programs=fused.programs)
        kinds, merged = titles(runner, has_sequences=False), titles(on_gpu, has_sequences=True)
        least = titles(on_gpu, has_sequences=False)
        assert kinds - merged == {"extend, 512 tokens"} and merged < kinds
        assert merged - least == {"sequences, 512 tokens"} and least < merged
        without_prefix = segments_batch([Segment(PREFIX[:5])], [], Layout.EXTEND, scored=[0])
        for batch in (without_prefix, PROBE):  # are no sequences that read a prefix in the batch
            assert fused.spec(batch, 5) == fused.spec(new, 5) != assembly.spec(batch, 5)

    def test_items_without_a_prefix_have_the_same_bits_over_the_kv_cache(
        self, backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = segments_batch([Segment(PREFIX[:50]), Segment(PREFIX[:200])], [], Layout.EXTEND, scored=[0, 1])
        expected = backend.forward(batch)
        monkeypatch.setattr("prefixwise.backends.jax.assembly._reads_kv_cache", lambda batch: True)
        assert backend._assembly.spec(batch, 250).reads == "kv_cache"
        assert_same_scores(backend.forward(batch), expected)

    def test_items_may_read_blocks_that_their_own_forward_caches(self, backend: JaxBackend) -> None:
        (cached,) = prefill(backend, PREFIX)
        blocks = cut_blocks(PREFIX, 0, num_cached=1)
        suffixes = [Segment(suffix.ids, 0, suffix.prefix_len) for suffix in SUFFIXES]
        numbers = range(len(blocks), len(blocks) + len(suffixes))
        batch = segments_batch(
            [*blocks, *suffixes], [Prefix(cached[:1], 0)], Layout.EXTEND, scored=numbers, cached=range(len(blocks))
        )
        found = backend.forward(batch)
        assert_same_contents(backend, found.blocks, cached[1:])
        assert_same_scores(found, backend.forward(extend_batch(SUFFIXES, [cached])))


def test_every_copy_of_the_model_caches_all_prefixes(
    checkpoint_of: Callable[[str], Path], quick_compilation: None
) -> None:
    """Two copies, each on four devices."""
    # As in `test_sharding.py`, for its programs.
    options = BackendOptions(device="cpu", dtype="float32", dp_size=2, tp_size=4, prefix_cache_bytes=(1 << 26) // 8)
    backend = JaxBackend(open_checkpoint(checkpoint_of("heads-12-2")), options)
    prefix = PREFIX[:140]  # so that all forwards are of one size
    suffixes = [Suffix(suffix.ids, min(suffix.prefix_len, 140)) for suffix in SUFFIXES]
    (whole,), steps = prefill(backend, prefix), prefill_in_steps(backend, prefix, 128)
    assert_same_contents(backend, steps, whole)
    found = backend.forward(extend_batch(suffixes, [steps]))
    for number, suffix in enumerate(suffixes):  # of which one of the copies gets nothing
        alone = backend.forward(extend_batch([suffix], [whole]))
        assert np.array_equal(alone.label_logits[0], found.label_logits[number])
    rows = sequences_batch(prefix, [suffixes[:2], suffixes[2:5], suffixes[5:]], Layout.PACKED)
    assert_same_scores(backend.forward(rows), found)


class TestStart:
    def test_forwards_started_in_a_row_read_what_earlier_ones_cache(self, backend: JaxBackend) -> None:
        (cached,) = prefill(backend, PREFIX)
        expected = backend.forward(extend_batch(SUFFIXES, [cached]))
        first = backend.start(prefill_batch([PREFIX[:256]]))
        second = backend.start(prefill_batch([PREFIX], [first.blocks]))
        running = [backend.start(extend_batch(SUFFIXES, [first.blocks + second.blocks])) for _ in range(2)]
        for each in reversed(running):
            assert_same_scores(each.wait(), expected)
        assert second.wait().blocks == second.blocks

    def test_a_forward_without_scores_is_not_waited_for(
        self, backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> None:
            raise AssertionError("it fetches something")

        monkeypatch.setattr(Runner, "fetch", fail)
        running = backend.start(prefill_batch([PREFIX]))
        output = running.wait()
        assert output.blocks == running.blocks
        assert (output.label_logits.shape, output.logsumexp) == ((0, 3), None)

    def test_blocks_are_equal_to_none_but_themselves(self, backend: JaxBackend) -> None:
        (cached,) = prefill(backend, PREFIX)
        assert len(set(cached)) == len(cached) == 3


def cached_and_scored(ids: Int32Array) -> ForwardBatch:
    """One block, which is cached, and behind whose last token logits are wanted."""
    return segments_batch([Segment(ids)], [], Layout.EXTEND, scored=[0], cached=[0])


@pytest.fixture(scope="module")
def four_pages(checkpoint_of: Callable[[str], Path], quick_compilation: None) -> JaxBackend:
    """Room for 4 x 128 tokens of 2 layers, 2 KV heads of 32, float32."""
    options = BackendOptions(device="cpu", prefix_cache_bytes=4 * KV_BLOCK_SIZE * (2 * 2 * 2 * 32 * 4))
    return JaxBackend(open_checkpoint(checkpoint_of("qwen3")), options)


class TestPages:
    def test_the_facts_for_the_planner(self, four_pages: JaxBackend) -> None:
        info = four_pages.info
        assert (info.num_kv_blocks, info.max_prefix_len) == (4, 4 * KV_BLOCK_SIZE)
        assert info.kv_block_bytes == KV_BLOCK_SIZE * 2 * 2 * 2 * 32 * 4
        assert info.max_kv_blocks_read == MAX_TABLE_ENTRIES_PER_PAGE * 4
        assert info.step_tokens == 2048

    def test_a_step_is_no_larger_than_the_budget(self, checkpoint_of: Callable[[str], Path]) -> None:
        options = BackendOptions(device="cpu", token_budget=1024)
        assert JaxBackend(open_checkpoint(checkpoint_of("qwen3")), options).info.step_tokens == 1024

    def test_a_block_that_is_released_makes_room_for_one(self, four_pages: JaxBackend) -> None:
        (cached,) = prefill(four_pages, LONG[:500])
        with pytest.raises(BackendError, match="need 1 pages of 128 tokens, and 0 of 4 are free"):
            prefill(four_pages, OTHERS[2])
        before = contents(four_pages, cached[:3])
        freed = cached[3]
        assert isinstance(freed, JaxKVBlock)
        page = freed.lease.address
        freed.release()
        freed.release()
        ((new,),) = prefill(four_pages, OTHERS[2])
        assert four_pages._runner.kv_cache.address(new) == page
        after = contents(four_pages, cached[:3])
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))

    def test_a_refusal_takes_nothing(self, four_pages: JaxBackend) -> None:
        with pytest.raises(BackendError) as caught:
            four_pages.start(prefill_batch([LONG]))
        assert str(caught.value) == (
            "KV blocks with 580 tokens need 5 pages of 128 tokens, and 4 of 4 are free; "
            "give the KV cache more memory (prefix_cache_bytes), or choose the packed algorithm"
        )
        assert len(prefill(four_pages, LONG[:512])[0]) == 4

    def test_a_block_that_was_released_is_not_read(self, four_pages: JaxBackend) -> None:
        (cached,) = prefill(four_pages, PREFIX[:200])
        cached[1].release()
        with pytest.raises(BackendError, match="was released before it was read; compute it again"):
            four_pages.start(extend_batch([Suffix(SUFFIXES[0].ids, 200)], [cached]))


class TestFailure:
    def test_a_start_that_fails_takes_nothing_with_it(
        self, four_pages: JaxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        suffix = [Suffix(SUFFIXES[0].ids, 500)]
        (cached,) = prefill(four_pages, LONG[:500])
        expected = four_pages.forward(extend_batch(suffix, [cached]))
        cached[3].release()
        runner = four_pages._runner

        def fail(weights: object, kv_cache: KVCacheArrays, *inputs: object) -> Any:
            jax.tree.map(lambda array: array.delete(), kv_cache)
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(type(runner.programs), "trunk", lambda self, spec: fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                four_pages.start(prefill_batch([LONG[:500]], [cached[:3]]))
        with pytest.raises(BackendError, match="was lost when a forward pass failed; compute it again"):
            four_pages.start(extend_batch([Suffix(SUFFIXES[0].ids, 300)], [cached[:3]]))
        (again,) = prefill(four_pages, LONG[:500])
        assert_same_scores(four_pages.forward(extend_batch(suffix, [again])), expected)

    def test_a_wait_that_fails_gives_the_pages_back(
        self, four_pages: JaxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*arguments: object) -> None:
            raise RuntimeError("the device is gone")

        running = four_pages.start(cached_and_scored(OTHERS[1]))
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the device is gone"):
            patch.setattr(Runner, "fetch", fail)
            running.wait()
        assert running.blocks, "it is not their end that gives the pages back"
        assert len(prefill(four_pages, LONG[:512])[0]) == 4


class TestBehindTheTrunk:
    def test_the_program_writes_its_result_to_the_host(
        self, four_pages: JaxBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a GPU, with the same bits."""
        runner = four_pages._runner
        programs = replace(runner.programs, store=ExecutableStore(), _compiled={}, _unsaved={})
        to_host = replace(runner, programs=programs)
        inputs = runner.head_inputs([np.arange(3)], np.array([5, 9], np.int32))
        size = runner.programs.transformer.rows.score_rows, four_pages.config.model_size
        hidden: Any = [np.random.default_rng(0).normal(size=size).astype(np.float32)]
        for read in (
            lambda each: each.label_logits(hidden, inputs),
            lambda each: each.logsumexp(hidden),
            lambda each: each.vocabulary(hidden, [np.arange(3, dtype=np.int32)], 2),
        ):
            usual = read(runner)
            with monkeypatch.context() as patch:
                patch.setitem(RESULT_MEMORY, "cpu", "pinned_host")
                on_host = read(to_host)
            kinds = [each[0][0].sharding.memory_kind for each in (usual, on_host)]
            assert [kind == "pinned_host" for kind in kinds] == [False, True]
            assert runner.fetch(usual).tobytes() == runner.fetch(on_host).tobytes()

    def test_one_device_gets_its_integers_with_the_call(self, four_pages: JaxBackend) -> None:
        inputs = four_pages._runner.head_inputs([np.arange(3)], np.array([5, 9], np.int32))
        assert all(isinstance(tile, np.ndarray) for tiles in inputs for tile in tiles)


@pytest.mark.parametrize("writes_cache", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_program_copies_the_kv_cache(four_pages: JaxBackend, writes_cache: bool) -> None:
    """Each writes in place what it caches, and then reads it: there is no scratch memory for a hundredth of a KV cache
    that is far larger than all else."""
    programs = four_pages._runner.programs
    kv_cache = KVCacheShape(num_layers=2, num_pages=1 << 16, heads=(2, 32), dtype=jnp.dtype(jnp.float32))
    with_large_cache = replace(programs, kv_cache=kv_cache.arrays(programs.mesh), _compiled={})
    compiled = with_large_cache.lowered(ProgramSpec(512, reads="kv_cache", writes_cache=writes_cache)).compile()
    analysis: Any = compiled.memory_analysis()
    one_array = prod(kv_cache.shape) * 4  # keys or values
    assert analysis.argument_size_in_bytes > 2 * one_array
    assert analysis.temp_size_in_bytes < one_array / 100
