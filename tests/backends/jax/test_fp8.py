"""FP8 in JAX: its numbers are PyTorch's, a forward is that of PyTorch's emulation, and loading makes no second copy.

On a CPU the codes are multiplied in float32. GPU tests hold cuBLASLt's GEMMs to that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint, repeated_checkpoint
from prefixwise.backends.jax import assembly, fp8_loader, weight_loader
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.backends.jax.backend import JaxBackend
from prefixwise.backends.jax.fp8 import FP8, fp8_linear, quantise_activations, quantise_rows
from prefixwise.backends.jax.inputs import ProgramSpec
from prefixwise.backends.jax.mesh import make_mesh
from prefixwise.backends.jax.placement import HeadPlacement
from prefixwise.backends.jax.weights import ModelWeights, load_weights, weight_shapes
from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.config import ExpertsConfig, ModelConfig
from prefixwise.models.sources import open_checkpoint
from tests.backends.torch.batches import ITEMS, PREFIXES, extend_batch, prefill
from tests.quantised_checkpoints import make_fp8

MATRICES = ("qkv", "o", "gate_up", "down")
RANDOM = np.random.default_rng(3)
SMALL = replace(
    QWEN3_06B, vocab_size=600, model_size=64, mlp_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32,
    max_context_len=1000,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("quick_compilation")
BIASED = replace(SMALL, num_heads=6, qk_norm=False, qkv_bias=True)


def bits(array: Any) -> Any:
    return np.asarray(array).view(np.uint8)


def draw_rows() -> Any:
    """Rows of many sizes, one of zeros, one of numbers that are almost zeros; and one with a number that activations
    round twice: to 2.5, then to 2 of the least steps."""
    rows = RANDOM.standard_normal((40, 96), np.float32) * 10.0 ** RANDOM.integers(-6, 6, (40, 1))
    rows[2], rows[3], rows[4] = 0, 1e-20, 0
    rows[4, 0], rows[4, 32] = 448 * 8, 8 * 2.52 / 512
    return rows.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantise", [quantise_rows, quantise_activations])
def test_codes_and_scales_are_those_of_pytorch(quantise: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from prefixwise.backends.torch import fp8

    rows = draw_rows()
    codes, scales = jax.jit(quantise)(jnp.asarray(rows, dtype))
    expected, expected_scales = getattr(fp8, quantise.__name__)(torch.from_numpy(rows).to(getattr(torch, dtype)))
    assert codes.dtype == FP8
    assert np.array_equal(bits(codes), expected.view(torch.uint8).numpy())
    assert np.array_equal(scales, expected_scales.numpy())
    for row in (0, 2, 5):
        alone = jax.jit(quantise)(jnp.asarray(rows[row : row + 1], dtype))
        assert np.array_equal(bits(alone[0]), bits(codes)[row : row + 1])
        assert alone[1] == scales[row]


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_gemm_of_codes_is_that_of_pytorch(has_bias: bool) -> None:
    torch = pytest.importorskip("torch")
    from prefixwise.backends.torch.fp8 import fp8_linear as expected_of
    from prefixwise.backends.torch.fp8 import quantise_rows as quantised_of

    x, weight = draw_rows(), RANDOM.standard_normal((16, 96), np.float32)
    bias: Any = RANDOM.standard_normal(16, np.float32) if has_bias else None
    theirs = (*quantised_of(torch.from_numpy(x)), *quantised_of(torch.from_numpy(weight)))
    expected = expected_of(*theirs, None if bias is None else torch.from_numpy(bias), torch.empty(40, 16)).numpy()
    ours = (*quantise_rows(jnp.asarray(x)), *quantise_rows(jnp.asarray(weight)))
    found = fp8_linear(*ours, jnp.float32, bias=bias)
    largest = np.abs(x).max(1, keepdims=True)  # other rows have numbers of other sizes
    assert (np.abs(found - expected) <= 1e-5 * (np.abs(expected) + largest)).all()
    rounded = fp8_linear(*ours, bias=bias)
    assert rounded.dtype == jnp.bfloat16
    sums = expected if bias is None else expected - bias
    assert (np.abs(np.float32(rounded) - expected) <= 2**-8 * (np.abs(expected) + np.abs(sums))).all(), (
        "each rounded once"
    )


def load(checkpoint: Checkpoint, tp_size: int = 1) -> ModelWeights:
    placement = HeadPlacement.plan(checkpoint.config.num_heads, checkpoint.config.num_kv_heads, tp_size)
    mesh = make_mesh(jax.devices("cpu"), 1, tp_size)
    weights = load_weights(checkpoint, "bfloat16", mesh, placement, is_fp8=True)
    described = weight_shapes(checkpoint.config, "bfloat16", mesh, placement, is_fp8=True)
    for expected, got in zip(jax.tree.leaves(weights), jax.tree.leaves(described), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert got.sharding.is_equivalent_to(expected.sharding, expected.ndim)
    assert weights.embedding.dtype == weights.final_norm.dtype == jnp.bfloat16, "the rest stays as it is"
    return weights


def assert_weights_of_pytorch(checkpoint: Checkpoint) -> None:
    torch = pytest.importorskip("torch")
    from prefixwise.backends.torch.weights import load_weights as load_torch

    layers = load(checkpoint).layers
    expected = load_torch(checkpoint, torch.bfloat16, torch.device("cpu"), is_fp8=True).layers
    assert layers.fp8_scales is not None
    for number, layer in enumerate(expected):
        for matrix in MATRICES:
            codes, scales = getattr(layers, matrix)[number], getattr(layers.fp8_scales, matrix)[number]
            assert np.array_equal(bits(codes), getattr(layer, matrix).view(torch.uint8).numpy()), matrix
            assert np.array_equal(scales, getattr(layer.fp8_scales, matrix).numpy()), matrix
        if layer.qkv_bias is not None:
            assert layers.qkv_bias is not None
            assert np.array_equal(layers.qkv_bias[number].astype(np.float32), layer.qkv_bias.float().numpy())


class TestWeights:
    def test_they_are_those_of_pytorch(
        self, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weight_loader, "PIECE_BYTES", 5000)
        assert_weights_of_pytorch(open_checkpoint(checkpoint_of("qwen2")))  # which has biases

    def test_those_that_are_stored_in_bfloat16(self) -> None:
        assert_weights_of_pytorch(repeated_checkpoint(SMALL))

    @pytest.mark.parametrize("block", [None, (128, 128)])
    def test_codes_of_a_checkpoint(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path, block: tuple[int, int] | None
    ) -> None:
        """With one scale per tensor they are taken to the bit; blocks of columns become rows, once rounded."""
        folder = make_fp8(checkpoint_of("qwen3"), tmp_path / "fp8", block)
        assert_weights_of_pytorch(open_checkpoint(folder))

    @pytest.mark.parametrize("is_stored", [True, False])
    def test_shards_have_the_codes_and_scales_of_one_device(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path, is_stored: bool
    ) -> None:
        folder = checkpoint_of("qwen3")  # 4 query heads and 2 KV heads: each shard has two and one
        checkpoint = open_checkpoint(make_fp8(folder, tmp_path / "fp8", None) if is_stored else folder)
        whole, split = load(checkpoint).layers, load(checkpoint, tp_size=2).layers
        assert whole.fp8_scales is not None and split.fp8_scales is not None
        head, mlp = checkpoint.config.head_size, checkpoint.config.mlp_size // 2
        heads = [0, 1, 4, 6, 2, 3, 5, 7]  # queries, key and value of the first shard, then of the second
        order = {
            "qkv": np.concatenate([np.arange(each * head, (each + 1) * head) for each in heads]),
            "gate_up": np.concatenate([np.arange(each * mlp, (each + 1) * mlp) for each in (0, 2, 1, 3)]),
        }
        for matrix in MATRICES:
            rows = order.get(matrix, slice(None))
            assert np.array_equal(bits(getattr(split, matrix)), bits(getattr(whole, matrix))[:, rows]), matrix
            scales, expected = (getattr(each.fp8_scales, matrix) for each in (split, whole))
            assert np.array_equal(scales, np.asarray(expected)[:, rows]), matrix

    def test_no_matrix_is_on_the_device_in_another_dtype(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Beside the model there are two pieces at most, and zeros that are filled."""
        config = replace(SMALL, num_layers=4, model_size=256, mlp_size=512, vocab_size=64)
        piece_bytes = 64 << 10
        monkeypatch.setattr(weight_loader, "PIECE_BYTES", piece_bytes)
        live: list[int] = []
        write, before = fp8_loader._write, live_bytes()

        def watched(*arguments: Any) -> Any:
            live.append(live_bytes() - before)
            return write(*arguments)

        monkeypatch.setattr(fp8_loader, "_write", watched)
        weights = load(random_checkpoint(config))
        size = live_bytes() - before
        num_weights = sum(getattr(weights.layers, matrix).size for matrix in MATRICES)
        assert len(live) > 50
        assert num_weights < size < 1.1 * num_weights, "one byte for each, a small embedding, norms, and scales"
        assert max(live) <= size + 2 * piece_bytes


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def on_cpu() -> Iterator[None]:
    """Let a CPU multiply the codes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "check_fp8_device", lambda platform, capability: None)
        yield


def jax_backend(checkpoint: Checkpoint, **options: Any) -> JaxBackend:
    given: Any = {
        "dtype": "bfloat16",
        "token_budget": 1024,
        "prefix_cache_bytes": 1 << 22,
        "quantization": "fp8",
    } | options
    return JaxBackend(checkpoint, BackendOptions("jax", **given))


# One for each item: where a last bit decides between two codes of a prefix's token, all that read it differ.
OWN_PREFIXES = [np.roll(PREFIXES[0], 50 * number)[:length] for number, length in enumerate((300, 40, 129, 1, 60, 20))]


def logits(backend: Backend) -> Any:
    return backend.forward(extend_batch(ITEMS, range(len(ITEMS)), prefill(backend, OWN_PREFIXES))).label_logits


def emulated_by_pytorch(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Logits of the same codes and scales, and of the dense model; everything else is in float32."""
    torch = pytest.importorskip("torch")
    from prefixwise.backends.torch import model
    from prefixwise.backends.torch.backend import TorchBackend
    from prefixwise.backends.torch.elementwise import PLAIN
    from prefixwise.backends.torch.fp8 import fp8_linear as multiply
    from prefixwise.backends.torch.weights import load_weights as load_torch
    from prefixwise.backends.torch.workers import Workers

    def in_float32(x: Any, row_scales: Any, weight: Any, scales: Any, bias: Any = None) -> Any:
        return multiply(x, row_scales, weight, scales, bias, torch.empty(len(x), len(weight)))

    backend = TorchBackend(checkpoint, dtype="float32", device="cpu")
    dense = logits(backend)
    weights = load_torch(checkpoint, torch.float32, torch.device("cpu"), is_fp8=True)
    backend._transformer = model.Transformer(checkpoint.config, weights, None, Workers(None), PLAIN, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "fp8_linear", in_float32)
        return logits(backend), dense


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Checkpoint:
    return open_checkpoint(checkpoint_of("qwen2"))  # which has biases


def in_float32(checkpoint: Checkpoint, **options: Any) -> JaxBackend:
    """On a CPU, so that codes are the same but where a last bit decides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "check_fp8_model", lambda config, dtype, tp_size: None)
        return jax_backend(checkpoint, device="cpu", dtype="float32", **options)


@pytest.fixture(scope="module")
def backend(checkpoint: Checkpoint, on_cpu: None) -> JaxBackend:
    return in_float32(checkpoint)


class TestForward:
    def test_scores_are_those_of_the_emulation(self, backend: JaxBackend, checkpoint: Checkpoint) -> None:
        assert backend.info.quantization == "fp8"
        found, (expected, dense) = logits(backend), emulated_by_pytorch(checkpoint)
        differences, of_fp8 = np.abs(found - expected).max(1), np.abs(found - dense).max()
        # An item in which rounding decides between two codes is off by a part of what FP8 changes; few are.
        assert np.median(differences) <= 0.02 * of_fp8
        assert differences.max() <= 0.2 * of_fp8
        assert of_fp8 <= 0.2 * np.abs(dense).max()

    def test_an_item_has_the_same_bits_alone(self, backend: JaxBackend) -> None:
        together, blocks = logits(backend), prefill(backend, OWN_PREFIXES)
        for item in (0, 2, 5):
            alone = backend.forward(extend_batch([ITEMS[item]], [item], blocks)).label_logits
            assert np.array_equal(alone, together[item : item + 1])

    def test_several_devices(self, backend: JaxBackend, checkpoint: Checkpoint) -> None:
        """Each quantises its part of a row by itself, so scores are others, within what FP8 rounds."""
        found, expected = logits(in_float32(checkpoint, tp_size=2)), logits(backend)
        assert 0 < np.abs(found - expected).max() <= 0.1 * np.abs(expected).max()


def test_a_gpu_s_compiler_gets_dots_of_codes(on_cpu: None) -> None:
    """The four of a layer, and none of the layer in another dtype: that is what XLA makes FP8 GEMMs of."""
    programs = jax_backend(random_checkpoint(SMALL), device="cpu")._runner.programs
    trunk = replace(programs.transformer, rows=assembly._row_tiles("gpu", batch_invariant=False))
    spec = ProgramSpec(512, "kv_cache", writes_cache=True)
    assert isinstance(trunk.attention, XlaAttention)
    lowered = replace(programs, transformer=trunk, platform="gpu").lowered(spec)
    dots = re.findall(r"dot_general.* : \((.*)\) -> (.*)", lowered.as_text())
    shapes = Counter(
        "x".join(re.findall(r"\d+(?=x)", out)) for operands, out in dots if operands.count("f8E4M3FN") == 2
    )
    assert shapes == {"512x256": 1, "512x64": 2, "512x192": 1}
    assert sum("f8" in operands for operands, _ in dots) == 4
    # Inputs and results are rounded whatever XLA fuses: it may leave out conversions to bfloat16, or FP8, and back.
    assert lowered.as_text().count("reduce_precision") == 9


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "refused"),
        [
            ({"mlp_size": 100}, "intermediate_size that is a multiple of 16, got 100"),
            (
                {"num_kv_heads": 1, "num_heads": 2, "head_size": 8},
                "KV heads x head_dim that is a multiple of 16, got 8",
            ),
            (
                {"experts": ExpertsConfig(4, 2, norms_weights=True)},
                "quantization fp8 does not serve models with experts",
            ),
        ],
    )
    def test_models(self, on_cpu: None, changes: dict[str, Any], refused: str) -> None:
        with pytest.raises(BackendError, match=refused):
            jax_backend(random_checkpoint(replace(SMALL, **changes)), device="cpu")

    def test_shards_of_odd_sizes(self, on_cpu: None) -> None:
        with pytest.raises(BackendError, match="tp_size=4 needs an intermediate_size that is a multiple of 64"):
            jax_backend(random_checkpoint(SMALL), device="cpu", tp_size=4)

    def test_lora_adapters(self, on_cpu: None) -> None:
        """They would add to values that are scaled."""
        with pytest.raises(BackendError, match="LoRA adapters are not supported with quantization fp8"):
            jax_backend(random_checkpoint(SMALL), device="cpu", max_loras=1)

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    def test_dtypes(self, on_cpu: None, dtype: str) -> None:
        with pytest.raises(BackendError, match=f"quantization fp8 needs dtype bfloat16 .* got {dtype}"):
            jax_backend(random_checkpoint(SMALL), device="cpu", dtype=dtype)


# On a GPU


WIDTHS = {
    1024: replace(QWEN3_06B, num_layers=2, vocab_size=20_000),
    4096: replace(
        QWEN3_06B, num_layers=1, model_size=4096, mlp_size=12_288, num_heads=32, num_kv_heads=8, vocab_size=20_000
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantise", [quantise_rows, quantise_activations])
def test_codes_on_a_gpu_are_those_of_a_cpu(quantise: Any, dtype: str) -> None:
    """A GPU's division may be off by a last bit, which moves a code by one: seldom, less so in bfloat16, where products
    of few digits often lie in the middle between two codes."""
    drawn = np.tile(draw_rows(), (50, 1))
    moved = drawn * RANDOM.standard_normal((2000, 96))
    moved[4] = drawn[4]
    rows = jnp.asarray(moved, dtype)
    (found, scales), (codes, expected) = (
        jax.jit(quantise)(jax.device_put(rows, jax.devices(kind)[0])) for kind in ("gpu", "cpu")
    )
    assert np.array_equal(scales, expected)
    distances = np.abs(bits(found).astype(np.int32) - bits(codes).astype(np.int32))
    assert distances.max() <= 1
    assert not distances[4].any()
    assert distances.mean() < (1e-4 if dtype == "float32" else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [SMALL, BIASED, WIDTHS[1024]])
def test_scores_on_a_gpu_are_those_of_the_emulation(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    found = logits(jax_backend(random_checkpoint(config), device="cuda", prefix_cache_bytes=1 << 26))
    monkeypatch.setattr(assembly, "check_fp8_device", lambda platform, capability: None)
    expected = logits(jax_backend(random_checkpoint(config), device="cpu", prefix_cache_bytes=1 << 26))
    dense = logits(
        jax_backend(
            random_checkpoint(config), device="cpu", dtype="float32", quantization=None, prefix_cache_bytes=1 << 26
        )
    )
    largest = np.abs(dense).max()
    assert np.abs(found - expected).max() <= 0.1 * largest, "the codes are the same, but for roundings"
    assert 0 < np.abs(found - dense).max() <= 0.3 * largest


@pytest.mark.gpu
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_gemm_of_a_layer_is_cublaslt_s_in_fp8(batch_invariant: bool) -> None:
    backend = jax_backend(
        random_checkpoint(WIDTHS[1024]), device="cuda", prefix_cache_bytes=1 << 26, batch_invariant=batch_invariant
    )
    num_tokens = backend.info.token_buckets[0]
    spec = ProgramSpec(num_tokens, "kv_cache", writes_cache=True)
    text = backend._runner.programs.lowered(spec).compile().as_text()
    assert text is not None
    calls = [line for line in text.splitlines() if 'custom_call_target="__cublas' in line]
    assert len(calls) >= 4
    assert all("__cublas$lt$matmul$f8" in call for call in calls), calls


QUERY, WIDE_ITEMS = RANDOM.integers(0, 20_000, 300), RANDOM.integers(0, 20_000, (300, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_isolation_on_a_gpu(width: int, quantization: str | None) -> None:
    """Under `batch_invariant`, the number of items moves no bit, nor does a cached prefix."""
    options: Any = {"prefix_cache_bytes": 1 << 28, "token_budget": 8192, "batch_invariant": True}
    backend = jax_backend(random_checkpoint(WIDTHS[width]), device="cuda", quantization=quantization, **options)
    assert backend.info.batch_invariant
    engine = ScoringEngine(EngineConfig("random"), Scheduler(backend), None)

    def scores(items: Any) -> list[list[float] | None]:
        body = {"query": QUERY, "items": list(items), "label_token_ids": [1, 2, 3], "score_mode": "logit"}
        return engine.score(parse_score_request({**body, "algorithm": "prefill_extend"})).scores

    cold, cached = scores(WIDE_ITEMS), scores(WIDE_ITEMS)
    assert cold == cached
    for count in (1, 3, 17, 64, 200):
        assert scores(WIDE_ITEMS[:count]) == cached[:count], count
    assert scores(WIDE_ITEMS[::-1]) == cached[::-1]
    engine.close()


@pytest.mark.gpu
def test_loading_on_a_gpu_never_needs_the_memory_of_the_bfloat16_model() -> None:
    config = replace(WIDTHS[4096], num_layers=12, vocab_size=512)
    (device, *_) = jax.devices("gpu")
    before = memory_of(device)
    placement = HeadPlacement.plan(config.num_heads, config.num_kv_heads, 1)
    mesh = make_mesh([device], 1, 1)
    weights = jax.block_until_ready(load_weights(repeated_checkpoint(config), "bfloat16", mesh, placement, is_fp8=True))
    after = memory_of(device)
    size = after["bytes_in_use"] - before["bytes_in_use"]
    num_weights = sum(getattr(weights.layers, matrix).size for matrix in MATRICES)
    assert num_weights < size < 1.1 * num_weights
    if before["peak_bytes_in_use"] > after["bytes_in_use"]:  # a process's peak is never reset
        pytest.skip("an earlier test of this process took more memory")
    assert after["peak_bytes_in_use"] <= after["bytes_in_use"] + (128 << 20)


def memory_of(device: jax.Device) -> dict[str, int]:
    stats: dict[str, int] = device.memory_stats()
    return stats
