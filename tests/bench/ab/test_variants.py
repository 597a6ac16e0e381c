"""Who is compared with whom, and in which order they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from prefixwise.bench.ab.variants import Comparison, ComparisonError, Variant, round_orders, variants_of


def test_masks_have_a_server_each() -> None:
    assert variants_of("mask", None, algorithm="packed") == [
        Variant("dense", ("--multi-item-mask-impl", "dense"), {"algorithm": "packed"}),
        Variant("segment", ("--multi-item-mask-impl", "segment"), {"algorithm": "packed"}),
    ]


def test_the_mask_given_is_the_baseline_of_masks() -> None:
    assert [variant.name for variant in variants_of("mask", None, mask="segment")] == ["segment", "dense"]
    named = variants_of("mask", ["segment", "dense"], mask="segment")
    assert [variant.name for variant in named] == ["segment", "dense"]


def test_a_mask_that_is_not_the_first_variant_is_refused() -> None:
    with pytest.raises(ComparisonError, match="--mask is the baseline of masks: expected dense, the first variant"):
        variants_of("mask", ["dense", "segment"], mask="segment")


def test_algorithms_share_a_server() -> None:
    found = variants_of("algorithm", None, mask="dense")
    assert [variant.request_fields for variant in found] == [
        {"algorithm": "packed"},
        {"algorithm": "prefill_extend"},
        {"algorithm": "serial"},
    ]
    assert {variant.server_flags for variant in found} == {("--multi-item-mask-impl", "dense")}


def test_backends_and_chunk_sizes_have_a_server_each() -> None:
    flags = [variant.server_flags for variant in variants_of("backend", ["torch", "jax"])]
    assert flags == [
        ("--multi-item-mask-impl", "auto", "--backend", "torch"),
        ("--multi-item-mask-impl", "auto", "--backend", "jax"),
    ]
    sizes = variants_of("chunk-size", ["16", "0"], algorithm="prefill_extend")
    assert [variant.server_flags[-2:] for variant in sizes] == [
        ("--multi-item-scoring-chunk-size", "16"),
        ("--multi-item-scoring-chunk-size", "0"),
    ]
    assert sizes[0].request_fields == {"algorithm": "prefill_extend"}


@pytest.mark.parametrize(
    ("compare", "names"),
    [
        ("mask", ["dense"]),
        ("mask", ["dense", "dense"]),
        ("backend", ["jax", "pytorch"]),
        ("chunk-size", ["8", "-1"]),
        ("chunk-size", ["8", ""]),
    ],
)
def test_what_cannot_be_compared_is_refused(compare: Comparison, names: Sequence[str]) -> None:
    with pytest.raises(ComparisonError, match="--variants must be two or more"):
        variants_of(compare, names)


def test_in_three_rounds_each_of_three_has_every_place_once() -> None:
    orders = round_orders(3, 6, seed=5)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    for block in (orders[:3], orders[3:]):
        assert Counter((who, place) for order in block for place, who in enumerate(order)) == Counter(
            (who, place) for who in range(3) for place in range(3)
        )


def test_the_seed_decides_the_order() -> None:
    assert round_orders(3, 30, seed=1) == round_orders(3, 30, seed=1)
    assert round_orders(3, 30, seed=1) != round_orders(3, 30, seed=2)
    assert len(round_orders(3, 5, seed=1)) == 5
