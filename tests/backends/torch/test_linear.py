"""Packed weights: the products of plain ones, in the place of plain ones, and only where they can be."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it

from prefixwise.backends.torch import linear as products
from prefixwise.backends.torch.devices import has_onednn
from prefixwise.backends.torch.linear import can_pack, exact_row_counts, linear, pack_weights
from prefixwise.backends.torch.weights import LayerWeights, ModelWeights
from prefixwise.backends.torch.workers import Workers

NAMES = ("qkv", "o", "gate_up", "down")
ROWS = 128
PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(torch.zeros(1, dtype=dtype))]


def weights_of(dtype: torch.dtype, size: int = 64) -> ModelWeights:
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random).to(dtype)

    layers = tuple(
        LayerWeights(
            attention_norm=torch.ones(size),
            qkv=matrix(4 * size, size),
            qkv_bias=None,
            qk_norm=None,
            o=matrix(size, 2 * size),
            mlp_norm=torch.ones(size),
            gate_up=matrix(6 * size, size),
            down=matrix(size, 3 * size),
        )
        for _ in range(2)
    )
    embedding = matrix(10, size)
    return ModelWeights(embedding, layers, torch.ones(size), embedding)


@pytest.mark.skipif(not has_onednn(), reason="packing is oneDNN's")
def test_float32_is_packed_everywhere() -> None:
    assert torch.float32 in PACKED


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("size", [64, 96, 576])
def test_packed_weights_give_the_products_of_plain_ones(size: int, dtype: torch.dtype) -> None:
    """Up to the rounding of the result: the sums may be in another order."""
    plain = weights_of(dtype, size)
    packed = pack_weights(plain, ROWS, Workers(2))
    for before, after in zip(plain.layers, packed.layers, strict=True):
        for name in NAMES:
            weight, tiles = getattr(before, name), getattr(after, name)
            assert tiles.is_mkldnn
            x, bias = torch.randn(ROWS, weight.shape[1]).to(dtype), torch.randn(len(weight)).to(dtype)
            for given in (None, bias):
                exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
                error = (linear(x, tiles, given) - exact).abs()
                sums = (
                    torch.finfo(torch.float32).eps * weight.shape[1] * F.linear(x.double().abs(), weight.double().abs())
                )
                assert (error <= torch.finfo(dtype).eps * exact.abs() + sums).all()
    assert packed.embedding is plain.embedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_dtypes_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(products, "native_cpu_dtypes", lambda: frozenset({torch.float32}))
    weights = weights_of(dtype)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


def test_a_pytorch_that_cannot_pack_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(products, "_pack", refuse)
    weights = weights_of(torch.float32)
    with caplog.at_level(logging.WARNING, "prefixwise"):
        assert pack_weights(weights, ROWS, Workers(None)) is weights
    assert caplog.messages == [
        "PyTorch cannot pack weights here, so scoring is slower than it could be: no such operation"
    ]


def test_a_pytorch_that_packs_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_pack", lambda weight, num_rows: weight * 2)
    weights = weights_of(torch.float32)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(1, 128, (128, 64, 32, 16)), (1, 256, (256, 128, 64, 32, 16)), (64, 256, (256, 128, 64)), (100, 200, (128,))],
)
def test_tiles_have_other_row_counts_only_where_that_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, least: int, most: int, expected: tuple[int, ...]
) -> None:
    """Where GEMMs of fewer rows than `least` and of more than `most` have other bits."""
    weights = weights_of(torch.float32)

    def by_number_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x[:, :1] * weight[0, 0] + 1e-3 * (not least <= len(x) <= most)

    monkeypatch.setattr(products, "linear", by_number_of_rows)
    assert exact_row_counts(weights.layers[0], ROWS, torch.float32) == expected


def test_an_odd_number_of_rows_has_no_half() -> None:
    assert set(exact_row_counts(weights_of(torch.float32).layers[0], 7, torch.float32)) <= {14, 7}
