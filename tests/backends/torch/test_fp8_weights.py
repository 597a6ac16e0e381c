"""FP8 weights: made while loading, or taken from a checkpoint that has them; and GEMMs of them, emulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from prefixwise.backends.torch.elementwise import PlainElementwiseOps, rms_norm
from prefixwise.backends.torch.fp8 import FP8, fp8_linear, quantise_activations, quantise_rows
from prefixwise.backends.torch.weights import LayerWeights, load_weights
from prefixwise.forward.fp8 import FP8_MAX, up_factor, value_factor
from prefixwise.models.sources import open_checkpoint
from tests.quantised_checkpoints import make_fp8

CPU = torch.device("cpu")
NUM_ROPE_ROWS = 6 * 32  # of queries and keys


def layer_of(folder: Path, *, is_fp8: bool = True) -> LayerWeights:
    return load_weights(open_checkpoint(folder), torch.float32, CPU, is_fp8=is_fp8).layers[1]


def numbers(layer: LayerWeights, matrix: str, plain: LayerWeights) -> Tensor:
    """What a matrix's codes stand for, without the power of two that values and up have more, and the output projection
    and down less."""

    def stored(name: str) -> Tensor:
        codes: Tensor = getattr(layer, name)
        scales: Tensor = getattr(layer.fp8_scales, name)
        return codes.float() * scales[:, None]

    of_attention = matrix in ("qkv", "o")
    behind, num_plain_rows = ("o", NUM_ROPE_ROWS) if of_attention else ("down", len(stored("gate_up")) // 2)
    factor = 2.0 ** round(math.log2(getattr(plain, behind).norm() / stored(behind).norm()))
    assert factor != 1
    found = stored(matrix)
    if matrix == behind:
        return found * factor
    found[num_plain_rows:] /= factor
    return found


@pytest.fixture(scope="module")
def dense(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


@pytest.mark.parametrize("matrix", ["qkv", "o", "gate_up", "down"])
def test_every_row_has_the_scale_of_its_largest_weight(dense: Path, matrix: str) -> None:
    layer, plain = layer_of(dense), layer_of(dense, is_fp8=False)
    codes, scales = getattr(layer, matrix), getattr(layer.fp8_scales, matrix)
    assert (codes.dtype, scales.dtype) == (FP8, torch.float32)
    assert (codes.float().abs().amax(1) == 448).all()
    expected = getattr(plain, matrix)
    torch.testing.assert_close(numbers(layer, matrix, plain), expected, rtol=2**-4, atol=2**-10 * float(expected.max()))
    assert layer.attention_norm is not None
    assert layer.attention_norm.dtype == torch.float32, "the rest stays as it is"


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_codes_of_a_checkpoint(dense: Path, tmp_path: Path, block: tuple[int, int] | None) -> None:
    """With one scale per tensor they are taken to the bit; blocks of columns become rows, once rounded."""
    folder = make_fp8(dense, tmp_path / "fp8", block)
    layer, stored = layer_of(folder), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    if block is None:
        assert layer.down is not None
        assert torch.equal(layer.down.view(torch.uint8), stored[f"{name}.weight"].view(torch.uint8))
        assert layer.fp8_scales is not None
        factors = stored[f"{name}.weight_scale"] / layer.fp8_scales.down
        assert (factors == factors[0]).all() and math.frexp(factors[0])[0] == 0.5
    plain = layer_of(folder, is_fp8=False)
    for matrix in ("qkv", "o", "gate_up", "down"):
        expected = getattr(plain, matrix)
        torch.testing.assert_close(
            numbers(layer, matrix, plain), expected, rtol=2**-4, atol=2**-10 * float(expected.max())
        )


@pytest.mark.parametrize("bound", [0.0, 1e-3, 389.5, 389.6, 450.0, 1e4])
def test_values_are_scaled_by_a_power_of_two_that_leaves_room_for_roundings(bound: float) -> None:
    factor = value_factor(bound)
    assert math.frexp(factor)[0] == 0.5
    assert bound * factor * (1 + 1 / 17) ** 2 * 1.01 <= FP8_MAX
    assert bound == 0 or bound * factor > FP8_MAX / 2.5


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])  # which has biases
def test_no_value_exceeds_what_attention_s_output_may_be(checkpoint_of: Callable[[str], Path], family: str) -> None:
    """Whatever the input of a norm; and the largest value that there can be is not far from it."""
    layer = layer_of(checkpoint_of(family))
    norm, scales, bias = layer.attention_norm, layer.fp8_scales, layer.qkv_bias
    assert norm is not None and scales is not None
    values = slice(-2 * (len(layer.qkv) // 8), None)  # 4 query heads, 2 KV heads
    weights = layer.qkv[values].float() * scales.qkv[values, None]
    # What is largest in the direction of a row's weights.
    x = weights * norm * torch.tensor([[[1.0]], [[-1.0]]])
    x = torch.cat([*x, torch.randn(100, x.shape[2], generator=torch.Generator().manual_seed(0)).exp()])
    found = fp8_linear(*quantise_rows(rms_norm(x, norm, 1e-6)), layer.qkv, scales.qkv, bias)[:, values]
    assert FP8_MAX / 3 < found.abs().max() <= FP8_MAX


@pytest.mark.parametrize(
    ("gate", "up", "factor"),
    [(1.0, 1.0, 2.0), (0.3, 0.2, 32.0), (8.0, 4.0, 1 / 16), (0.0, 1.0, 2.0**40), (math.nan, 1.0, 1.0)],
)
def test_up_is_scaled_by_a_power_of_two(gate: float, up: float, factor: float) -> None:
    assert up_factor(gate, up) == factor


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_activations_are_near_one(checkpoint_of: Callable[[str], Path], family: str) -> None:
    """For any input of a norm without a favourite direction, so that nearly all rows have a scale of 1."""
    layer = layer_of(checkpoint_of(family))
    norm, scales = layer.mlp_norm, layer.fp8_scales
    assert norm is not None and scales is not None and layer.gate_up is not None
    x = torch.randn(100, layer.gate_up.shape[1], generator=torch.Generator().manual_seed(0))
    gate_up = fp8_linear(*quantise_rows(rms_norm(x, norm, 1e-6)), layer.gate_up, scales.gate_up)
    gated = PlainElementwiseOps().gate(gate_up, "silu")
    assert 1 / 4 < gated.square().mean().sqrt() < 4
    assert (quantise_activations(gated)[1] == 1).all()


def test_without_a_norm_before_it_attention_has_scales(checkpoint_of: Callable[[str], Path]) -> None:
    folder = checkpoint_of("olmo2")
    layer, plain = layer_of(folder), layer_of(folder, is_fp8=False)
    assert layer.fp8_scales is not None
    assert torch.equal(layer.fp8_scales.o, quantise_rows(plain.o)[1])
    assert layer.gate_up is not None and layer.down is not None and plain.down is not None
    assert torch.equal(layer.fp8_scales.down, quantise_rows(plain.down)[1])


def test_a_row_is_quantised_by_itself() -> None:
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    rows[2] *= 1000
    rows[3] = 0
    codes, scales = quantise_rows(rows)
    torch.testing.assert_close(codes.float() * scales[:, None], rows, rtol=2**-4, atol=1e-5)
    for row in range(5):
        alone, scale = quantise_rows(rows[row : row + 1])
        assert torch.equal(alone.view(torch.uint8), codes[row : row + 1].view(torch.uint8))
        assert scale == scales[row]


class TestActivations:
    def test_scales_are_powers_of_two_from_one_on(self) -> None:
        """Whatever its size, a part is rounded to four bits, or to 1/512 of its row's scale."""
        rows = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))  # the last part has four columns
        rows *= torch.tensor([0.0, 1e-3, 1.0, 300.0, 1e4, 1e30])[:, None]
        codes, scales = quantise_activations(rows)
        largest = rows.abs().amax(1)
        for scale, most in zip(scales.tolist(), largest.tolist(), strict=True):
            assert math.frexp(scale)[0] == 0.5 and scale >= 1
            assert most / scale <= FP8_MAX and (scale == 1 or most / scale > FP8_MAX / 2)
        wrong = (codes.float() * scales[:, None] - rows).abs()
        assert (wrong <= torch.maximum(rows.abs() * (1 / 17 + 1e-6), scales[:, None] * 1.01 / 512)).all()

    def test_a_part_has_a_scale_of_its_own_before_its_row_has_one(self) -> None:
        """As no program of a GEMM sees a whole row: a small part is rounded twice."""
        rows = torch.zeros(1, 64)
        rows[0, 0] = 448.0 * 8
        rows[0, 32] = 8 * 2.52 / 512  # 8 * 2.5 / 512, then 2 / 512; rounded once, 3 / 512
        codes, scales = quantise_activations(rows)
        assert scales.item() == 8
        assert codes[0, 0].float() == 448
        assert codes[0, 32].float() == 2 / 512

    def test_a_row_is_alone(self) -> None:
        rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * 100
        rows[2] *= 1000
        codes, scales = quantise_activations(rows)
        for row in range(5):
            alone, scale = quantise_activations(rows[row : row + 1])
            assert torch.equal(alone.view(torch.uint8), codes[row : row + 1].view(torch.uint8))
            assert scale == scales[row]


def test_a_gemm_of_codes() -> None:
    random = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((7, 32), (16, 32), (16,)))
    (codes, row_scales), (of_weight, scales) = quantise_rows(x), quantise_rows(weight)
    found = fp8_linear(codes, row_scales, of_weight, scales, bias)
    assert found.dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x, weight, bias)
    assert (found.float() - expected).norm() / expected.norm() < 0.06
