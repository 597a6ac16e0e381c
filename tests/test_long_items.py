"""Items that are computed in pieces, on real backends: no bit moves, and the scores are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.engine.stats import EngineStats
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import ForwardBatch
from tests.faults import FaultyBackend
from tests.reference import LOGIT_BOUND, Floats, Reference, is_emulated

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

Items = list[list[int]]
RANDOM = np.random.default_rng(11)
QUERY: list[int] = RANDOM.integers(0, 512, 150).tolist()  # a KV block, and a part of one
LENGTHS = (20, 1100, 257, 1, 600, 33)
ITEMS: Items = [RANDOM.integers(0, 512, length).tolist() for length in LENGTHS]
OTHERS: Items = [RANDOM.integers(0, 512, length).tolist() for length in (1030, 5, 300)]
LABELS = (3, 5, 300)
PATHS: dict[str, dict[str, Any]] = {
    "serial": {"algorithm": "serial"},
    "packed-segment": {"algorithm": "packed", "mask": "segment"},
    "packed-dense": {"algorithm": "packed", "mask": "dense"},
    "prefill_extend": {"algorithm": "prefill_extend"},
}


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Every day PyTorch, and one algorithm for all, which are equal bit for bit on a CPU; of a dtype that this CPU
    emulates, only that they are. JAX compiles for each algorithm and dtype."""
    if parameters.get("place") == "jax-cpu" or parameters.get("cpu") == "jax":
        return True
    if test == "test_every_path_and_chunk_size_gives_the_same_bits":
        return bool(parameters["dtype"] == "float32")
    if parameters.get("place", "torch-cpu") == "torch-cpu" and is_emulated(parameters.get("dtype", "float32")):
        return True
    return bool(parameters.get("path", "prefill_extend") != "prefill_extend")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PATHS[request.param]


def scores(scorer: Scorer, items: Items, query: list[int] = QUERY) -> Floats:
    """Raw logits: any bit that moves in the model shows in them."""
    return np.array(scorer.score(query, items, label_token_ids=LABELS, score_mode="logit").scores)


@pytest.fixture(scope="module")
def scorer(scorer_of: Callable[..., Scorer], dtype: str, place: dict[str, Any], path: dict[str, Any]) -> Scorer:
    """On a GPU the cases cross buckets, so they ask for `batch_invariant`."""
    return scorer_of("medium", dtype=dtype, batch_invariant=place["device"] == "cuda", **place, **path)


@pytest.fixture(scope="module")
def base(scorer: Scorer) -> Floats:
    return scores(scorer, ITEMS)


class TestIsolation:
    def test_some_are_cut(self, scorer: Scorer) -> None:
        info = scorer.engine.backend.info
        assert max(LENGTHS) > info.max_whole_item > min(LENGTHS)
        assert info.reads_short_blocks == ((info.name, info.device_kind) == ("torch", "cpu"))

    def test_an_item_alone_equals_itself_among_others(self, scorer: Scorer, base: Floats) -> None:
        assert np.array_equal(np.concatenate([scores(scorer, [item]) for item in ITEMS]), base)

    def test_neighbours_and_their_order_do_not_move_a_bit(self, scorer: Scorer, base: Floats) -> None:
        items = [OTHERS[0], ITEMS[4], OTHERS[1], ITEMS[1], ITEMS[0], OTHERS[2], ITEMS[2]]
        assert np.array_equal(scores(scorer, items)[[1, 3, 4, 6]], base[[4, 1, 0, 2]])

    def test_a_cold_query_gives_the_bits_of_a_cached_one(self, scorer: Scorer) -> None:
        query = [7, *QUERY[:-1]]
        alone = scores(scorer, [ITEMS[1]], query)
        together, again = (scores(scorer, ITEMS[:3], query) for _ in range(2))
        assert np.array_equal(together, again)
        assert np.array_equal(together[1], alone[0])


class OtherLimits(FaultyBackend):
    """A scorer's backend, which stays open for it, with other facts."""

    def __init__(self, backend: Backend, **facts: Any) -> None:
        super().__init__(backend)
        self.info = replace(backend.info, **facts)

    def close(self) -> None:
        self.clear()


def scored_on(backend: OtherLimits, scorer: Scorer, **options: Any) -> tuple[Floats, EngineStats]:
    """The scores of ITEMS by an engine of its own."""
    scheduler = Scheduler(backend, SchedulerOptions(**options))
    with closing(ScoringEngine(scorer.engine.config, scheduler, None)) as engine:
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "score_mode": "logit"}
        return np.array(engine.score(parse_score_request(body)).scores), scheduler.stats()


@pytest.fixture(scope="module")
def cpu_scorer(scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any]) -> Scorer:
    return scorer_of("medium", dtype=dtype, batch_invariant=False, **cpu)


@pytest.fixture(scope="module")
def cpu_base(cpu_scorer: Scorer) -> Floats:
    return scores(cpu_scorer, ITEMS)


class TestOnACpu:
    """There all algorithms give the same bits."""

    def test_every_path_and_chunk_size_gives_the_same_bits(
        self, scorer_of: Callable[..., Scorer], dtype: str, cpu: dict[str, Any], cpu_base: Floats
    ) -> None:
        for options in (*PATHS.values(), {"chunk_size": 1}, {"chunk_size": 2, "algorithm": "packed"}):
            assert np.array_equal(
                scores(scorer_of("medium", dtype=dtype, batch_invariant=False, **cpu, **options), ITEMS), cpu_base
            ), options

    @pytest.mark.parametrize("step_tokens", [128, 300])
    def test_any_step_and_a_small_kv_cache_give_the_same_bits(
        self, cpu_scorer: Scorer, cpu_base: Floats, step_tokens: int
    ) -> None:
        """The cache holds query and head of the longest item, and nothing else beside them."""
        facts = {"step_tokens": step_tokens, "step_seconds": None, "num_kv_blocks": 10}
        found, stats = scored_on(OtherLimits(cpu_scorer.engine.backend, **facts), cpu_scorer)
        assert np.array_equal(found, cpu_base)
        assert stats.steps >= sum(LENGTHS) / step_tokens

    def test_a_failed_step_does_not_move_a_bit(self, cpu_scorer: Scorer, cpu_base: Floats) -> None:
        """The device fails when the head of the longest item is half done."""
        backend = OtherLimits(cpu_scorer.engine.backend, step_tokens=256)
        wanted = ITEMS[1][560:580]  # in one block, wherever blocks begin

        def has_middle(batch: ForwardBatch) -> bool:
            ids = batch.token_ids.tolist()
            return any(ids[i : i + len(wanted)] == wanted for i in range(len(ids)))

        backend.inject("raise", when=has_middle)
        found, stats = scored_on(backend, cpu_scorer)
        assert (stats.failed_steps, stats.reruns) == (1, 1)
        assert np.array_equal(found, cpu_base)


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["medium", "wide"])
def test_defaults_of_a_gpu_do_not_move_a_bit(
    scorer_of: Callable[..., Scorer], path: dict[str, Any], model: str
) -> None:
    """Without `batch_invariant`, in bfloat16."""
    scorer = scorer_of(model, backend="torch", dtype="bfloat16", device="cuda", **path)
    base = scores(scorer, ITEMS)
    assert np.array_equal(scores(scorer, ITEMS[::-1])[::-1], base)
    assert np.array_equal(np.concatenate([scores(scorer, [item]) for item in ITEMS]), base)


def test_scores_equal_transformers(
    scorer_of: Callable[..., Scorer], place: dict[str, Any], path: dict[str, Any], checkpoint_of: Callable[[str], Path]
) -> None:
    reference = Reference.load(checkpoint_of("medium"))
    expected = reference.label_logits([QUERY + item for item in ITEMS])[:, list(LABELS)]
    found = scores(scorer_of("medium", dtype="float32", batch_invariant=False, **place, **path), ITEMS)
    assert np.abs(found - expected).max() <= LOGIT_BOUND
