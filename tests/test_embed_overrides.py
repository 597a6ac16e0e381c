"""Embedding overrides on real models: what transformers computes from `inputs_embeds`, and bits that hold.

A vector takes the place of a row of the embedding table. So a token's own row changes no bit, whichever family scales
its embeddings, and an item does not see whether tokens of other items are overridden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixwise import Scorer
from prefixwise.contract.request import Algorithm
from tests.checkpoints import FAMILY_NAMES
from tests.reference import Floats, Reference, bound_of, expected_scores, is_emulated, log_softmax

pytestmark = pytest.mark.usefixtures("programs_on_disk")

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend")
PLACEHOLDER = 7
LABELS = (11, 12, 300)
RANDOM = np.random.default_rng(3)
QUERY: list[int] = RANDOM.integers(8, 500, 150).tolist()  # of two KV blocks
ITEMS: list[list[int]] = [RANDOM.integers(8, 500, length).tolist() for length in (5, 20, 1, 0, 9, 3)]
for tokens, places in ((QUERY, (3, 128, 149)), (ITEMS[0], (0, 4)), (ITEMS[1], (7,)), (ITEMS[4], (2,))):
    for place in places:
        tokens[place] = PLACEHOLDER
PLAIN = (2, 3, 4, 5)  # items whose tokens keep their embeddings; one of them has a placeholder

Vectors = NDArray[np.float32]


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX every day: parity of the family that scales embeddings, and bits on the path on which most requests run."""
    if test == "test_labels_of_many_tokens":
        return parameters["family"] not in ("qwen3", "gemma") or parameters["place"] == "jax-cpu"
    if parameters.get("place") == "torch-cpu" and "dtype" in parameters:
        return is_emulated(parameters["dtype"]) and parameters["algorithm"] != "prefill_extend"
    if parameters.get("place") != "jax-cpu":
        return False
    if test == "test_an_item_does_not_see_the_vectors_of_others":
        names = ("model", "dtype", "algorithm")
        return tuple(parameters[name] for name in names) != ("medium", "bfloat16", "prefill_extend")
    return (parameters["family"], parameters["algorithm"]) != ("gemma", "packed")


@dataclass(frozen=True)
class Overrides:
    """The vectors of a request."""

    query: Vectors | None
    items: tuple[Vectors | None, ...]

    def fields(self) -> dict[str, Any]:
        return {
            "embed_override_token_id": PLACEHOLDER,
            "query_embed_overrides": self.query,
            "item_embed_overrides": list(self.items),
        }


def overrides_of(width: int, seed: int = 0) -> Overrides:
    random = np.random.default_rng(seed)

    def draw(count: int) -> Vectors:
        return (0.1 * random.standard_normal((count, width))).astype(np.float32)

    return Overrides(draw(3), (draw(2), draw(1), None, None, None, None))


def own_rows(table: Vectors) -> Overrides:
    """Each placeholder with its own row of the embedding table."""
    own = table[[PLACEHOLDER]]
    return Overrides(own.repeat(3, 0), (own.repeat(2, 0), own, None, None, own, None))


def scores(scorer: Scorer, overrides: Overrides | None, **options: Any) -> Floats:
    given = {"label_token_ids": LABELS, "score_mode": "logit", **options}
    return np.array(scorer.score(QUERY, ITEMS, **given, **({} if overrides is None else overrides.fields())).scores)


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def options(place: dict[str, Any]) -> dict[str, Any]:
    """Where JAX must compile on a CPU, forwards of one size will do."""
    return {**place, "token_budget": 512} if place == {"backend": "jax", "device": "cpu"} else place


@pytest.fixture(scope="module")
def reference(family: str, reference_of: Callable[[str], Reference]) -> Reference:
    return reference_of(family)


@pytest.fixture(scope="module")
def table(reference: Reference) -> Vectors:
    found: Vectors = reference.model.get_input_embeddings().weight.detach().numpy()
    return found


@pytest.fixture(scope="module")
def scorer(family: str, options: dict[str, Any], scorer_of: Callable[..., Scorer]) -> Scorer:
    return scorer_of(family, **options)


@pytest.fixture(scope="module")
def logits(reference: Reference, table: Vectors) -> Floats:
    """[I, V] after each item, and with `overrides_of` its width."""
    return np.stack([_reference_logits(reference, overrides_of(table.shape[1]), i) for i in range(len(ITEMS))])


@pytest.mark.usefixtures("quick_compilation")
class TestParity:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_equal_those_of_inputs_embeds(
        self, scorer: Scorer, table: Vectors, logits: Floats, algorithm: Algorithm
    ) -> None:
        found = scores(scorer, overrides_of(table.shape[1]), score_mode="logprob", algorithm=algorithm)
        assert np.abs(found - expected_scores("logprob", logits, LABELS)).max() <= bound_of("logprob")

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_own_rows_change_no_bit(self, scorer: Scorer, table: Vectors, algorithm: Algorithm) -> None:
        plain = scores(scorer, None, algorithm=algorithm)
        assert np.array_equal(scores(scorer, own_rows(table), algorithm=algorithm), plain)
        assert not np.array_equal(scores(scorer, overrides_of(table.shape[1]), algorithm=algorithm), plain)

    def test_labels_of_many_tokens(self, scorer: Scorer, table: Vectors, reference: Reference) -> None:
        """Their tokens keep their embeddings, also if one of them is the placeholder."""
        overrides, label = overrides_of(table.shape[1]), [20, PLACEHOLDER, 30]
        found = scores(scorer, overrides, label_token_ids=[label], label_scoring="sequence", score_mode="logprob")
        for item in (0, 2):
            rows = [log_softmax(_reference_logits(reference, overrides, item, label[:end])) for end in range(3)]
            expected = sum(row[token] for row, token in zip(rows, label, strict=True))
            assert abs(found[item, 0] - expected) <= bound_of("logprob")


def _reference_logits(reference: Reference, overrides: Overrides, item: int, behind: list[int] | None = None) -> Floats:
    context = QUERY + ITEMS[item]
    of_item = overrides.items[item]
    in_query = np.flatnonzero(np.array(QUERY) == PLACEHOLDER)
    in_item = len(QUERY) + np.flatnonzero(np.array(ITEMS[item]) == PLACEHOLDER)
    vectors = dict(zip(in_query.tolist(), overrides.query, strict=True)) if overrides.query is not None else {}
    if of_item is not None:
        vectors |= dict(zip(in_item.tolist(), of_item, strict=True))
    return reference.overridden_logits(context + (behind or []), vectors)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["medium", "medium-gemma"])
class TestIsolation:
    def test_an_item_does_not_see_the_vectors_of_others(
        self,
        model: str,
        dtype: str,
        algorithm: Algorithm,
        options: dict[str, Any],
        scorer_of: Callable[..., Scorer],
    ) -> None:
        scorer = scorer_of(model, **{**options, "dtype": dtype}, batch_invariant=options["device"] == "cuda")
        first, second = overrides_of(512), overrides_of(512, seed=1)
        # The query has no vectors, so that the forwards of the last case have no override at all.
        others = (first, replace(first, items=second.items), replace(first, items=(None,) * len(ITEMS)))
        found = [scores(scorer, replace(each, query=None), algorithm=algorithm) for each in others]
        for one, other in pairwise(found):
            assert np.array_equal(one[list(PLAIN)], other[list(PLAIN)])
            assert not np.array_equal(one[:2], other[:2])
        # With the same vectors, and others beside it.
        mixed = scores(scorer, Overrides(first.query, (first.items[0], second.items[1], *first.items[2:])))
        alone = scorer.score(
            QUERY,
            ITEMS[:1],
            label_token_ids=LABELS,
            score_mode="logit",
            **{**first.fields(), "item_embed_overrides": first.items[:1]},
        )
        assert np.array_equal(mixed[:1], np.array(alone.scores))


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_devices_agree_with_one(scorer_of: Callable[..., Scorer], algorithm: Algorithm) -> None:
    one = scorer_of("gemma", backend="torch", device="cpu")
    four = scorer_of("gemma", backend="jax", device="cpu", dp_size=2, tp_size=2, token_budget=512)
    overrides = overrides_of(one.engine.backend.config.model_size)
    found, expected = (scores(each, overrides, score_mode="prob", algorithm=algorithm) for each in (four, one))
    assert np.abs(found - expected).max() <= bound_of("prob")


@pytest.mark.usefixtures("quick_compilation")
def test_a_scorer_compiles_programs_for_overrides_on_first_use(scorer_of: Callable[..., Scorer]) -> None:
    scorer = scorer_of("short", backend="jax", device="cpu", token_budget=512)
    backend = scorer.engine.backend
    listed = {program.title for program in backend.programs(max_dense_len=0)}
    assert not any("embed" in title for title in listed)
    scores(scorer, None, algorithm="packed")
    before = backend.num_compilations
    overrides = overrides_of(backend.config.model_size)
    scores(scorer, overrides, algorithm="packed")
    assert backend.num_compilations == before + 2  # the embeddings, and the layers behind them
    scores(scorer, own_rows(np.zeros((PLACEHOLDER + 1, backend.config.model_size), np.float32)), algorithm="packed")
    assert backend.num_compilations == before + 2
