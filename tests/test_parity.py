"""Every algorithm against Hugging Face transformers on the full sequence, for every family and every score mode.

The small checkpoints are made so that mistakes show; `TestSensitivity` plants two and demands that they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixwise import Scorer
from prefixwise.contract.parse import parse_score_request
from prefixwise.contract.request import Algorithm, ScoreMode
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.forward.backend import Backend
from prefixwise.forward.batch import ForwardBatch, RunningForward
from tests.checkpoints import FAMILY_NAMES
from tests.reference import PROBABILITY_BOUND, Floats, Reference, bound_of, expected_scores, is_emulated

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend", "auto")
MODES: tuple[ScoreMode, ...] = ("softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid")
SMALL_VOCABULARY = 512
SEQUENCES = [[7], [7, 9, 11], [7, 9], [30, 31, 32, 33]]

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX every day: all families, with and without logsumexp, one family with the dense mask and all algorithms.
    PyTorch: all families and algorithms, with and without logsumexp; two families in all modes.

    Elsewhere one algorithm stands for all: on a CPU they are equal bit for bit (`test_isolation.py`).
    """
    mode, algorithm = (parameters.get(name) for name in ("mode", "algorithm"))
    is_in_all_modes = parameters.get("family") in ("qwen3", "gemma")
    if parameters.get("place") == "jax-cpu":
        if test == "test_a_planted_mistake_shows":  # what shows is the checkpoint's doing, not the backend's
            return bool(parameters["family"] != "qwen3")
        is_one_for_all = parameters["family"] != "qwen3"
        if test == "test_item_first":  # nothing is shared, so all algorithms do the same
            return is_one_for_all or algorithm != "auto"
        if is_one_for_all and algorithm not in (None, "packed"):
            return True
        is_masked = parameters.get("mask") == "dense" and parameters["family"] != "qwen3"
        return mode not in ("softmax", "logprob", None) or is_masked or test == "test_one_label_sigmoid"
    if parameters.get("place") == "torch-cpu":
        if test == "test_item_first":
            return algorithm not in ("serial", "auto") or (algorithm == "serial" and not is_in_all_modes)
        return not is_in_all_modes and (mode not in ("softmax", "logprob", None) or test == "test_one_label_sigmoid")
    is_medium_gemma = parameters.get("medium") == "medium-gemma"  # every day in float32, among the families
    if parameters.get("cpu") == "jax":
        return algorithm != "packed" or is_medium_gemma
    if test == "test_scores_are_close_to_transformers" and is_emulated("bfloat16"):  # by the path of float32
        return algorithm != "packed"
    if parameters.get("device") == "cpu":  # both backends are held against transformers, too
        return algorithm != "packed" or is_medium_gemma or parameters.get("family", "qwen3") != "qwen3"
    return False


@dataclass(frozen=True)
class Case:
    """A request in token ids, and the reference's logits after each item."""

    query: list[int]
    items: list[list[int]]
    logits: Floats  # [I, V]
    labels: tuple[int, int]

    @property
    def contexts(self) -> list[list[int]]:
        return [self.query + item for item in self.items]


def choose_labels(logits: Floats) -> tuple[int, int]:
    """The pair of labels, of a few hundred, whose softmax differs most between the items."""
    pairs = np.random.default_rng(1).integers(0, logits.shape[1], (400, 2))
    spreads = [expected_scores("softmax", logits, pair)[:, 0].std() for pair in pairs if pair[0] != pair[1]]
    distinct = [pair for pair in pairs if pair[0] != pair[1]]
    best = distinct[int(np.argmax(spreads))]
    return int(best[0]), int(best[1])


def make_case(reference: Reference, seed: int = 0, vocabulary: int = SMALL_VOCABULARY) -> Case:
    random = np.random.default_rng(seed)
    query = random.integers(0, vocabulary, 150).tolist()  # longer than one attention tile
    lengths = [1, 2, 3, 7, 16, 17, 40, 140, 0, 5, 5, 9]
    items = [random.integers(0, vocabulary, length).tolist() for length in lengths]
    logits = reference.label_logits([query + item for item in items])
    return Case(query, items, logits, choose_labels(logits))


def scores_of(scorer: Scorer, case: Case, algorithm: Algorithm, mode: ScoreMode = "softmax") -> Floats:
    result = scorer.score(case.query, case.items, label_token_ids=case.labels, score_mode=mode, algorithm=algorithm)
    return np.array(result.scores)


def assert_within_bfloat16(found: Floats, expected: Floats) -> None:
    difference = np.abs(found - expected)
    assert difference.max() <= 0.02
    assert difference.mean() <= 0.01


@pytest.fixture(scope="module", params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def case(family: str, reference_of: Callable[[str], Reference]) -> Case:
    made = make_case(reference_of(family))
    spread = expected_scores("softmax", made.logits, made.labels)[:, 0].std()
    assert spread >= 0.15, f"scores hardly differ between items ({spread:.3f}), so an error would not show"
    return made


@pytest.fixture(scope="module")
def item_first_logits(family: str, case: Case, reference_of: Callable[[str], Reference]) -> Floats:
    return reference_of(family).label_logits([item + case.query for item in case.items])


@pytest.fixture(scope="module")
def sequence_logprobs(family: str, case: Case, reference_of: Callable[[str], Reference]) -> Floats:
    """[6, labels], of SEQUENCES after the first six items."""
    reference = reference_of(family)
    return np.array([[reference.sequence_logprob(c, label) for label in SEQUENCES] for c in case.contexts[:6]])


@pytest.fixture(scope="module")
def options(place: dict[str, Any]) -> dict[str, Any]:
    """Where JAX must compile on a CPU, forwards of one size will do."""
    return {**place, "token_budget": 512} if place == {"backend": "jax", "device": "cpu"} else place


@pytest.fixture(scope="module")
def scorer(family: str, options: dict[str, Any], scorer_of: Callable[..., Scorer]) -> Scorer:
    return scorer_of(family, **options)


class TestFamilies:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_equal_transformers(self, scorer: Scorer, case: Case, algorithm: Algorithm, mode: ScoreMode) -> None:
        expected = expected_scores(mode, case.logits, case.labels)
        assert np.abs(scores_of(scorer, case, algorithm, mode) - expected).max() <= bound_of(mode)

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_one_label_sigmoid(self, scorer: Scorer, case: Case, algorithm: Algorithm) -> None:
        label = case.labels[0]
        result = scorer.score(
            case.query, case.items, label_token_ids=[label], score_mode="sigmoid", algorithm=algorithm
        )
        expected = expected_scores("sigmoid", case.logits, [label])
        assert np.abs(np.array(result.scores) - expected).max() <= PROBABILITY_BOUND

    @pytest.mark.parametrize("mask", ["dense", "segment"])
    def test_packed_masks(
        self, family: str, options: dict[str, Any], scorer_of: Callable[..., Scorer], case: Case, mask: str
    ) -> None:
        scorer = scorer_of(family, **options, mask=mask, chunk_size=4)
        expected = expected_scores("softmax", case.logits, case.labels)
        assert np.abs(scores_of(scorer, case, "packed") - expected).max() <= PROBABILITY_BOUND

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_item_first(self, scorer: Scorer, case: Case, item_first_logits: Floats, algorithm: Algorithm) -> None:
        result = scorer.score(
            case.query,
            case.items,
            label_token_ids=case.labels,
            apply_softmax=True,
            item_first=True,
            algorithm=algorithm,
        )
        expected = expected_scores("softmax", item_first_logits, case.labels)
        assert np.abs(np.array(result.scores) - expected).max() <= PROBABILITY_BOUND

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_label_sequences(self, scorer: Scorer, case: Case, sequence_logprobs: Floats, algorithm: Algorithm) -> None:
        result = scorer.score(
            case.query,
            case.items[:6],
            label_token_ids=SEQUENCES,
            label_scoring="sequence",
            score_mode="logprob",
            algorithm=algorithm,
        )
        assert np.abs(np.array(result.scores) - sequence_logprobs).max() <= bound_of("logprob")


@pytest.fixture(scope="module", params=["medium", "medium-gemma"])
def medium(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bfloat16_case(medium: str, checkpoint_of: Callable[[str], Path]) -> Case:
    return make_case(Reference.load(checkpoint_of(medium), dtype=torch.bfloat16))


class TestBfloat16:
    """Against transformers in bfloat16 too, its head in float32 as ours is."""

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_are_close_to_transformers(
        self,
        medium: str,
        bfloat16_case: Case,
        scorer_of: Callable[..., Scorer],
        cpu: dict[str, Any],
        algorithm: Algorithm,
    ) -> None:
        found = scores_of(scorer_of(medium, dtype="bfloat16", **cpu), bfloat16_case, algorithm)
        assert_within_bfloat16(found, expected_scores("softmax", bfloat16_case.logits, bfloat16_case.labels))


@pytest.mark.gpu
class TestHalfPrecisionOnAGpu:
    """There the algorithms take different kernels; on a CPU they are equal bit for bit (`test_isolation.py`)."""

    @pytest.mark.parametrize("model", ["medium", "medium-gemma"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_algorithms_agree(self, scorer_of: Callable[..., Scorer], backend: str, dtype: str, model: str) -> None:
        random = np.random.default_rng(0)
        query = random.integers(0, SMALL_VOCABULARY, 700).tolist()
        items = [random.integers(0, SMALL_VOCABULARY, n).tolist() for n in (20, 1, 33, 150, 0, 64)]
        found = []
        for algorithm in ALGORITHMS:
            scorer = scorer_of(model, backend=backend, dtype=dtype, device="cuda")
            result = scorer.score(query, items, label_token_ids=[3, 5], apply_softmax=True, algorithm=algorithm)
            found.append(np.array(result.scores))
        assert_within_bfloat16(np.stack(found), found[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
class TestBackends:
    """JAX against PyTorch, on the same requests."""

    @pytest.mark.parametrize("mode", ["softmax", "logprob"])
    def test_float32_agrees(
        self,
        family: str,
        case: Case,
        scorer_of: Callable[..., Scorer],
        device: str,
        algorithm: Algorithm,
        mode: ScoreMode,
    ) -> None:
        found, expected = (
            scores_of(scorer_of(family, backend=backend, device=device, token_budget=512), case, algorithm, mode)
            for backend in ("jax", "torch")
        )
        assert np.abs(found - expected).max() <= bound_of(mode)

    def test_bfloat16_agrees(
        self, medium: str, bfloat16_case: Case, scorer_of: Callable[..., Scorer], device: str, algorithm: Algorithm
    ) -> None:
        found, expected = (
            scores_of(scorer_of(medium, backend=backend, device=device, dtype="bfloat16"), bfloat16_case, algorithm)
            for backend in ("jax", "torch")
        )
        assert_within_bfloat16(found, expected)


class Tampered(Backend):
    """A backend with a mistake planted into its batches of items, which have no blocks of prefixes beside them."""

    def __init__(self, inner: Backend, tamper: Callable[[ForwardBatch], ForwardBatch]) -> None:
        self.config, self.info = inner.config, replace(inner.info, joins_prefill=False)
        self._inner, self._tamper = inner, tamper

    def start(self, batch: ForwardBatch) -> RunningForward:
        return self._inner.start(self._tamper(batch) if len(batch.score_tokens) else batch)


def join_all_segments(batch: ForwardBatch) -> ForwardBatch:
    """A leak: every item sees the items before it."""
    return replace(
        batch,
        segment_starts=batch.segment_starts[[0, -1]],
        prefix_index=batch.prefix_index[:1],
        prefix_lens=batch.prefix_lens[:1],
    )


def shift_positions(batch: ForwardBatch) -> ForwardBatch:
    """A position error: items begin one position late."""
    return replace(batch, positions=batch.positions + 1)


class TestSensitivity:
    @pytest.mark.parametrize("tamper", [join_all_segments, shift_positions])
    def test_a_planted_mistake_shows(
        self, scorer: Scorer, case: Case, tamper: Callable[[ForwardBatch], ForwardBatch]
    ) -> None:
        scheduler = Scheduler(Tampered(scorer.engine.backend, tamper), SchedulerOptions(prefix_cache=False))
        engine = ScoringEngine(scorer.engine.config, scheduler, None)
        items = [item for item in case.items if item]  # an empty item reads one prefix token less
        body = {"query": case.query, "items": items, "label_token_ids": list(case.labels), "apply_softmax": True}
        right = np.array(scorer.score(case.query, items, label_token_ids=case.labels, apply_softmax=True).scores)
        wrong = np.array(engine.score(parse_score_request({**body, "algorithm": "prefill_extend"})).scores)
        engine.close()
        moved = np.abs(wrong - right).max(1)
        assert np.median(moved[1:]) > 10 * PROBABILITY_BOUND
