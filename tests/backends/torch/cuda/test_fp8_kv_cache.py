"""The KV cache in FP8 and prefix attention in FP8: what is written, what attention makes of it, and the runner;
isolation and memory on a GPU.

The kernels run compiled on a GPU, and in Triton's interpreter (`test_interpreted.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.elementwise import ElementwiseOps
from prefixwise.backends.torch.fp8 import FP8, quantise_heads, round_to_fp8
from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.batch import Layout
from tests.attention_cases import CASE_NAMED, SCORINGS, AttentionCase, Scoring, check_alone, make_batch, make_inputs
from tests.attention_cases import PLAIN as PLAIN_SCORING
from tests.backends.torch.batches import extend_batch, prefill, sequences_batch
from tests.backends.torch.cuda import test_paged
from tests.backends.torch.cuda.test_paged import (
    DEVICE,
    DTYPES,
    INTERPRETED,
    ITEMS,
    PREFIXES,
    READS,
    SMALL,
    TOLERANCES,
    compiled_or_interpreted,
    draw_heads,
    joined_batch,
    kernels,
    make_backend,
    with_few_kv_heads,
)

pytestmark = [*test_paged.pytestmark, pytest.mark.filterwarnings("ignore:All-NaN slice")]  # padding, as there

# They read cached blocks: whole key tiles and a short one.
READERS = [CASE_NAMED[name] for name in ("several prefixes", "new KV blocks after cached ones")]
WINDOWED = SCORINGS[4]
FORMATS = ("fp8", "fp8_keys")
SLOT_HEADS = [(16, 8, 128), (9, 3, 64), (4, 1, 48)]
CONFIGS = {"qk_norm": SMALL, "gemma 2 and 3": test_paged.GEMMA_2_AND_3}
READERS.append(replace(READERS[1], name="heads of 48", num_heads=4, num_kv_heads=2, head_size=48))
if INTERPRETED:
    READERS = [
        replace(test_paged.ALONE[0], num_heads=2, num_kv_heads=1),
        with_few_kv_heads(READERS[1]),
        READERS[2],
    ]
    SLOT_HEADS[0] = (4, 2, 128)
    CONFIGS.pop("gemma 2 and 3")


@compiled_or_interpreted
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SLOT_HEADS)
def test_codes_of_keys_after_rope_and_of_values_go_to_their_slots(
    num_heads: int, num_kv_heads: int, head_size: int, has_norm: bool
) -> None:
    from prefixwise.backends.torch.cuda.fused_elementwise import qk_norm_rope_and_cache
    from prefixwise.backends.torch.cuda.kv_cache import KeySource

    num_rope_heads = num_heads + num_kv_heads
    qkv, weight, cos, sin, slots = draw_heads(num_heads, num_kv_heads, head_size, has_norm)
    qkv[2, num_rope_heads:] = 0  # zeros have no largest number
    qkv[4, num_rope_heads:] *= 3000
    plain = qkv.clone()

    def cache(dtype: torch.dtype) -> KeySource:
        keys, values = (torch.full((16, num_kv_heads, head_size), 5.0, device=DEVICE).to(dtype) for _ in range(2))
        scales = torch.full((2, num_kv_heads, 16), 99, dtype=torch.uint8, device=DEVICE)
        return KeySource(keys, values, 0, 0, *(scales if dtype == FP8 else (None, None)))

    dense, fp8 = cache(torch.float16), cache(FP8)
    qk_norm_rope_and_cache(plain, weight, 1e-6, cos, sin, slots, dense)
    qk_norm_rope_and_cache(qkv, weight, 1e-6, cos, sin, slots, fp8)
    assert torch.equal(qkv, plain), "what this forward computes with is not rounded"
    written = slots[slots >= 0].long()
    untouched = torch.tensor([slot for slot in range(16) if slot not in written.tolist()], device=DEVICE)
    assert len(slots) - len(written) == 3
    for codes, scales, exact in (
        (fp8.keys, fp8.key_scales, dense.keys),
        (fp8.values, fp8.value_scales, dense.values),
    ):
        assert scales is not None
        expected, exponents = quantise_heads(exact)
        assert torch.equal(codes[written].view(torch.uint8), expected[written].view(torch.uint8))
        assert torch.equal(scales.T[written], exponents[written])
        assert (codes[untouched].float() == 5).all()
        assert (scales.T[untouched] == 99).all()


@compiled_or_interpreted
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SLOT_HEADS[-2:])
def test_prefix_attention_in_fp8_gets_codes_of_all_queries_and_of_cached_keys(
    num_heads: int, num_kv_heads: int, head_size: int
) -> None:
    from prefixwise.backends.torch.cuda.fused_elementwise import qk_norm_rope_and_cache
    from prefixwise.backends.torch.cuda.kv_cache import KeySource

    qkv, _, cos, sin, slots = draw_heads(num_heads, num_kv_heads, head_size, has_norm=False)
    qkv[4] *= 3000  # beyond 448, which is the largest code
    plain, room = qkv.clone(), torch.full((16, num_kv_heads, head_size), 5.0, device=DEVICE)
    dense, fp8 = (KeySource(room.to(dtype), room.half()) for dtype in (torch.float16, FP8))
    codes = torch.zeros(len(qkv), num_heads, head_size, device=DEVICE).to(FP8)
    qk_norm_rope_and_cache(plain, None, 1e-6, cos, sin, slots, dense)
    qk_norm_rope_and_cache(qkv, None, 1e-6, cos, sin, slots, fp8, codes)
    assert torch.equal(qkv, plain), "what self-attention computes with is not rounded"
    assert torch.equal(fp8.values, dense.values)
    for found, exact in ((codes, plain[:, :num_heads]), (fp8.keys, dense.keys)):
        assert torch.equal(found.view(torch.uint8), round_to_fp8(exact).view(torch.uint8))


def kinds() -> list[Any]:
    """The kernels of prefix attention, what the cache holds that they read (codes with scales, or of keys alone), and
    how tokens score keys."""
    any_device, hopper = kernels()
    return [
        pytest.param(any_device, "fp8", PLAIN_SCORING, id="any"),
        pytest.param(any_device, "fp8", WINDOWED, id="any, windows"),
        pytest.param(any_device, "fp8_keys", PLAIN_SCORING, id="any, keys"),
        *([] if INTERPRETED else [pytest.param(any_device, "fp8_keys", WINDOWED, id="any, keys, windows")]),
        pytest.param(True, "fp8_keys", PLAIN_SCORING, id="hopper, keys", marks=hopper.marks),
    ]


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("for_hopper", "cache", "scoring"), kinds())
class TestAttention:
    @pytest.mark.parametrize("case", READERS, ids=lambda case: case.name)
    def test_it_is_that_over_the_numbers_of_the_codes(
        self, case: AttentionCase, for_hopper: bool, cache: Any, dtype: torch.dtype, scoring: Scoring
    ) -> None:
        batch, inputs = make_batch(case), make_inputs(case)
        caches = (cache, cache.replace("fp8", "rounded"), "exact")
        found, expected, exact = (attend(dtype, case, scoring, each, for_hopper)(batch, inputs) for each in caches)
        if INTERPRETED:
            assert np.array_equal(found, expected)
        assert np.abs(found - expected).max() <= TOLERANCES[dtype]
        error = np.abs(found - exact).mean() / np.abs(exact).mean()
        assert 0.005 < error <= 0.1, "rounded, and not more than that"

    def test_a_segment_alone_gives_the_bits_it_has_beside_others(
        self, for_hopper: bool, cache: Any, dtype: torch.dtype, scoring: Scoring
    ) -> None:
        check_alone(attend(dtype, READERS[0], scoring, cache, for_hopper), READERS[0])

    def test_scored_tokens_alone_have_the_bits_that_they_have_among_all(
        self, for_hopper: bool, cache: Any, dtype: torch.dtype, scoring: Scoring
    ) -> None:
        run = attend(dtype, READERS[0], scoring, cache, for_hopper)
        batch, inputs = make_batch(READERS[0]), make_inputs(READERS[0])
        scored = np.arange(0, batch.num_tokens, 3)
        assert np.array_equal(run(replace(batch, score_tokens=scored), inputs), run(batch, inputs)[scored])


def attend(dtype: torch.dtype, case: AttentionCase, scoring: Scoring, cache: Any, for_hopper: bool) -> Any:
    from prefixwise.backends.torch.cuda.attention import HOPPER_TUNING, prefix_tunings
    from tests.backends.torch.cuda.paged_case import paged

    (tuning,) = prefix_tunings(case.head_size, torch.device("cpu"))
    return paged(dtype, DEVICE, prefix=HOPPER_TUNING if for_hopper else tuning, scoring=scoring, cache=cache)


@compiled_or_interpreted
class TestRunner:
    @pytest.mark.parametrize("kv_format", FORMATS)
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    def test_scores_are_near_those_of_an_exact_cache(self, config: Any, kv_format: Any) -> None:
        def logits(backend: TorchBackend) -> Any:
            return backend.forward(extend_batch(ITEMS, READS, prefill(backend, PREFIXES))).label_logits

        found, exact = logits(make_backend(config, kv_format=kv_format)), logits(make_backend(config))
        assert 0 < np.abs(found - exact).max() <= 0.1 * np.abs(exact).max()

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_cold_and_cached_read_the_same_codes(self, kv_format: Any) -> None:
        backend = make_backend(SMALL, kv_format=kv_format)
        assert backend._paged is not None
        assert backend._paged.kv_cache.keys.dtype == FP8
        joined = backend.forward(joined_batch())
        cached = backend.forward(extend_batch(ITEMS, [0] * len(ITEMS), [joined.blocks]))
        assert np.array_equal(joined.label_logits, cached.label_logits)
        temporary = backend.forward(joined_batch(joined.blocks[:1], caches=False))
        assert np.array_equal(temporary.label_logits, cached.label_logits)
        alone = backend.forward(extend_batch(ITEMS[:1], [0], [joined.blocks]))
        assert np.array_equal(alone.label_logits, cached.label_logits[:1])

    @pytest.mark.parametrize("kv_format", FORMATS)
    def test_sequences_that_read_no_cache_are_not_rounded(self, kv_format: Any) -> None:
        batches = [
            sequences_batch(PREFIXES[0], [ITEMS[:2], ITEMS[2:]], Layout.PACKED),
            sequences_batch(PREFIXES[0], [ITEMS], Layout.PACKED, "dense"),
        ]
        found, exact = (
            [backend.forward(batch).label_logits for batch in batches]
            for backend in (make_backend(SMALL, kv_format=kv_format), make_backend(SMALL))
        )
        assert np.array_equal(found, exact)


RANDOM = np.random.default_rng(5)
WIDE = replace(QWEN3_06B, num_layers=2, vocab_size=20_000)
WIDE_ITEMS, WIDE_QUERY = RANDOM.integers(0, 20_000, (600, 20)), RANDOM.integers(0, 20_000, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["kv_cache_dtype", "prefix_attention_dtype"])
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_number_of_items_and_a_cached_prefix_move_no_bit(quantization: str | None, option: str) -> None:
    options: Any = {"quantization": quantization, option: "fp8"}
    backend = TorchBackend(random_checkpoint(WIDE), device="cuda", **options)
    assert backend.info.batch_invariant
    assert (getattr(backend.info, option), backend.info.quantization) == ("fp8", quantization)
    engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)

    def scores(items: Any, algorithm: str = "prefill_extend") -> list[list[float] | None]:
        body = {"query": WIDE_QUERY, "items": list(items), "label_token_ids": [1, 2, 3], "score_mode": "logit"}
        return engine.score(parse_score_request({**body, "algorithm": algorithm})).scores

    try:
        cold, fullest = scores(WIDE_ITEMS), scores(WIDE_ITEMS)
        assert cold == fullest
        for count in (1, 3, 17, 64, 200, 333):
            assert scores(WIDE_ITEMS[:count]) == fullest[:count], count
        assert scores(WIDE_ITEMS[::-1]) == fullest[::-1]
        packed = np.array(scores(WIDE_ITEMS[:40], "packed"))
        difference = np.abs(packed - np.array(fullest[:40])).max()
        assert 0 < difference <= 0.2 * np.abs(packed).max(), "packed sequences read the batch, which is not rounded"
    finally:
        engine.close()


@pytest.mark.gpu
def test_twice_the_blocks_fit_the_same_memory() -> None:
    sizes, room = {}, 1 << 28
    for name in ("auto", "fp8"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        backend = TorchBackend(
            random_checkpoint(WIDE), device="cuda", kv_cache_dtype=name, prefix_cache_bytes=room, token_budget=2048
        )
        assert backend._paged is not None
        assert room - backend.info.kv_block_bytes < backend._paged.kv_cache.num_bytes <= room
        sizes[name] = backend.info.num_kv_blocks, torch.cuda.memory_allocated() - before
        assert backend._paged.kv_cache.num_pages == backend.info.num_kv_blocks
        backend.close()
        del backend
    assert 1.98 < sizes["fp8"][0] / sizes["auto"][0] < 2
    assert sizes["fp8"][1] < sizes["auto"][1] + (8 << 20), "twice the page table, and nothing else"


@pytest.mark.gpu
class TestRefusals:
    def test_float32(self) -> None:
        with pytest.raises(BackendError, match="kv_cache_dtype fp8 needs dtype bfloat16 or float16, got"):
            TorchBackend(random_checkpoint(SMALL), device="cuda", dtype="float32", kv_cache_dtype="fp8")

    def test_where_triton_does_not_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from prefixwise.backends.torch.elementwise import PLAIN

        def plain(*_: Any) -> ElementwiseOps:
            return PLAIN

        monkeypatch.setattr("prefixwise.backends.torch.backend.choose_elementwise_ops", plain)
        with pytest.raises(BackendError, match="kv_cache_dtype fp8 needs Triton"):
            TorchBackend(random_checkpoint(SMALL), device="cuda", kv_cache_dtype="fp8")

    def test_where_the_runner_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr("prefixwise.backends.torch.cuda.runner.PagedRunner.probe", fail)
        with pytest.raises(BackendError, match="which does not work here: no such kernel"):
            TorchBackend(random_checkpoint(SMALL), device="cuda", kv_cache_dtype="fp8")
