"""Packed weights: the products of plain ones to the bit, in the place of plain ones, and only where they can be."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # everybody's name for it

from itemwise.backends.torch import products
from itemwise.backends.torch.products import can_pack, exact_row_counts, linear, pack_weights
from itemwise.backends.torch.weights import LayerWeights, ModelWeights
from itemwise.backends.torch.workers import Workers

NAMES = ("qkv", "o", "gate_up", "down")
ROWS = 128
needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(1, dtype=torch.bfloat16)), reason="this CPU has no bfloat16 units"
)


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


@needs_packing
@pytest.mark.parametrize("size", [64, 96, 576])
def test_packed_products_have_the_bits_of_plain_ones(size: int) -> None:
    plain = weights_of(torch.bfloat16, size)
    packed = pack_weights(plain, ROWS, Workers(2))
    for before, after in zip(plain.layers, packed.layers, strict=True):
        for name in NAMES:
            weight, tiles = getattr(before, name), getattr(after, name)
            assert tiles.is_mkldnn
            x, bias = torch.randn(ROWS, weight.shape[1]).bfloat16(), torch.randn(len(weight)).bfloat16()
            assert torch.equal(linear(x, tiles), F.linear(x, weight))
            assert torch.equal(linear(x, tiles, bias), F.linear(x, weight, bias))
    assert packed.embedding is plain.embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    weights = weights_of(dtype)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


@needs_packing
def test_a_pytorch_that_cannot_pack_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(weight: torch.Tensor, num_rows: int) -> torch.Tensor:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(products, "_pack", refuse)
    weights = weights_of(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "itemwise"):
        assert pack_weights(weights, ROWS, Workers(None)) is weights
    assert caplog.messages == [
        "PyTorch cannot pack weights here, so scoring is slower than it could be: no such operation"
    ]


@needs_packing
def test_a_pytorch_that_packs_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_pack", lambda weight, num_rows: weight * 2)
    weights = weights_of(torch.bfloat16)
    assert pack_weights(weights, ROWS, Workers(None)) is weights


@pytest.mark.parametrize(
    ("most", "expected"),
    [(ROWS // 2, (2 * ROWS, ROWS)), (ROWS, (ROWS, ROWS // 2)), (2 * ROWS, (2 * ROWS, ROWS, ROWS // 2))],
)
def test_rows_are_counted_otherwise_only_where_that_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: tuple[int, ...]
) -> None:
    """Where products of more rows than `most` have other bits than those of fewer."""
    weights = weights_of(torch.float32)

    def by_number_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x[:, :1] * weight[0, 0] + 1e-3 * (len(x) > most)

    monkeypatch.setattr(products, "linear", by_number_of_rows)
    assert exact_row_counts(weights, ROWS) == expected


def test_an_odd_number_of_rows_has_no_half() -> None:
    assert set(exact_row_counts(weights_of(torch.float32), 7)) <= {14, 7}
