"""An item's score does not change by one bit, whatever happens to the items beside it.

Run for every algorithm, `auto` included, and both masks, in float32 and bfloat16, on every backend, on a model whose
widths are large enough that careless GEMMs give other bits at other row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from tests.reference import Floats, is_emulated

PATHS: dict[str, dict[str, Any]] = {
    "serial": {"algorithm": "serial"},
    "packed-segment": {"algorithm": "packed", "mask": "segment"},
    "packed-dense": {"algorithm": "packed", "mask": "dense"},
    "prefill_extend": {"algorithm": "prefill_extend"},
    "auto": {"algorithm": "auto"},
}
CHUNK_SIZES = (1, 2, 3, 8, 0)  # 0: all
LABELS = (3, 5, 300)

pytestmark = pytest.mark.usefixtures("programs_on_disk")

Items = list[list[int]]
RANDOM = np.random.default_rng(7)
QUERY: list[int] = RANDOM.integers(0, 512, 140).tolist()  # longer than one attention tile
SHORT_QUERY = QUERY[:60]  # `auto` decides by the number of items, unless the prefix fills a KV block
LENGTHS = (20, 1, 33, 16, 0, 130, 20, 7, 64, 3)
ITEMS: Items = [RANDOM.integers(0, 512, length).tolist() for length in LENGTHS]
WATCHED = (0, 4, 5, 6)  # the items that stay as they are: of usual length, empty, longer than a tile, usual


def changed(items: Items) -> Items:
    return [item if i in WATCHED else [(t + 1) % 512 for t in item] for i, item in enumerate(items)]


def lengthened(items: Items) -> Items:
    return [item if i in WATCHED else [*item, *range(1, 100 + 7 * i)] for i, item in enumerate(items)]


def resized(items: Items) -> Items:
    """Every other one grows, and those between shrink."""
    longer = lengthened(items)
    return [item if i in WATCHED else longer[i] if i % 2 else item[: len(item) // 3] for i, item in enumerate(items)]


def removed(items: Items) -> Items:
    return [items[i] for i in WATCHED]


def reordered(items: Items) -> Items:
    return items[::-1]


def changed_and_reordered(items: Items) -> Items:
    return reordered(changed(items))


def joined_by_many(items: Items, num_others: int = 240) -> Items:
    random = np.random.default_rng(3)
    others = [random.integers(0, 512, int(n)).tolist() for n in random.integers(0, 25, num_others)]
    return [*others[: num_others // 2], *items, *others[num_others // 2 :]]


def joined_by_fewer(items: Items) -> Items:
    """For paths that compute the query once for each item, or every pair of a sequence."""
    return joined_by_many(items, 12)


OPTIONS = [*({"chunk_size": size} for size in CHUNK_SIZES), *({"token_budget": size} for size in (300, 1000))]
MUTATIONS = (changed_and_reordered, resized, removed, joined_by_many)


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX compiles a program for every size of batch and of dense mask: what few cases need is not for every day.
    PyTorch has one path every day in a dtype that the CPU emulates, and all of them once."""
    is_torch = "torch" in (parameters.get("cpu"), str(parameters.get("place")).removesuffix("-cpu"))
    if is_torch and is_emulated(parameters.get("dtype", "float32")) and test != "test_every_path_gives_the_same_bits":
        return "chunk_size" in test or parameters.get("path") != "prefill_extend"
    if test == "test_gemma_items_do_not_move_a_bit":
        return bool(parameters["cpu"] == "jax" or parameters["path"] == "auto")  # JAX: `test_sliding_windows.py`
    if test == "test_every_path_gives_gemma_the_same_bits":
        return bool(parameters["cpu"] == "jax")
    if test == "test_every_path_gives_the_same_bits":  # every day of JAX: `jax/test_backend.py`
        return bool(parameters["cpu"] == "jax")
    if parameters.get("option") in ({"chunk_size": 2}, {"chunk_size": 8}, {"token_budget": 1000}):  # between others
        return True
    path, mutation, option = (parameters.get(name) for name in ("path", "mutate", "option"))
    if parameters.get("place") == "torch-cpu":
        if option is not None and parameters["dtype"] == "bfloat16":  # whose forwards are cut as those of float32
            return option not in ({"chunk_size": 3}, {"token_budget": 300})
        return path == "auto" and mutation is not joined_by_many and "alone" not in test  # takes one of the others
    if parameters.get("place") != "jax-cpu":
        return False
    if parameters.get("dtype") == "bfloat16" and path != "prefill_extend":
        return True
    if path == "serial" and "alone" not in test and mutation is not changed_and_reordered:  # it runs packed's programs
        return True
    if mutation is not None:
        return mutation is joined_by_many or (path == "packed-dense" and mutation is resized)
    if path == "auto":  # takes one of the others
        return True
    if option is not None:
        return option != {"token_budget": 300} and (option != {"chunk_size": 3} or path == "packed-dense")
    if test in ("test_label_sequences_are_isolated_too", "test_the_same_item_twice_gets_the_same_bits"):
        return path == "packed-dense"
    return False


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def device(place: dict[str, Any]) -> dict[str, Any]:
    """On a GPU the cases cross buckets, so they ask for `batch_invariant`; a CPU needs no asking. JAX on a CPU gets
    forwards of up to 512 tokens, so that few programs are compiled."""
    options = {**place, "batch_invariant": place["device"] == "cuda"}
    return {**options, "token_budget": 512} if place == {"backend": "jax", "device": "cpu"} else options


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PATHS[request.param]


@pytest.fixture(scope="module")
def scorer(scorer_of: Callable[..., Scorer], dtype: str, device: dict[str, Any], path: dict[str, Any]) -> Scorer:
    return scorer_of("medium", dtype=dtype, **device, **path)


@pytest.fixture(scope="module")
def query(path: dict[str, Any]) -> list[int]:
    return SHORT_QUERY if path == PATHS["auto"] else QUERY


def scores(scorer: Scorer, items: Items, query: list[int] = QUERY) -> Floats:
    """Raw logits: any bit that moves in the model shows in them."""
    result = scorer.score(query, items, label_token_ids=LABELS, score_mode="logit")
    return np.array(result.scores)


@pytest.fixture(scope="module")
def base(scorer: Scorer, query: list[int]) -> Floats:
    """The scores of ITEMS, computed together."""
    return scores(scorer, ITEMS, query)


def watched_indices(items: Items, wanted: Sequence[list[int]]) -> list[int]:
    return [items.index(item) for item in wanted]


class TestIsolation:
    @pytest.mark.parametrize("mutate", MUTATIONS)
    def test_other_items_do_not_move_a_bit(
        self,
        scorer: Scorer,
        query: list[int],
        base: Floats,
        path: dict[str, Any],
        mutate: Callable[[Items], Items],
    ) -> None:
        watched = [ITEMS[i] for i in WATCHED]
        if mutate is joined_by_many and path in (PATHS["serial"], PATHS["packed-dense"]):
            mutate = joined_by_fewer
        mutated = mutate(ITEMS)
        found = scores(scorer, mutated, query)
        assert np.array_equal(found[watched_indices(mutated, watched)], base[list(WATCHED)])

    def test_an_item_alone_equals_itself_among_others(self, scorer: Scorer, query: list[int], base: Floats) -> None:
        alone = np.concatenate([scores(scorer, [item], query) for item in ITEMS])
        assert np.array_equal(alone, base)

    def test_probabilities_over_the_vocabulary_are_isolated_too(self, scorer: Scorer, query: list[int]) -> None:
        self.check_watched(scorer, query, label_token_ids=LABELS, score_mode="logprob")

    def test_label_sequences_are_isolated_too(self, scorer: Scorer, query: list[int]) -> None:
        labels = [[3], [5, 6, 7], [5, 8]]
        self.check_watched(scorer, query, label_token_ids=labels, label_scoring="sequence", score_mode="logprob")

    @staticmethod
    def check_watched(scorer: Scorer, query: list[int], **options: Any) -> None:
        together = scorer.score(query, ITEMS, **options).scores
        for i in WATCHED:
            assert scorer.score(query, [ITEMS[i]], **options).scores[0] == together[i], i

    def test_the_same_item_twice_gets_the_same_bits(self, scorer: Scorer, query: list[int]) -> None:
        doubled = scores(scorer, [item for item in ITEMS for _ in range(2)], query)
        assert np.array_equal(doubled[::2], doubled[1::2])


class TestChunkSizes:
    @pytest.mark.parametrize("option", OPTIONS, ids=str)
    def test_any_chunk_size_and_token_budget_give_the_same_bits(
        self,
        base: Floats,
        scorer_of: Callable[..., Scorer],
        dtype: str,
        device: dict[str, Any],
        path: dict[str, Any],
        query: list[int],
        option: dict[str, int],
    ) -> None:
        other = scorer_of("medium", dtype=dtype, **{**device, **path, **option})
        assert np.array_equal(scores(other, ITEMS, query), base)


@pytest.fixture(scope="module", params=["torch", "jax"])
def cpu(request: pytest.FixtureRequest) -> dict[str, Any]:
    options = {"backend": request.param, "device": "cpu", "batch_invariant": False}
    return {**options, "token_budget": 512} if request.param == "jax" else options


class TestAlgorithmsOnACpu:
    """On a CPU all algorithms and masks give the same bits; that is why `auto` may look at the number of items."""

    def test_every_path_gives_the_same_bits(
        self, scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any]
    ) -> None:
        base = scores(scorer_of("medium", dtype=dtype, **cpu, **PATHS["serial"]), ITEMS)
        for name, options in PATHS.items():
            assert np.array_equal(scores(scorer_of("medium", dtype=dtype, **cpu, **options), ITEMS), base), name

    def test_auto_takes_different_algorithms_unless_a_prefix_and_its_items_are_one_forward(
        self, scorer_of: Callable[..., Scorer], cpu: dict[str, Any]
    ) -> None:
        scorer = scorer_of("medium", dtype="bfloat16", **{**cpu, "algorithm": "auto", "token_budget": 512})
        chosen = [
            (scorer.score(query, items, label_token_ids=[3], return_debug=True).debug or {})["algorithm"]
            for query, items in ((SHORT_QUERY, [[1]]), (QUERY, joined_by_fewer(ITEMS)))
        ]
        joins = scorer.engine.backend.info.joins_prefill
        assert chosen == ["prefill_extend" if joins else "packed", "prefill_extend"]


class TestGemma:
    """Another activation, scaled embeddings, norms of float32, and wide heads that share one KV head."""

    def test_gemma_items_do_not_move_a_bit(
        self, scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any], path: dict[str, Any]
    ) -> None:
        scorer = scorer_of("medium-gemma", dtype=dtype, **{**cpu, **path, "token_budget": 512})
        base = scores(scorer, ITEMS)[list(WATCHED)]
        for mutated in (reordered(lengthened(ITEMS)), removed(changed(ITEMS))):
            indices = watched_indices(mutated, [ITEMS[i] for i in WATCHED])
            assert np.array_equal(scores(scorer, mutated)[indices], base)

    def test_every_path_gives_gemma_the_same_bits(
        self, scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any]
    ) -> None:
        found = [scores(scorer_of("medium-gemma", dtype=dtype, **cpu, **options), ITEMS) for options in PATHS.values()]
        assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.gpu
class TestDefaultsOnAGpu:
    """Without `batch_invariant`: in bfloat16 across buckets, as it is the default there; in float32 within a bucket."""

    @pytest.mark.parametrize("model", ["medium", "wide", "medium-gemma"])
    @pytest.mark.parametrize(
        ("backend", "precision", "mutate"),
        [
            *product(["torch", "jax"], ["bfloat16"], MUTATIONS),
            *product(["torch", "jax"], ["float32"], [changed, reordered]),
        ],
    )
    def test_other_items_do_not_move_a_bit(
        self,
        scorer_of: Callable[..., Scorer],
        path: dict[str, Any],
        model: str,
        backend: str,
        precision: str,
        mutate: Callable[[Items], Items],
    ) -> None:
        scorer = scorer_of(model, backend=backend, dtype=precision, device="cuda", **path)
        mutated = mutate(ITEMS)
        scores(scorer, ITEMS)  # the prefix is cached from here on; a forward that holds it too is in another bucket
        base = scores(scorer, ITEMS)[list(WATCHED)]
        assert np.array_equal(scores(scorer, mutated)[watched_indices(mutated, [ITEMS[i] for i in WATCHED])], base)


class TestEmbeddedModel:
    """In few items every day: `test_parity_embedded.py`."""

    @pytest.mark.slow
    @pytest.mark.parametrize("path", PATHS)
    def test_one_item_against_500(
        self, scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any], path: str
    ) -> None:
        """Thirty layers of real weights, for every algorithm and mask."""
        scorer = scorer_of("embedded", dtype=dtype, **cpu, **PATHS[path])
        texts = [f"entry number {i} of the catalogue" + " and more" * (i % 7) for i in range(500)]
        options: dict[str, Any] = {"labels": [" yes", " no"], "score_mode": "logit"}
        together = scorer.score("Is this about food? ", texts, **options).scores
        for index in (0, 6, 250, 499):
            assert scorer.score("Is this about food? ", [texts[index]], **options).scores[0] == together[index]
