"""The fused kernels against plain PyTorch: compiled on a GPU, and in Triton's interpreter (`test_interpreted.py`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any, TypeVar, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.random_checkpoint import QWEN3_06B, random_checkpoint
from prefixwise.backends.torch import varlen
from prefixwise.backends.torch.attention import TiledAttention
from prefixwise.backends.torch.backend import TorchBackend
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps
from prefixwise.backends.torch.kernel_choice import choose_elementwise_ops
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.weights import load_weights
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.batch import Layout
from prefixwise.models.config import Activation, ModelConfig
from tests.attention_cases import CASE_NAMED, AttentionCase, check, make_batch
from tests.backends.torch.batches import ITEMS, PREFIXES, READS, extend_batch, prefill
from tests.backends.torch.flash_on_a_cpu import flash_on_a_cpu
from tests.backends.torch.test_attention import implementation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NUM_ROWS = 5 if INTERPRETED else 5000  # the interpreter runs a row in some milliseconds
HEADS = [(9, 3)] if INTERPRETED else [(16, 8), (9, 3)]  # neither makes a power of two

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ACTIVATIONS = get_args(Activation)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
# The interpreter cuts bfloat16 where a device rounds it, so single kernels are held to the others.
KERNEL_DTYPES = (torch.float32, torch.float16) if INTERPRETED else DTYPES
# A rounding that falls the other way moves a result by one unit in its last place; after RoPE, by two.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
EPS = 1e-6
# Two layers with nothing a power of two that need not be one.
SMALL = replace(
    QWEN3_06B, vocab_size=300, model_size=72, mlp_size=200, num_layers=2, num_heads=6, num_kv_heads=2, head_size=24
)
# With the sizes of Gemma 2B, the layers of Qwen3-0.6B.
GEMMA_2B = replace(
    QWEN3_06B,
    model_size=2048,
    mlp_size=16_384,
    num_heads=8,
    num_kv_heads=1,
    head_size=256,
    qk_norm=False,
    activation="gelu_tanh",
    embedding_scale=2048**0.5,
    float32_norms=True,
)
BIASED = replace(SMALL, qk_norm=False, qkv_bias=True)
GEMMA = replace(SMALL, qk_norm=False, activation="gelu_tanh", embedding_scale=72**0.5, float32_norms=True)

# The cases that differ for the merge kernel: which tokens read a prefix, the heads and their size.
MERGED = (
    *("several prefixes", "interleaved prefixes", "some read no prefix", "one prefix read at several lengths"),
    *("9 query heads on 3 KV heads of 96", "8 query heads on 1 KV heads of 256"),
)
MODELS = {"qk_norm": SMALL, "qkv_bias": BIASED, "gemma": GEMMA}
# Model, dtype and rows of a tile, all of them; in the interpreter each value of one beside each value of the others.
MODEL_CASES = [
    (name, dtype, tile_rows)
    for name, dtype, tile_rows in product(MODELS, HALVES, (None, 7))
    if not INTERPRETED or (name == "qkv_bias") == ((dtype == torch.bfloat16) == (tile_rows is None))
]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled_or_interpreted(test: Function) -> Function:
    return test if INTERPRETED else pytest.mark.gpu(test)


@pytest.fixture(scope="module")
def ops() -> ElementwiseOps:
    from prefixwise.backends.torch.cuda.fused_elementwise import FusedElementwiseOps

    return FusedElementwiseOps()


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=random)).to(DEVICE, dtype)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To the last bits; and nearly all of them the same bits, so roundings are where they should be."""
    assert found.dtype == expected.dtype
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    truncates = INTERPRETED and found.dtype == torch.bfloat16  # as the interpreter does
    if found.dtype != torch.float32 and not truncates:
        assert (found == expected).float().mean() > 0.98


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
class TestKernels:
    @pytest.mark.parametrize("size", [1, 64, 576, 1000, 1023, 1024, 4096])
    def test_norm(self, ops: ElementwiseOps, dtype: torch.dtype, size: int) -> None:
        x, weight = draw(NUM_ROWS, size, dtype=dtype, scale=3), draw(size, dtype=dtype)
        assert_same(ops.norm(x, weight, EPS), PLAIN.norm(x, weight, EPS))

    def test_norms_with_weights_of_float32(self, ops: ElementwiseOps, dtype: torch.dtype) -> None:
        """Gemma's, whose last bits count: rounded to the rows' dtype they would give other results."""
        x, weight = draw(NUM_ROWS, 2048, dtype=dtype), 1 + draw(2048, scale=0.01)
        found, expected = (each.norm(x, weight, EPS) for each in (ops, PLAIN))
        assert_same(found, expected)
        assert dtype == torch.float32 or not torch.equal(found, ops.norm(x, weight.to(dtype), EPS))
        for one, other in zip(ops.add_norm(x, x, weight, EPS), PLAIN.add_norm(x, x, weight, EPS), strict=True):
            assert_same(one, other)

    @pytest.mark.parametrize("size", [1, 64, 576, 1000, 1023, 1024, 4096])
    def test_add_norm(self, ops: ElementwiseOps, dtype: torch.dtype, size: int) -> None:
        x, delta, weight = draw(NUM_ROWS, size, dtype=dtype), draw(size, dtype=dtype), draw(size, dtype=dtype)
        delta = delta.expand(NUM_ROWS, -1)  # a view that is not contiguous
        found, expected = (each.add_norm(x, delta, weight, EPS) for each in (ops, PLAIN))
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])

    @pytest.mark.parametrize("has_norm", [True, False])
    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
    @pytest.mark.parametrize("head_size", [8, 24, 64, 96, 128, 256])
    def test_qk_norm_rope(
        self, ops: ElementwiseOps, dtype: torch.dtype, head_size: int, num_heads: int, num_kv_heads: int, has_norm: bool
    ) -> None:
        num_rope_heads = num_heads + num_kv_heads
        qkv = draw(NUM_ROWS, num_rope_heads + num_kv_heads, head_size, dtype=dtype, scale=2)
        weight = draw(num_rope_heads, head_size, dtype=dtype) if has_norm else None
        angles = draw(NUM_ROWS, 1, head_size // 2, scale=100)
        expected = PLAIN.qk_norm_rope(qkv.clone(), num_rope_heads, weight, EPS, angles.cos(), angles.sin())
        found = ops.qk_norm_rope(qkv.clone(), num_rope_heads, weight, EPS, angles.cos(), angles.sin())
        assert_same(found[:, :num_rope_heads], expected[:, :num_rope_heads])
        assert torch.equal(found[:, num_rope_heads:], qkv[:, num_rope_heads:]), "values are not changed"

    @pytest.mark.parametrize("size", [1, 96, 1000, 1024, 3072])
    def test_gate(self, ops: ElementwiseOps, dtype: torch.dtype, size: int) -> None:
        gate_up = draw(NUM_ROWS, 2 * size, dtype=dtype, scale=4)
        assert_same(ops.gate(gate_up, "silu"), PLAIN.gate(gate_up, "silu"))

    @pytest.mark.parametrize("size", [1, 1000, 3072])
    def test_gate_with_gelu(self, ops: ElementwiseOps, dtype: torch.dtype, size: int) -> None:
        """Of numbers that are not far below 0, where PyTorch takes 1 from nearly 1."""
        gate_up = draw(NUM_ROWS, 2 * size, dtype=dtype)
        assert_same(ops.gate(gate_up, "gelu_tanh"), PLAIN.gate(gate_up, "gelu_tanh"))

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, in the interpreter
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gate_of_large_numbers(self, ops: ElementwiseOps, dtype: torch.dtype, activation: Activation) -> None:
        gate_up = torch.tensor([[-200.0, -80.0, 0.0, 80.0, 200.0] + 5 * [1.0]]).to(DEVICE, dtype)
        assert_same(ops.gate(gate_up, activation), PLAIN.gate(gate_up, activation))

    @pytest.mark.parametrize(("num_heads", "head_size"), [(16, 128), (9, 64), (6, 96), (20, 256), (2, 24)])
    def test_merge(self, ops: ElementwiseOps, dtype: torch.dtype, num_heads: int, head_size: int) -> None:
        self_part = draw(NUM_ROWS, num_heads, head_size, dtype=dtype), draw(num_heads, NUM_ROWS, scale=5)
        num_readers = NUM_ROWS - 2
        prefix_part = draw(num_readers, num_heads, head_size, dtype=dtype), draw(num_heads, num_readers, scale=5)
        rows = torch.full((NUM_ROWS,), -1, dtype=torch.int32)
        rows[1:-1] = torch.randperm(num_readers, dtype=torch.int32)  # the first token and the last read no prefix
        found = ops.merge(self_part, prefix_part, rows.to(DEVICE), NUM_ROWS + 3)
        assert_same(found, PLAIN.merge(self_part, prefix_part, rows.to(DEVICE), NUM_ROWS + 3))
        assert torch.equal(found[[0, NUM_ROWS - 1]], self_part[0][[0, -1]])
        assert not found[NUM_ROWS:].any(), "padding is zero"

    def test_merge_of_logsumexps_with_large_differences(self, ops: ElementwiseOps, dtype: torch.dtype) -> None:
        self_part = draw(3, 2, 64, dtype=dtype), torch.tensor([[-500.0, 500.0, 88.0], [0.0, 1e4, -1e4]]).to(DEVICE)
        prefix_part = (
            draw(3, 2, 64, dtype=dtype, scale=2),
            torch.tensor([[500.0, -500.0, 89.0], [0.0, 1e4, 1e4]]).to(DEVICE),
        )
        rows = torch.arange(3, dtype=torch.int32).to(DEVICE)
        assert_same(ops.merge(self_part, prefix_part, rows, 3), PLAIN.merge(self_part, prefix_part, rows, 3))


@compiled_or_interpreted
@pytest.mark.parametrize("dtype", HALVES)
class TestNeighbours:
    """A row has the same bits alone and among others, wherever it stands: 1000 and 1023 columns make odd addresses."""

    LONE = (0, 3, NUM_ROWS - 1)

    @pytest.mark.parametrize("size", [576, 1000, 1023, 1024, 4096])
    def test_norms(self, ops: ElementwiseOps, dtype: torch.dtype, size: int) -> None:
        x, delta, weight = draw(NUM_ROWS, size, dtype=dtype), draw(NUM_ROWS + 1, size, dtype=dtype)[1:], draw(size)
        weight = weight.to(dtype)
        normed, (residual, normed_residual) = ops.norm(x, weight, EPS), ops.add_norm(x, delta, weight, EPS)
        for rows in (*(slice(row, row + 1) for row in self.LONE), slice(3, None)):
            assert torch.equal(ops.norm(x[rows], weight, EPS), normed[rows])
            lone_residual, lone_normed = ops.add_norm(x[rows], delta[rows], weight, EPS)
            assert torch.equal(lone_residual, residual[rows])
            assert torch.equal(lone_normed, normed_residual[rows])

    @pytest.mark.parametrize(("num_heads", "head_size"), [(32, 128), (15, 64), (15, 96), (10, 256), (5, 42)])
    def test_heads(self, ops: ElementwiseOps, dtype: torch.dtype, num_heads: int, head_size: int) -> None:
        qkv, weight = draw(NUM_ROWS, num_heads, head_size, dtype=dtype), draw(num_heads - 2, head_size, dtype=dtype)
        cos, sin = (draw(NUM_ROWS, 1, head_size // 2, scale=each) for each in (1, 2))

        def with_rope(rows: slice) -> Tensor:
            return ops.qk_norm_rope(qkv.clone()[rows], num_heads - 2, weight, EPS, cos[rows], sin[rows])

        together = with_rope(slice(None))
        for rows in (*(slice(row, row + 1) for row in self.LONE), slice(3, None)):
            assert torch.equal(with_rope(rows), together[rows])

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gate(self, ops: ElementwiseOps, dtype: torch.dtype, activation: Activation) -> None:
        gate_up = draw(NUM_ROWS, 2 * 1001, dtype=dtype)
        together = ops.gate(gate_up, activation)
        for rows in (*(slice(row, row + 1) for row in self.LONE), slice(3, None)):
            assert torch.equal(ops.gate(gate_up[rows], activation), together[rows])

    def test_merge(self, ops: ElementwiseOps, dtype: torch.dtype) -> None:
        self_part, prefix_part = (
            (draw(NUM_ROWS, 9, 64, dtype=dtype), draw(9, NUM_ROWS, scale=each)) for each in (5, 6)
        )
        reading = torch.arange(NUM_ROWS, dtype=torch.int32).to(DEVICE)
        together = ops.merge(self_part, prefix_part, reading, NUM_ROWS)
        for rows in (*(slice(row, row + 1) for row in self.LONE), slice(3, None)):
            lone_self, lone_prefix = (
                (self_part[0][rows], self_part[1][:, rows]),
                (prefix_part[0][rows], prefix_part[1][:, rows]),
            )
            num_rows = len(lone_self[0])
            assert torch.equal(ops.merge(lone_self, lone_prefix, reading[:num_rows], num_rows), together[rows])


@compiled_or_interpreted
@pytest.mark.skipif(not INTERPRETED, reason="compiled, the flash attention of the device is tested: test_attention.py")
@pytest.mark.parametrize("name", MERGED)
def test_attention_with_the_fused_merge(name: str, ops: ElementwiseOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tokens of each segment: the kernel merges every row by itself."""
    monkeypatch.setattr(varlen, "flash", flash_on_a_cpu)
    run = implementation(lambda batch, device, *_: varlen.VarlenAttention(batch, device, ops), torch.float16)
    case = CASE_NAMED[name]
    check(run, replace(case, segment_lens=tuple(min(length, 8) for length in case.segment_lens)), 0.004)


@compiled_or_interpreted
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # of PyTorch on an ARM CPU without units for bfloat16
@pytest.mark.parametrize(("name", "dtype", "tile_rows"), MODEL_CASES)
def test_the_model_gives_what_it_gives_with_plain_operations(
    ops: ElementwiseOps, name: str, dtype: torch.dtype, tile_rows: int | None
) -> None:
    config, device = MODELS[name], torch.device(DEVICE)
    weights, workers = load_weights(random_checkpoint(config), dtype, device), Workers(None)
    case = AttentionCase("two segments", (4, 5), layout=Layout.CAUSAL)
    tokens = torch.arange(9, device=device)

    def hidden(elementwise_ops: ElementwiseOps) -> Tensor:
        attention = TiledAttention(make_batch(case), device, 3, workers, dtype=dtype)
        model = Transformer(config, weights, tile_rows, workers, elementwise_ops)
        return model(17 * tokens % 300, tokens, attention, None, tokens[[3, 8]], None).hidden

    assert not torch.equal(hidden(PLAIN), torch.zeros(2, config.model_size, device=device))
    torch.testing.assert_close(hidden(ops), hidden(PLAIN), rtol=0, atol=0.1 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.gpu
class TestBackendOnAGpu:
    @pytest.mark.parametrize("model", [QWEN3_06B, GEMMA_2B], ids=["qwen3", "gemma"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_scores_are_those_of_plain_operations(
        self, monkeypatch: pytest.MonkeyPatch, dtype: str, model: ModelConfig
    ) -> None:
        config = replace(model, num_layers=4, vocab_size=512)

        def logits() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            backend = TorchBackend(random_checkpoint(config), dtype=dtype, device="cuda")
            return backend.forward(extend_batch(ITEMS, READS, prefill(backend, PREFIXES))).label_logits

        fused = logits()
        monkeypatch.setattr("prefixwise.backends.torch.backend.choose_elementwise_ops", lambda *_: PLAIN)
        plain = logits()
        assert np.abs(fused - plain).max() <= (0.03 if dtype == "bfloat16" else 0.004) * np.abs(plain).max()

    def test_half_precision_takes_the_fused_kernels_and_float32_does_not(self) -> None:
        device = torch.device("cuda")
        assert type(choose_elementwise_ops(SMALL, torch.bfloat16, device)).__name__ == "FusedElementwiseOps"
        assert type(choose_elementwise_ops(SMALL, torch.float16, device)).__name__ == "FusedElementwiseOps"
        assert choose_elementwise_ops(SMALL, torch.float32, device) is PLAIN
