"""FP8 weights: made while loading, or taken from a checkpoint that has them; and GEMMs of them, emulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prefixwise.backends.torch.fp8 import FP8, fp8_linear, quantise_rows
from prefixwise.backends.torch.weights import LayerWeights, load_weights
from prefixwise.models.sources import open_checkpoint
from tests.quantised_checkpoints import make_fp8

CPU = torch.device("cpu")


def layer_of(folder: Path, *, is_fp8: bool = True) -> LayerWeights:
    return load_weights(open_checkpoint(folder), torch.float32, CPU, is_fp8=is_fp8).layers[1]


@pytest.fixture(scope="module")
def dense(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


@pytest.mark.parametrize("matrix", ["qkv", "o", "gate_up", "down"])
def test_every_row_has_the_scale_of_its_largest_weight(dense: Path, matrix: str) -> None:
    layer, plain = layer_of(dense), getattr(layer_of(dense, is_fp8=False), matrix)
    codes, scales = getattr(layer, matrix), getattr(layer.fp8_scales, matrix)
    assert (codes.dtype, scales.dtype) == (FP8, torch.float32)
    assert (codes.float().abs().amax(1) == 448).all()
    torch.testing.assert_close(codes.float() * scales[:, None], plain, rtol=2**-4, atol=2**-10 * float(plain.max()))
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
        assert (layer.fp8_scales.down == stored[f"{name}.weight_scale"]).all()
    for matrix in ("qkv", "o", "gate_up", "down"):
        numbers = getattr(layer, matrix).float() * getattr(layer.fp8_scales, matrix)[:, None]
        expected = getattr(layer_of(folder, is_fp8=False), matrix)
        torch.testing.assert_close(numbers, expected, rtol=2**-4, atol=2**-10 * float(expected.max()))


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


def test_a_gemm_of_codes() -> None:
    random = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=random) for shape in ((7, 32), (16, 32), (16,)))
    (codes, row_scales), (of_weight, scales) = quantise_rows(x), quantise_rows(weight)
    found = fp8_linear(codes, row_scales, of_weight, scales, bias)
    assert found.dtype == torch.bfloat16
    expected = torch.nn.functional.linear(x, weight, bias)
    assert (found.float() - expected).norm() / expected.norm() < 0.06
