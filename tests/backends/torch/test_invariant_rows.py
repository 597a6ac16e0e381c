"""Row counts with the same bits: how they are found, and that GEMMs of a model have no others."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from prefixwise.backends.torch import invariant_rows, model
from prefixwise.backends.torch.elementwise import PLAIN, ElementwiseOps, PlainElementwiseOps
from prefixwise.backends.torch.invariant_rows import RowCounts, invariant_counts, keeps_bits
from prefixwise.backends.torch.model import Transformer
from prefixwise.backends.torch.weights import ExpertWeights, LayerWeights, load_weights
from prefixwise.backends.torch.workers import Workers
from prefixwise.forward.buckets import Buckets, token_buckets
from prefixwise.models.sources import open_checkpoint

CPU = torch.device("cpu")


class GroupedGemms(PlainElementwiseOps):
    """With kernels for experts, and for their router."""

    def has_grouped_gemm(self, weights: ExpertWeights) -> bool:
        return True


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ((), (128, 256)),
        ((128,), (128, 256)),
        ((128, 256), (128, 384)),
        ((128, 640), (256, 256)),  # rather than multiples of 128 from 768 on
        ((256, 4224), (256, 512)),
        ((256, 4352), (512, 512)),
        ((8192,), None),
    ],
)
def test_no_row_count_with_other_bits_is_among_them(
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    others: Collection[int],
    expected: tuple[int, int] | None,
) -> None:
    """Of one matrix of four, in the last row alone."""

    def gemm(layer: LayerWeights, matrix: str, dtype: torch.dtype) -> Callable[[int], Tensor]:
        def run(count: int) -> Tensor:
            rows = torch.arange(count, dtype=dtype)
            if matrix == "down" and count in others:
                rows[-1] += 0.5
            return rows

        return run

    monkeypatch.setattr(invariant_rows, "_gemm", gemm)
    layer = load_weights(open_checkpoint(checkpoint_of("qwen3")), torch.float32, CPU).layers[0]
    assert invariant_counts(layer, torch.float32, PLAIN) == expected


@pytest.mark.parametrize(("ops", "expected"), [(PLAIN, (128, 384)), (GroupedGemms(), (128, 256))])
def test_a_router_is_tried_where_it_is_a_gemm(
    checkpoint_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    ops: ElementwiseOps,
    expected: tuple[int, int],
) -> None:
    layer = load_weights(open_checkpoint(checkpoint_of("qwen3_moe")), torch.float32, CPU).layers[0]
    assert layer.experts is not None
    router = layer.experts.router

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.full((len(x), 1), 0.5 if weight is router and len(x) == 256 else 0.0)

    monkeypatch.setattr("torch.nn.functional.linear", linear)
    assert invariant_counts(layer, torch.float32, ops) == expected


@pytest.mark.parametrize(
    ("is_wrong", "unit", "expected"),
    [
        (lambda count, columns: False, 256, True),
        (lambda count, columns: columns > 3072, 256, False),  # than without the columns of adapters
        (lambda count, columns: columns > 3072 and count == 512, 512, False),  # than among more rows
        (lambda count, columns: count == 256, 512, True),
    ],
)
def test_columns_of_adapters_move_no_bit(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int, int], bool], unit: int, expected: bool
) -> None:
    """A GEMM that adds up two columns; where it is wrong, in the last row alone."""

    def gemm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x[:, :2].sum(1) + x[:, 3072:].sum(1) * weight[0, -1]
        if is_wrong(*x.shape):
            out[-1] += 0.5
        return out

    monkeypatch.setattr(invariant_rows, "MAX_GEMM_ROWS", 1024)
    monkeypatch.setattr("torch.nn.functional.linear", gemm)
    wide = torch.zeros(4, 3072 + 16)
    none = torch.zeros(0)
    layer = LayerWeights(None, none, None, None, none, None, none, wide[:, :3072])
    assert keeps_bits(layer, {"down": wide}, RowCounts(unit, unit)) == expected


@pytest.mark.parametrize("step", [None, 4])
@pytest.mark.parametrize("largest", [1, 384, 385, 16_384, 40_000])
@pytest.mark.parametrize("counts", [RowCounts(128, 256), RowCounts(128, 384), RowCounts(512, 512)])
def test_forwards_of_all_sizes_have_gemms_of_these_counts(counts: RowCounts, largest: int, step: int | None) -> None:
    found = token_buckets(largest, smallest=counts.least, multiple=counts.unit, step=step, steps_per_doubling=32)
    assert found[0] == counts.least
    assert found[-1] >= largest
    for num_tokens in (*found, Buckets(found).fit(found[-1] + 1)):
        cut = counts.cut(num_tokens)
        assert [0, *(stop for _, stop in cut)] == [*(start for start, _ in cut), num_tokens]
        assert counts.all >= {stop - start for start, stop in cut}


@pytest.mark.parametrize("is_fp8", [False, True])
def test_gemms_are_tried_with_the_layer_s_weights(checkpoint_of: Callable[[str], Path], is_fp8: bool) -> None:
    layer = load_weights(open_checkpoint(checkpoint_of("qwen3")), torch.bfloat16, CPU, is_fp8=is_fp8).layers[0]
    found = invariant_rows._gemm(layer, "down", torch.bfloat16)(3)
    assert layer.down is not None
    assert (found.shape, found.dtype) == ((3, len(layer.down)), torch.bfloat16)
    assert found.float().abs().min() < found.float().abs().max()


def test_a_forward_has_gemms_of_whole_units(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(checkpoint_of("qwen3"))
    weights = load_weights(checkpoint, torch.float32, CPU)
    monkeypatch.setattr(invariant_rows, "MAX_GEMM_ROWS", 32)
    counts: set[int] = set()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        counts.add(len(x))
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(model, "linear", linear)
    size = checkpoint.config.model_size
    x = torch.randn(70, size, generator=torch.Generator().manual_seed(0))
    attended = torch.randn(70, checkpoint.config.num_heads * checkpoint.config.head_size)
    transformer = Transformer(checkpoint.config, weights, None, Workers(None), row_counts=RowCounts(8, least=16))
    found = transformer.finish(x, attended)
    assert counts == {32, 24, 16}  # 70 rows and padding
    whole = Transformer(checkpoint.config, weights, None, Workers(None)).finish(x, attended)
    torch.testing.assert_close(found, whole)
