"""The paged kernels and their runner: compiled on a GPU, and in Triton's interpreter (`test_interpreted.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch import invariant_rows
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.elementwise import PLAIN
from prefixwise.backends.torch.fp8 import KVFormat
from prefixwise.backends.torch.invariant_rows import RowCounts
from prefixwise.forward.batch import ForwardBatch, Layout
from prefixwise.models.config import ModelConfig, RopeConfig
from tests.attention_cases import (
    CASE_NAMED,
    CASES,
    LAYOUT_CASES,
    SCORINGS,
    AttentionCase,
    AttentionInputs,
    Scoring,
    check,
    check_alone,
    make_batch,
    make_inputs,
)
from tests.attention_cases import PLAIN as PLAIN_SCORING
from tests.backends.torch import batches
from tests.backends.torch.batches import Blocks, Segments, extend_batch, prefill, sequences_batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter cuts bfloat16 where a device rounds it.
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.004}
HOPPER = (9, 0)
SMALL = replace(
    QWEN3_06B, vocab_size=600, model_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32,
    max_context_len=1000,
)  # fmt: skip
BIASED = replace(SMALL, num_heads=6, qk_norm=False, qkv_bias=True)
GEMMA = replace(SMALL, qk_norm=False, activation="gelu_tanh", embedding_scale=8.0, float32_norms=True, num_kv_heads=1)
# Windows in one of two layers, with a RoPE of its own, capped scores, and norms behind each part.
GEMMA_2_AND_3 = replace(
    GEMMA, qk_norm=True, windows=(40, 0), local_rope=RopeConfig(500.0), score_scale=0.25, score_softcap=5.0,
    logit_softcap=8.0, post_norms=True,
)  # fmt: skip


def with_few_kv_heads(case: AttentionCase) -> AttentionCase:
    """Of the KV heads, which know nothing of each other, only one; three of as many query heads, and three of 9."""
    left = 3 if case.num_kv_heads in (3, case.num_heads) else 1
    return replace(case, num_heads=left * case.num_heads // case.num_kv_heads, num_kv_heads=left)


CONFIGS = {"qk_norm": SMALL, "qkv_bias": BIASED, "gemma": GEMMA, "wide heads": replace(SMALL, head_size=128)}
CONFIGS["gemma 2 and 3"] = GEMMA_2_AND_3
PREFIXES, ITEMS, READS = batches.PREFIXES, batches.ITEMS, batches.READS
ALONE = [CASE_NAMED[name] for name in ("several prefixes", "ragged items over one prefix", "long items")]
SLOT_HEADS = [(16, 8, 128), (9, 3, 64), (4, 1, 24)]
SCORED, SCORED_CASES = SCORINGS, LAYOUT_CASES
if INTERPRETED:  # which runs a row in some milliseconds
    CASES = tuple(with_few_kv_heads(case) for case in CASES)
    SLOT_HEADS[0] = (4, 2, 128)
    # It has items of all lengths, and with a shorter prefix still one of several blocks.
    ALONE = [replace(ALONE[0], prefix_lens=(200, 31, 200, 5, 31), cached_prefix_lens=(200, 31, 5))]
    CONFIGS = {"qk_norm": SMALL, "gemma 2 and 3": GEMMA_2_AND_3}
    SCORED = (SCORINGS[1], SCORINGS[4])
    SCORED_CASES = tuple(
        with_few_kv_heads(CASE_NAMED[name])
        for name in ("one causal sequence", "several prefixes", "new KV blocks after cached ones")
    )
    PREFIXES, ITEMS, READS = [PREFIXES[0][:140], PREFIXES[1]], [ITEMS[0], ITEMS[1], ITEMS[5]], [0, 1, 0]

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # NumPy's, in the interpreter: padding is garbage
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

if INTERPRETED:
    from tests.backends.torch.cuda.interpreter import allow_loops

    allow_loops()

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float32]


def compiled_or_interpreted(test: Function) -> Function:
    return test if INTERPRETED else pytest.mark.gpu(test)


def kernels() -> list[Any]:
    """Prefix attention for all devices, and that for Hopper."""
    is_hopper = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    return [False, pytest.param(True, marks=pytest.mark.skipif(not is_hopper, reason="not a Hopper GPU"))]


@compiled_or_interpreted
@pytest.mark.parametrize("for_hopper", kernels(), ids=lambda each: "hopper" if each else "any")
@pytest.mark.parametrize("dtype", DTYPES)
class TestAttention:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
    def test_is_right(self, case: AttentionCase, dtype: torch.dtype, for_hopper: bool) -> None:
        check(run(dtype, for_hopper, case.head_size), case, TOLERANCES[dtype], dtype=as_numpy(dtype))

    @pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
    def test_a_segment_alone_gives_the_bits_it_has_beside_others(
        self, case: AttentionCase, dtype: torch.dtype, for_hopper: bool
    ) -> None:
        check_alone(run(dtype, for_hopper, case.head_size), case)

    @pytest.mark.parametrize("case", ALONE[:1], ids=lambda case: case.name)
    def test_scored_tokens_alone_have_the_bits_that_they_have_among_all(
        self, case: AttentionCase, dtype: torch.dtype, for_hopper: bool
    ) -> None:
        attend, batch, inputs = run(dtype, for_hopper, case.head_size), make_batch(case), make_inputs(case)
        expected = attend(batch, inputs)
        tokens = np.random.default_rng(0).integers(0, batch.num_tokens, batch.num_tokens // 3)
        for scored in (tokens, np.sort(tokens), tokens[:1]):
            found = attend(replace(batch, score_tokens=scored), inputs)
            assert np.array_equal(found, expected[scored])

    def test_a_neighbour_that_is_not_finite_stays_by_itself(self, dtype: torch.dtype, for_hopper: bool) -> None:
        (case,) = (each for each in CASES if each.name == "packed sequences")
        attend, batch, inputs = run(dtype, for_hopper, case.head_size), make_batch(case), make_inputs(case)
        base = attend(batch, inputs)
        broken = slice(int(batch.segment_starts[1]), int(batch.segment_starts[2]))
        inputs.k[broken], inputs.v[broken] = np.nan, np.inf
        others = np.r_[0 : broken.start, broken.stop : batch.num_tokens]
        assert np.array_equal(attend(batch, inputs)[others], base[others])


@compiled_or_interpreted
@pytest.mark.parametrize("scoring", SCORED, ids=str)
class TestScorings:
    """Sliding windows, capped scores, other scales: in the kernel for all devices."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("case", SCORED_CASES, ids=lambda case: case.name)
    def test_is_right(self, case: AttentionCase, scoring: Scoring, dtype: torch.dtype) -> None:
        attend = run(dtype, False, case.head_size, scoring)
        check(attend, case, TOLERANCES[dtype], dtype=as_numpy(dtype), scoring=scoring)

    def test_a_segment_alone_gives_the_bits_it_has_beside_others(self, scoring: Scoring) -> None:
        case = replace(ALONE[0], prefix_lens=(300, 31, 300, 5, 31), cached_prefix_lens=(300, 31, 5))
        attend, batch, inputs = run(DTYPES[0], False, case.head_size, scoring), make_batch(case), make_inputs(case)
        together = attend(batch, inputs)
        every_third = np.arange(0, batch.num_tokens, 3)  # as scored tokens
        assert np.array_equal(attend(replace(batch, score_tokens=every_third), inputs), together[every_third])
        check_alone(attend, case)


@pytest.mark.gpu
@pytest.mark.parametrize("for_hopper", kernels()[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_program_that_visits_many_tiles_gives_the_bits_of_one_for_each(
    case: AttentionCase, dtype: torch.dtype, for_hopper: bool
) -> None:
    """These cases have fewer tiles than an H200 has multiprocessors."""
    batch, inputs = make_batch(case), make_inputs(case)
    expected = run(dtype, for_hopper, case.head_size)(batch, inputs)
    assert np.array_equal(run(dtype, for_hopper, case.head_size, num_processors=2)(batch, inputs), expected)


def run(
    dtype: torch.dtype,
    for_hopper: bool,
    head_size: int,
    scoring: Scoring = PLAIN_SCORING,
    num_processors: int | None = None,
) -> Callable[[ForwardBatch, AttentionInputs], Floats]:
    from prefixwise.backends.torch.cuda.attention import HOPPER_TUNING, prefix_tunings
    from tests.backends.torch.cuda.paged_case import paged

    (tuning,) = prefix_tunings(head_size, torch.device("cpu"))
    if for_hopper:
        if not 32 < head_size <= 128 or head_size % 8:
            pytest.skip("a head size that Hopper's kernel does not take")
        tuning = HOPPER_TUNING
    return paged(dtype, DEVICE, prefix=tuning, scoring=scoring, num_processors=num_processors)


def as_numpy(dtype: torch.dtype) -> Any:
    return np.float16 if dtype == torch.float16 else np.float32


def draw_heads(
    num_heads: int, num_kv_heads: int, head_size: int, has_norm: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Queries, keys and values of 7 tokens, the weight of their norm, cosines, sines, and slots in the KV cache."""

    def draw(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)

    num_rope_heads = num_heads + num_kv_heads
    angles = draw(7, head_size // 2, dtype=torch.float32)
    weight = draw(num_rope_heads, head_size) if has_norm else None
    slots = torch.tensor([-1, 3, 0, -1, 9, 8, -1], dtype=torch.int32, device=DEVICE)
    return draw(7, num_rope_heads + num_kv_heads, head_size), weight, angles.cos(), angles.sin(), slots


@compiled_or_interpreted
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SLOT_HEADS)
def test_keys_after_rope_and_values_go_to_their_slots(
    num_heads: int, num_kv_heads: int, head_size: int, has_norm: bool
) -> None:
    from prefixwise.backends.torch.cuda.fused_elementwise import qk_norm_rope_and_cache
    from prefixwise.backends.torch.cuda.kv_cache import KeySource

    num_rope_heads = num_heads + num_kv_heads
    qkv, weight, cos, sin, slots = draw_heads(num_heads, num_kv_heads, head_size, has_norm)
    expected = PLAIN.qk_norm_rope(qkv.clone(), num_rope_heads, weight, 1e-6, cos[:, None], sin[:, None])
    room = torch.full((10, num_kv_heads, head_size), 5.0, device=DEVICE).half()
    cache = KeySource(room.clone(), room.clone())
    qk_norm_rope_and_cache(qkv, weight, 1e-6, cos, sin, slots, cache)
    torch.testing.assert_close(qkv, expected, rtol=2**-9, atol=2**-9)
    cached = [1, 2, 4, 5]
    assert torch.equal(cache.keys[slots[cached].long()], qkv[cached, num_heads:num_rope_heads])
    assert torch.equal(cache.values[slots[cached].long()], qkv[cached, num_rope_heads:])
    untouched = [1, 2, 4, 5, 6, 7]
    assert (cache.keys[untouched] == 5).all()
    assert (cache.values[untouched] == 5).all()


def make_backend(
    config: ModelConfig,
    *,
    is_paged: bool = True,
    max_loras: int = 0,
    is_wide: bool | None = None,
    kv_format: KVFormat = "auto",
    row_counts: RowCounts | None = None,
) -> TorchBackend:
    """Half precision; in the interpreter without graphs. `is_wide`: with columns for adapters, or without.
    `row_counts`: of GEMMs, in the interpreter."""
    from prefixwise.backends.torch.cuda.attention import PagedAttention
    from prefixwise.backends.torch.cuda.lora_kernels import add_lora
    from prefixwise.backends.torch.cuda.runner import PagedRunner

    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:  # on CPUs without float16, too
            patch.setattr("prefixwise.backends.torch.backend.resolve_compute_dtype", lambda dtype, _: dtype)
            patch.setattr("prefixwise.backends.torch.backend.keeps_bits", lambda *_: True)  # probes many GEMMs
        if is_wide is not None:
            patch.setattr("prefixwise.backends.torch.backend.can_widen", lambda *_: is_wide)
        backend = TorchBackend(
            random_checkpoint(config),
            dtype="float16",
            device=DEVICE,
            token_budget=2048,
            prefix_cache_bytes=1 << 26,
            max_loras=max_loras,
            # Which a CPU refuses.
            kv_cache_dtype="fp8" if kv_format == "fp8" and not INTERPRETED else "auto",
            prefix_attention_dtype="fp8" if kv_format == "fp8_keys" and not INTERPRETED else "auto",
        )
    if not is_paged:
        backend._paged = None
        if backend._loras is not None:
            backend._loras.add_kernel = None
    elif INTERPRETED:
        attention = PagedAttention.for_model(config, torch.device(DEVICE))
        if backend._loras is not None:
            backend._loras.add_kernel = add_lora
        backend._transformer.row_counts = row_counts
        backend._paged = PagedRunner(
            backend._transformer,
            attention,
            num_pages=40,
            max_tokens=2048,
            captures=False,
            loras=backend._loras,
            kv_format=kv_format,
        )
    assert (backend._paged is not None) == is_paged
    return backend


def joined_batch(cached: Blocks = (), *, caches: bool = True) -> ForwardBatch:
    """The blocks of a prefix, and items that read them in the same forward."""
    segments = Segments()
    number = segments.add_prefix(PREFIXES[0], cached)
    blocks = tuple(range(len(segments.pieces)))
    for item in ITEMS:
        segments.add(item, number, len(PREFIXES[0]), is_scored=True)
    return replace(segments.batch(Layout.EXTEND), cache_segments=blocks if caches else ())


@compiled_or_interpreted
class TestRunner:
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    def test_scores_are_those_of_the_path_without_pages(self, config: ModelConfig) -> None:
        def logits(backend: TorchBackend) -> Floats:
            batches = [
                extend_batch(ITEMS, READS, prefill(backend, PREFIXES)),
                sequences_batch(PREFIXES[0], [ITEMS[:2], ITEMS[2:]], Layout.PACKED),
                sequences_batch(PREFIXES[0], [[item] for item in ITEMS], Layout.CAUSAL),
                sequences_batch(PREFIXES[0], [ITEMS], Layout.PACKED, "dense"),
                joined_batch(),
            ]
            return np.stack([backend.forward(batch).label_logits for batch in batches])

        found, expected = logits(make_backend(config)), logits(make_backend(config, is_paged=False))
        assert np.abs(found - expected).max() <= 0.004 * np.abs(expected).max()

    @pytest.mark.parametrize("config", [CONFIGS["qk_norm"], CONFIGS["gemma 2 and 3"]], ids=["plain", "windows"])
    def test_any_number_of_scored_tokens_and_of_rows_of_a_gemm(
        self, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Fewer scored tokens than the rows that their end is padded to, more, and as many as there are tokens."""
        plain, backend = make_backend(config, is_paged=False), make_backend(config, row_counts=RowCounts(16, 48))
        assert backend._paged is not None
        if INTERPRETED:  # elsewhere these counts may give other bits
            monkeypatch.setattr(invariant_rows, "MAX_GEMM_ROWS", 16 * 16)
            assert backend._paged.buckets[:3] == (48, 64, 80)
        batch = joined_batch()
        random = np.random.default_rng(0)
        some = [random.integers(0, batch.num_tokens, count) for count in (5, 130)]
        for tokens in (*some, np.arange(batch.num_tokens)):
            scored = replace(batch, score_tokens=tokens, label_ids=np.tile(batch.label_ids[:1], (len(tokens), 1)))
            found, expected = (each.forward(scored).label_logits for each in (backend, plain))
            assert np.abs(found - expected).max() <= 0.004 * np.abs(expected).max()

    def test_blocks_of_this_forward_are_read_as_cached_ones_are(self) -> None:
        backend = make_backend(SMALL)
        joined = backend.forward(joined_batch())
        cached = backend.forward(extend_batch(ITEMS, [0] * len(ITEMS), [joined.blocks]))
        assert np.array_equal(joined.label_logits, cached.label_logits)
        temporary = backend.forward(joined_batch(joined.blocks[:1], caches=False))
        assert np.array_equal(temporary.label_logits, cached.label_logits)

    def test_pages_are_released(self) -> None:
        backend = make_backend(SMALL)
        assert backend._paged is not None
        pages = backend._paged.kv_cache._pages
        at_start = pages.num_free
        blocks = prefill(backend, PREFIXES)
        num_cached = sum(map(len, blocks))
        assert pages.num_free == at_start - num_cached
        backend.forward(joined_batch(blocks[0][:1], caches=False))
        assert pages.num_free == at_start - num_cached, "temporary pages are released"
        blocks[0][1].release()
        assert pages.num_free == at_start - num_cached + 1
        del blocks
        assert pages.num_free == at_start

    @pytest.mark.parametrize("place", ["in the layers", "in the head"])
    def test_pages_of_a_forward_that_fails_are_released_at_once(
        self, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Even while its exception, which holds the frames that it came through, is held itself."""
        backend = make_backend(SMALL)
        assert backend._paged is not None

        def fail(*_: Any) -> None:
            raise RuntimeError("out of memory")

        if place == "in the layers":
            monkeypatch.setattr(backend._paged._cuda_graphs, "run", fail)
        else:
            monkeypatch.setattr(backend, "_read_head", fail)
        pages = backend._paged.kv_cache._pages
        at_start = pages.num_free
        with pytest.raises(RuntimeError, match="out of memory") as held:
            backend.start(joined_batch())
        assert pages.num_free == at_start, held

    def test_every_program_can_be_prepared(self) -> None:
        backend = make_backend(SMALL)
        assert backend._paged is not None
        programs = backend.programs(max_dense_len=0)
        titles = [program.title for program in programs]
        assert len(set(titles)) == len(titles)
        smallest = f"{backend._paged.buckets[0]} tokens"
        assert titles[-3:] == [f"prefill, {smallest}", f"sequences, {smallest}", f"extend, {smallest}"]
        for program in programs[-3:]:
            assert program.lower is None, "nothing is compiled beside others"
            program.prepare()
        if not INTERPRETED:
            assert backend.num_compilations == 3

    def test_sequences_can_be_left_out_and_nothing_else_needs_them(self) -> None:
        """Items without a prefix run the program that they run beside others."""
        backend, segments = make_backend(SMALL), Segments()
        for item in ITEMS[:2]:
            segments.add(item, -1, 0, is_scored=True)
        programs = backend.programs(max_dense_len=0, has_sequences=False)
        assert {program.title.partition(",")[0] for program in programs} == {"prefill", "extend"}
        for program in programs[-2:]:
            program.prepare()
        num_before = backend.num_compilations
        backend.forward(segments.batch(Layout.EXTEND))
        assert backend.num_compilations == num_before
        assert backend._paged is not None and backend._paged._spec(segments.batch(Layout.EXTEND)).reads == "cache"


@pytest.mark.gpu
class TestGraphs:
    def test_forwards_in_flight_do_not_disturb_each_other(self) -> None:
        backend = make_backend(SMALL)
        prefixes = prefill(backend, PREFIXES)
        orders = [np.random.default_rng(seed).permutation(6) for seed in range(8)]
        batches = [extend_batch([ITEMS[i] for i in order], [READS[i] for i in order], prefixes) for order in orders]
        expected = backend.forward(extend_batch(ITEMS, READS, prefixes)).label_logits
        running = [backend.start(batch) for batch in batches]
        for order, each in zip(orders, running, strict=True):
            assert np.array_equal(each.wait().label_logits, expected[order])

    def test_one_graph_serves_all_batches_of_its_size(self) -> None:
        backend = make_backend(SMALL)
        prefixes = prefill(backend, PREFIXES)
        backend.forward(extend_batch(ITEMS, READS, prefixes))
        captured = backend.num_compilations
        for number in range(1, 6):
            backend.forward(extend_batch(ITEMS[:number], READS[:number], prefixes))
        assert backend.num_compilations == captured

    def test_a_batch_beyond_the_largest_bucket_runs(self) -> None:
        backend = make_backend(SMALL)
        assert backend._paged is not None
        items = [ITEMS[2]] * 16  # 2240 tokens
        prefixes = prefill(backend, PREFIXES[1:2])
        found = backend.forward(extend_batch(items, [0] * 16, prefixes)).label_logits
        alone = backend.forward(extend_batch(items[:1], [0], prefixes)).label_logits
        np.testing.assert_allclose(found, np.repeat(alone, 16, 0), rtol=0, atol=0.01)
