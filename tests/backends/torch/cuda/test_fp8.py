"""FP8 on CUDA: its kernels against plain PyTorch, the model against its emulation, isolation, and memory.

The kernels run compiled on a GPU, and in Triton's interpreter (`test_interpreted.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch import model
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.elementwise import PLAIN
from prefixwise.backends.torch.fp8 import FP8, KVFormat, fp8_linear, quantise_activations, quantise_rows, round_to_fp8
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.weights import load_weights
from prefixwise.backends.torch.workers import Workers
from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.fp8 import ACTIVATION_PART
from prefixwise.models.config import ModelConfig
from tests.attention_cases import CASE_NAMED, make_batch, make_inputs
from tests.backends.torch.batches import ITEMS, PREFIXES, READS, extend_batch, prefill
from tests.backends.torch.cuda.test_paged import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NUM_ROWS = 4 if INTERPRETED else 2000
# The interpreter cuts bfloat16 where a device rounds it.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
EPS = 1e-6
SMALL = replace(
    QWEN3_06B, vocab_size=600, model_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32,
    max_context_len=1000,
)  # fmt: skip
BIASED = replace(SMALL, num_heads=6, qk_norm=False, qkv_bias=True)

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),  # NumPy's, in the interpreter: padding is garbage
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
]

if INTERPRETED:
    from tests.backends.torch.cuda.interpreter import allow_loops

    allow_loops()

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_or_interpreted(test: Function) -> Function:
    return test if INTERPRETED else pytest.mark.gpu(test)


def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=random)).to(DEVICE, dtype)


def outputs(num_rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Codes and scales that a kernel has to write; NaN before."""
    codes = torch.full((num_rows, size), 127, dtype=torch.uint8, device=DEVICE).view(FP8)
    return codes, torch.full((num_rows,), float("nan"), device=DEVICE)


def assert_codes(found: tuple[Tensor, Tensor], rows: Tensor, *, are_activations: bool = False) -> None:
    """Those of the rows. A rounding of a row that falls the other way may move a code by one, seldom."""
    codes, scales = (quantise_activations if are_activations else quantise_rows)(rows)
    torch.testing.assert_close(found[1], scales, rtol=2**-7, atol=0)
    assert (found[0].float() == codes.float()).float().mean() > 0.95
    if INTERPRETED:  # which rounds up to a power of two wrongly: 63.9 becomes 32
        return
    numbers, expected = (each.float() * scale[:, None] for each, scale in (found, (codes, scales)))
    torch.testing.assert_close(numbers, expected, rtol=2**-3, atol=2**-6 * float(scales.max()))


@compiled_or_interpreted
class TestKernels:
    @pytest.mark.parametrize("size", [64, 1000, 1024, 4096])
    def test_rows_and_norms(self, size: int) -> None:
        from prefixwise.backends.torch.cuda.fp8_kernels import add_norm_fp8, norm_fp8, quantise

        x, delta, weight = draw(NUM_ROWS, size, scale=3), draw(NUM_ROWS + 1, size)[1:], draw(size)
        x[1] = 0  # a row of zeros has no largest number to divide by
        found = outputs(NUM_ROWS, size)
        quantise(x, *found)
        assert_codes(found, x)
        assert INTERPRETED or torch.equal(found[0].float(), quantise_rows(x)[0].float())
        norm_fp8(x, weight, EPS, *found)
        assert_codes(found, PLAIN.norm(x, weight, EPS))
        residual, normed = PLAIN.add_norm(x, delta, weight, EPS)
        add_norm_fp8(x, delta.contiguous(), weight, EPS, *found)
        assert torch.equal(x, residual)
        assert_codes(found, normed)

    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
    @pytest.mark.parametrize("size", [96, 3072] if INTERPRETED else [96, 3072, 12_288])
    def test_the_activation(self, size: int, activation: Any) -> None:
        from prefixwise.backends.torch.cuda.fp8_kernels import gate_fp8

        gate_up, found = draw(NUM_ROWS, 2 * size), outputs(NUM_ROWS, size)
        gate_fp8(gate_up, activation, *found)
        assert_codes(found, PLAIN.gate(gate_up, activation), are_activations=True)

    @pytest.mark.parametrize("size", [32, 1000, 3072])
    def test_activations_whose_parts_have_several_scales(self, size: int) -> None:
        from prefixwise.backends.torch.cuda.fp8_kernels import quantise, rescale

        rows = draw(NUM_ROWS, size)
        rows[:, ::40] *= 2 ** (3 * torch.arange(NUM_ROWS, device=DEVICE) % 12)[:, None]
        rows[1] = 0
        expected, found = quantise_activations(rows), outputs(NUM_ROWS, size)
        quantise(rows, *found, are_activations=True)
        assert_codes(found, rows, are_activations=True)
        assert INTERPRETED or torch.equal(found[0].float(), expected[0].float())
        if size % ACTIVATION_PART == 0:  # what a GEMM leaves of each part
            parts = [quantise_activations(part) for part in torch.split(rows, ACTIVATION_PART, 1)]
            codes = torch.cat([part for part, _ in parts], 1)
            exponents = torch.stack([scales.log2().to(torch.uint8) + 127 for _, scales in parts])
            rescale(codes, exponents, found[1])
            assert torch.equal(found[1], expected[1])
            assert torch.equal(codes.float(), expected[0].float())

    def test_a_row_has_the_same_bits_alone(self) -> None:
        from prefixwise.backends.torch.cuda.fp8_kernels import gate_fp8, norm_fp8

        x, gate_up, weight = draw(NUM_ROWS, 1024), draw(NUM_ROWS, 6144), draw(1024)
        together, gated = outputs(NUM_ROWS, 1024), outputs(NUM_ROWS, 3072)
        norm_fp8(x, weight, EPS, *together)
        gate_fp8(gate_up, "silu", *gated)
        for row in (slice(0, 1), slice(2, 3), slice(NUM_ROWS - 1, None)):
            alone, gated_alone = outputs(1, 1024), outputs(1, 3072)
            norm_fp8(x[row].clone(), weight, EPS, *alone)
            gate_fp8(gate_up[row].clone(), "silu", *gated_alone)
            for found, expected in zip((*alone, *gated_alone), (*together, *gated), strict=True):
                assert torch.equal(found.view(torch.uint8), expected[row].contiguous().view(torch.uint8))


def attentions() -> list[Any]:
    """Cases, what the KV cache holds where they read one, and the kernels of prefix attention. On a GPU all, and with
    few programs, too: each then has many tiles."""
    any_device, hopper = kernels()
    if INTERPRETED:
        return [("packed sequences", "exact", any_device), ("several prefixes", "fp8_keys", any_device)]
    found: list[Any] = []
    for name, case in CASE_NAMED.items():
        caches = ("exact", "fp8_keys") if any(case.cached_prefix_lens) and case.head_size >= 32 else ("exact",)
        found += [pytest.param(name, cache, any_device) for cache in caches]
        if 32 < case.head_size <= 128 and case.head_size % 8 == 0:
            found += [pytest.param(name, cache, True, marks=hopper.marks) for cache in caches]
    return [*found, pytest.param("several prefixes", "fp8", any_device)]


@compiled_or_interpreted
@pytest.mark.parametrize("num_processors", [None] if INTERPRETED else [None, 2])
@pytest.mark.parametrize(("name", "cache", "for_hopper"), attentions())
def test_attention_s_result_in_fp8(name: str, cache: Any, for_hopper: bool, num_processors: int | None) -> None:
    """Of tokens that read a prefix and of those that do not: the codes of what is else the result."""
    from prefixwise.backends.torch.cuda.attention import HOPPER_TUNING, prefix_tunings
    from tests.backends.torch.cuda.paged_case import paged

    case = CASE_NAMED[name]
    batch, inputs = make_batch(case), make_inputs(case)
    (tuning,) = prefix_tunings(case.head_size, torch.device("cpu"))
    tuning = HOPPER_TUNING if for_hopper else tuning
    found, plain = (
        paged(DTYPE, DEVICE, tuning, cache=cache, num_processors=num_processors, has_codes=has_codes)(batch, inputs)
        for has_codes in (True, False)
    )
    real = slice(batch.segment_starts[-1])  # no program writes padding
    assert np.array_equal(found[real], round_to_fp8(torch.from_numpy(plain[real])).float())
    assert np.abs(plain[real]).max() > 0.1, "not codes of zeros"


def emulated(config: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> TorchBackend:
    """The same codes and scales on a CPU, multiplied in float32, with plain operations between."""
    backend = TorchBackend(random_checkpoint(config), dtype="bfloat16", device="cpu")
    weights = load_weights(random_checkpoint(config), dtype, torch.device("cpu"), is_fp8=True)
    backend._transformer = Transformer(config, weights, None, Workers(None), PLAIN, dtype)
    backend._dtype = dtype
    return backend


def logits(backend: TorchBackend) -> Any:
    return backend.forward(extend_batch(ITEMS, READS, prefill(backend, PREFIXES))).label_logits


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has the whole backend")
@pytest.mark.parametrize("kv_format", ["auto", "fp8", "fp8_keys"])
class TestRunner:
    def test_scores_in_the_interpreter(self, kv_format: KVFormat, monkeypatch: pytest.MonkeyPatch) -> None:
        from prefixwise.backends.torch.cuda.attention import PagedAttention
        from prefixwise.backends.torch.cuda.runner import PagedRunner

        monkeypatch.setattr(model, "fp8_linear", lambda *given: fp8_linear(*given).to(DTYPE))
        plain, paged = (emulated(BIASED, DTYPE) for _ in range(2))
        attention = PagedAttention.for_model(BIASED, torch.device("cpu"))
        sizes: Any = {"num_pages": 40, "max_tokens": 2048, "captures": False}
        paged._paged = PagedRunner(paged._transformer, attention, kv_format=kv_format, **sizes)
        found, expected = logits(paged), logits(plain)
        assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("config", [SMALL, BIASED, replace(QWEN3_06B, num_layers=4, vocab_size=600)])
def test_scores_are_those_of_the_emulation(config: ModelConfig, is_paged: bool) -> None:
    backend = TorchBackend(random_checkpoint(config), device="cuda", quantization="fp8")
    assert backend._paged is not None
    if not is_paged:
        backend._paged = None
    found, expected = logits(backend), logits(emulated(config))
    dense = logits(TorchBackend(random_checkpoint(config), dtype="float32", device="cpu"))
    largest = np.abs(dense).max()
    assert np.abs(found - expected).max() <= 0.1 * largest, "the codes are the same, but for roundings of bfloat16"
    assert 0 < np.abs(found - dense).max() <= 0.3 * largest


WIDTHS = {
    1024: replace(QWEN3_06B, num_layers=2, vocab_size=20_000),
    4096: replace(
        QWEN3_06B, num_layers=2, model_size=4096, mlp_size=12_288, num_heads=32, num_kv_heads=8, vocab_size=20_000
    ),
}
RANDOM = np.random.default_rng(5)
WIDE_ITEMS, WIDE_QUERY = RANDOM.integers(0, 20_000, (600, 20)), RANDOM.integers(0, 20_000, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quantization", [None, "fp8"])
class TestIsolationByDefault:
    """In bfloat16 and in FP8, with no option for it: the number of items moves no bit, nor does a cached prefix."""

    def test_across_buckets(self, width: int, quantization: str | None) -> None:
        backend = TorchBackend(random_checkpoint(WIDTHS[width]), device="cuda", quantization=quantization)
        assert backend.info.batch_invariant
        engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)

        def scores(items: Any, algorithm: str = "prefill_extend") -> list[list[float] | None]:
            body = {"query": WIDE_QUERY, "items": list(items), "label_token_ids": [1, 2, 3], "score_mode": "logit"}
            return engine.score(parse_score_request({**body, "algorithm": algorithm})).scores

        cold, fullest = scores(WIDE_ITEMS), scores(WIDE_ITEMS)
        assert cold == fullest
        for count in (1, 3, 5, 10, 17, 26, 39, 64, 100, 200, 333):
            assert scores(WIDE_ITEMS[:count]) == fullest[:count], count
        assert scores(WIDE_ITEMS[::-1]) == fullest[::-1]
        packed = scores(WIDE_ITEMS[:40], "packed")
        assert scores(WIDE_ITEMS[:1], "packed") == packed[:1]
        engine.close()


@pytest.mark.gpu
def test_loading_never_needs_the_memory_of_the_bfloat16_model() -> None:
    config = replace(WIDTHS[4096], num_layers=4, vocab_size=512)
    checkpoint, device = random_checkpoint(config), torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    weights = load_weights(checkpoint, torch.bfloat16, device, is_fp8=True)
    peak, size = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    num_weights = sum(each.numel() for each in (weights.layers[0].qkv, weights.layers[0].o)) * config.num_layers
    assert size > num_weights
    assert peak <= size + (64 << 20)


@pytest.mark.gpu
def test_float16_is_refused() -> None:
    with pytest.raises(BackendError, match="quantization fp8 needs dtype bfloat16"):
        TorchBackend(random_checkpoint(SMALL), device="cuda", dtype="float16", quantization="fp8")
