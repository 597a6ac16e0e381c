"""Sliding windows, capped scores and other scales, in the implementations that have them; the others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prefixwise.backends.jax.attention import api
from prefixwise.backends.jax.attention.base import AttentionImplementation
from prefixwise.backends.jax.attention.reference import ReferenceAttention
from prefixwise.backends.jax.attention.xla import XlaAttention
from prefixwise.contract.errors import BackendError
from prefixwise.forward.batch import Layout, MaskImpl
from prefixwise.forward.tiles import KEY_TILE
from tests.attention_cases import (
    CASE_NAMED,
    LAYOUT_CASES,
    SCORINGS,
    AttentionCase,
    Scoring,
    check,
    check_alone,
    make_batch,
    make_inputs,
)
from tests.backends.jax.attention.run_case import LAYOUT_CAPACITY, runner

XLA, REFERENCE = XlaAttention(), ReferenceAttention()
TOLERANCE = 2e-5
GEMMA = SCORINGS[4]
DAILY = {"several prefixes", "packed sequences", "serial sequences", "new KV blocks after cached ones", "long items"}
EACH_SCORING = pytest.mark.parametrize("scoring", SCORINGS, ids=str)


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every day windows, which share programs, and one layout with everything that Gemma 2 has."""
    if parameters.get("scoring") in SCORINGS[4:] and test != "test_a_segment_alone_gives_the_bits_it_has_beside_others":
        if parameters["scoring"] != GEMMA or parameters.get("implementation") is not XLA:
            return True
        return bool(parameters["case"].name != "several prefixes")
    if parameters.get("implementation") is REFERENCE:
        return bool(parameters["case"].name != "several prefixes" or parameters["scoring"] != SCORINGS[3])
    if test == "test_is_right":
        return bool(parameters["case"].name not in DAILY)
    return bool(parameters.get("scoring") == SCORINGS[5])


@pytest.mark.parametrize("implementation", [XLA, REFERENCE], ids=lambda each: each.name)
@EACH_SCORING
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_is_right(case: AttentionCase, scoring: Scoring, implementation: AttentionImplementation) -> None:
    check(runner(implementation, scoring=scoring), case, TOLERANCE, scoring=scoring)


@pytest.mark.parametrize("scoring", [SCORINGS[1], SCORINGS[3], GEMMA], ids=str)
def test_dense_mask_gives_the_same_bits(scoring: Scoring) -> None:
    for case in LAYOUT_CASES:
        if case.layout is Layout.PACKED:
            masks: tuple[MaskImpl, MaskImpl] = ("dense", "segment")
            run, inputs = runner(XLA, scoring=scoring), make_inputs(case)
            dense, segment = (run(make_batch(case, mask), inputs) for mask in masks)
            tokens = slice(sum(case.segment_lens))
            assert np.array_equal(dense[tokens], segment[tokens]), case.name


@EACH_SCORING
def test_a_segment_alone_gives_the_bits_it_has_beside_others(scoring: Scoring) -> None:
    for name in ("ragged items over one prefix", "long items", "a long prefix of an odd length"):
        check_alone(runner(XLA, scoring=scoring), CASE_NAMED[name])


@pytest.mark.parametrize("window", [1, 100, 128, 300])
def test_key_tiles_outside_every_window_are_not_read(window: int) -> None:
    """Values of NaN would show, whatever their weight."""
    case = CASE_NAMED["a long prefix of an odd length"]
    batch, inputs = make_batch(case), make_inputs(case)
    run, tokens = runner(XLA, scoring=Scoring(window=window)), slice(batch.num_tokens)
    expected = run(batch, inputs)[tokens]
    first = (min(case.prefix_lens) - window + 1) // KEY_TILE * KEY_TILE
    for array in inputs.cached[0]:
        array[:first] = np.nan
    assert np.array_equal(run(batch, inputs)[tokens], expected)


def test_capacity_holds_prefixes_longer_than_the_windows() -> None:
    assert LAYOUT_CAPACITY.num_blocks * KEY_TILE > max(scoring.window for scoring in SCORINGS)


class TestChoice:
    @pytest.mark.parametrize("platform", ["cpu", "gpu", "hopper", "tpu"])
    def test_a_model_with_windows_takes_an_implementation_that_has_them(self, platform: str) -> None:
        kind: Any = {"platform": platform, "dtype": jnp.dtype(jnp.bfloat16), "head_size": 128, "is_plain": False}
        chosen = api.choose_implementation(**kind)
        assert chosen.name == "xla"
        assert api.choose_working(**kind, probe=lambda _: None).name == "xla"
        assert api.choose_for_batch_prefixes(chosen, **kind) is chosen

    @pytest.mark.parametrize("platform", ["cpu", "gpu", "hopper", "tpu"])
    def test_bidirectional_models_take_xla_and_others_are_refused(self, platform: str) -> None:
        kind: Any = {"platform": platform, "dtype": jnp.dtype(jnp.bfloat16), "head_size": 128, "is_causal": False}
        assert api.choose_implementation(**kind).name == api.choose_working(**kind, probe=lambda _: None).name == "xla"
        for name in ("pallas_gpu", "hopper", "pallas_tpu", "reference"):
            with pytest.raises(BackendError, match=f"'{name}' cannot run here: it has no bidirectional attention"):
                api.choose_implementation(name, **kind)

    @pytest.mark.parametrize(("name", "platform"), [("pallas_gpu", "gpu"), ("hopper", "hopper"), ("pallas_tpu", "tpu")])
    def test_a_named_one_that_lacks_them_is_refused(self, name: str, platform: str) -> None:
        with pytest.raises(BackendError, match=f"attention '{name}' cannot run here: it has no sliding windows"):
            api.choose_implementation(
                name, platform=platform, dtype=jnp.dtype(jnp.bfloat16), head_size=128, is_plain=False
            )
