"""Experts in JAX: slots hold every choice once, scores do not depend on how many devices share each expert, and TPUs'
compiler takes the programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise import Scorer
from prefixwise.backends.jax.experts import assign_slots, max_tiles, route
from prefixwise.backends.jax.placement import HeadPlacement, ShardIndex
from prefixwise.models.config import ExpertsConfig
from tests.backends.jax.test_aot import PREFILL, SCORE, SMALL, SMALL_ALONE, SUMS, Describe, compiled, describe, squares
from tests.models.test_config import CONFIG
from tests.reference import PROBABILITY_BOUND, Floats

assert describe is not None  # a fixture

pytestmark = pytest.mark.usefixtures("quick_compilation")

CPU: dict[str, Any] = {"backend": "jax", "device": "cpu", "algorithm": "packed"}
LABELS = (3, 5, 300)
RANDOM = np.random.default_rng(11)
QUERY: list[int] = RANDOM.integers(0, 500, 140).tolist()
ITEMS: list[list[int]] = [RANDOM.integers(0, 500, length).tolist() for length in (1, 33, 0, 12, 64, 2, 2)]
SOME, ROWS, TILE = 5, 24, 4  # experts, tokens, rows of a tile


@settings(max_examples=30)
@given(st.lists(st.integers(0, SOME - 1), min_size=ROWS, max_size=ROWS), st.integers(0, ROWS))
def test_every_choice_of_a_used_token_has_a_slot_of_its_own(firsts: list[int], num_tokens: int) -> None:
    numbers = np.array([[first, (first + 2) % SOME] for first in firsts], np.int32)
    slots = jax.jit(assign_slots, static_argnums=(2, 3))(numbers, num_tokens, SOME, TILE)
    used = np.asarray(slots.of_choices)[:num_tokens].reshape(-1)
    assert len(set(used.tolist())) == 2 * num_tokens
    assert len(slots.tokens) == TILE * max_tiles(2 * ROWS, SOME, TILE)
    np.testing.assert_array_equal(np.asarray(slots.tokens)[used], np.repeat(np.arange(num_tokens), 2))
    np.testing.assert_array_equal(np.asarray(slots.experts)[used], numbers[:num_tokens].reshape(-1))
    np.testing.assert_array_equal(np.ptp(np.asarray(slots.experts).reshape(-1, TILE), 1), 0)
    assert (used < TILE * int(slots.num_tiles)).all() and slots.num_tiles <= max_tiles(2 * num_tokens, SOME, TILE)


@pytest.mark.parametrize("is_normed", [False, True])
def test_weights_are_those_of_the_largest_softmax(is_normed: bool) -> None:
    logits = jnp.array([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, -1.0, 5.0]])
    found = route(logits, ExpertsConfig(4, 2, is_normed))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert found.numbers.tolist() == [[1, 3], [0, 1]]
    chosen = np.take_along_axis(shares, np.asarray(found.numbers), 1)
    np.testing.assert_allclose(found.weights, chosen / chosen.sum(1, keepdims=True) if is_normed else chosen, rtol=1e-6)


def test_a_shard_holds_its_part_of_every_expert() -> None:
    """Three experts of size 3 on two devices: of each its gate rows, then its up rows; a row of zeros pads."""
    config = replace(CONFIG, mlp_size=3, experts=ExpertsConfig(3, 1, norms_weights=True))
    index = ShardIndex.of(config, HeadPlacement.plan(config.num_heads, config.num_kv_heads, 2))
    assert index.gate_up[0].tolist() == [0, 1, 9, 10, 3, 4, 12, 13, 6, 7, 15, 16]
    assert index.gate_up[1].tolist() == [2, -1, 11, -1, 5, -1, 14, -1, 8, -1, 17, -1]


def scores(scorer: Scorer, items: list[list[int]]) -> Floats:
    return np.array(scorer.score(QUERY, items, label_token_ids=LABELS, score_mode="softmax").scores)


@pytest.mark.parametrize("tp_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_devices_share_every_expert(scorer_of: Callable[..., Scorer], tp_size: int) -> None:
    expected = scores(scorer_of("heads-of-experts", **CPU), ITEMS)
    assert expected.std(0).max() >= 0.1, "scores hardly differ between items, so an error would not show"
    scorer = scorer_of("heads-of-experts", **CPU, tp_size=tp_size)
    found = scores(scorer, ITEMS)
    assert np.abs(found - expected).max() <= PROBABILITY_BOUND
    for number in (0, 4):
        np.testing.assert_array_equal(scores(scorer, [ITEMS[number]])[0], found[number])


@pytest.mark.parametrize("spec", [PREFILL, SCORE], ids=lambda spec: spec.title)
@pytest.mark.parametrize(("topology", "tp_size"), [pytest.param("v6e:1x1", 1, marks=pytest.mark.slow), ("v6e:2x2", 4)])
def test_programs_compile_for_tpus(describe: Describe, topology: str, tp_size: int, spec: Any) -> None:
    """With the sums between chips that a dense model has, and without a copy of all experts of a layer."""
    experts = ExpertsConfig(16, 2, norms_weights=True)
    config = replace(SMALL_ALONE if tp_size == 1 else SMALL, mlp_size=320, experts=experts)
    found = compiled(describe, topology, spec, config=config)
    assert found.collectives == ({} if tp_size == 1 else {"all-reduce": SUMS[spec]})
    rows_of_a_layer = 2 * experts.num_experts * -(-config.mlp_size // tp_size)
    assert (rows_of_a_layer, config.model_size) not in squares(found, 1)
