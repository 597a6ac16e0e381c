"""Every algorithm against Hugging Face transformers on the full sequence, for every family and every score mode.

The small checkpoints are made so that mistakes show; `TestSensitivity` plants two and demands that they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from itemwise import Scorer
from itemwise.backends.base import Backend, ForwardBatch, ForwardOutput
from itemwise.contract.parse import parse_score_request
from itemwise.contract.request import Algorithm, ScoreMode
from itemwise.engine.engine import ScoringEngine
from itemwise.models.embedded import embedded_model_path
from tests.checkpoints import FAMILY_NAMES
from tests.reference import PROBABILITY_BOUND, Floats, Reference, bound_of, expected_scores

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend", "auto")
MODES: tuple[ScoreMode, ...] = ("softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid")
SMALL_VOCABULARY = 512


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


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def scorer(family: str, device: str, scorer_of: Callable[..., Scorer]) -> Scorer:
    return scorer_of(family, device=device)


class TestFamilies:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_equal_transformers(self, scorer: Scorer, case: Case, algorithm: Algorithm, mode: ScoreMode) -> None:
        result = scorer.score(case.query, case.items, label_token_ids=case.labels, score_mode=mode, algorithm=algorithm)
        expected = expected_scores(mode, case.logits, case.labels)
        assert np.abs(np.array(result.scores) - expected).max() <= bound_of(mode)

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
        self, family: str, device: str, scorer_of: Callable[..., Scorer], case: Case, mask: str
    ) -> None:
        scorer = scorer_of(family, device=device, mask=mask, chunk_size=4)
        result = scorer.score(
            case.query, case.items, label_token_ids=case.labels, apply_softmax=True, algorithm="packed"
        )
        expected = expected_scores("softmax", case.logits, case.labels)
        assert np.abs(np.array(result.scores) - expected).max() <= PROBABILITY_BOUND

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_item_first(
        self, scorer: Scorer, case: Case, reference_of: Callable[[str], Reference], family: str, algorithm: Algorithm
    ) -> None:
        logits = reference_of(family).label_logits([item + case.query for item in case.items])
        result = scorer.score(
            case.query,
            case.items,
            label_token_ids=case.labels,
            apply_softmax=True,
            item_first=True,
            algorithm=algorithm,
        )
        expected = expected_scores("softmax", logits, case.labels)
        assert np.abs(np.array(result.scores) - expected).max() <= PROBABILITY_BOUND

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_label_sequences(
        self, scorer: Scorer, case: Case, reference_of: Callable[[str], Reference], family: str, algorithm: Algorithm
    ) -> None:
        labels = [[7], [7, 9, 11], [7, 9], [30, 31, 32, 33]]
        reference = reference_of(family)
        expected = np.array([[reference.sequence_logprob(c, label) for label in labels] for c in case.contexts[:6]])
        result = scorer.score(
            case.query,
            case.items[:6],
            label_token_ids=labels,
            label_scoring="sequence",
            score_mode="logprob",
            algorithm=algorithm,
        )
        assert np.abs(np.array(result.scores) - expected).max() <= bound_of("logprob")


TEXT_QUERY = "Decide whether the text is about food. Text: "
TEXT_ITEMS = ("Fresh pasta with tomato sauce.", "The tax code of 1986.", "", "Grüße aus Köln 🙂", "pizza " * 40)
TEXT_LABELS = (" yes", " no")


@pytest.fixture(scope="module")
def embedded_logits(reference_of: Callable[[str], Reference]) -> Floats:
    from transformers import AutoTokenizer

    path = embedded_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (TEXT_QUERY, *TEXT_ITEMS)]
    return reference_of("embedded").label_logits([[*ids[0], *item] for item in ids[1:]])


class TestEmbeddedModel:
    """Real weights, real tokenizer, text in."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_equal_transformers(
        self, scorer_of: Callable[..., Scorer], embedded_logits: Floats, algorithm: Algorithm, mode: ScoreMode
    ) -> None:
        scorer = scorer_of("embedded")
        assert scorer.engine.tokenizer is not None
        label_ids = [scorer.engine.tokenizer.label_id(label, i) for i, label in enumerate(TEXT_LABELS)]
        result = scorer.score(TEXT_QUERY, TEXT_ITEMS, labels=TEXT_LABELS, score_mode=mode, algorithm=algorithm)
        expected = expected_scores(mode, embedded_logits, label_ids)
        assert np.abs(np.array(result.scores) - expected).max() <= bound_of(mode)

    def test_bfloat16_stays_within_its_bounds(self, scorer_of: Callable[..., Scorer], embedded_logits: Floats) -> None:
        scorer = scorer_of("embedded", dtype="bfloat16")
        assert scorer.engine.tokenizer is not None
        label_ids = [scorer.engine.tokenizer.label_id(label, i) for i, label in enumerate(TEXT_LABELS)]
        result = scorer.score(TEXT_QUERY, TEXT_ITEMS, labels=TEXT_LABELS, apply_softmax=True)
        difference = np.abs(np.array(result.scores) - expected_scores("softmax", embedded_logits, label_ids))
        assert difference.max() <= 0.02
        assert difference.mean() <= 0.01


class TestBfloat16:
    """Against transformers in bfloat16 too, its head in float32 as ours is."""

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_are_close_to_transformers(
        self, checkpoint_of: Callable[[str], Path], scorer_of: Callable[..., Scorer], algorithm: Algorithm
    ) -> None:
        reference = Reference.load(checkpoint_of("medium"), dtype=torch.bfloat16)
        case = make_case(reference)
        scorer = scorer_of("medium", dtype="bfloat16", device="cpu")
        result = scorer.score(
            case.query, case.items, label_token_ids=case.labels, apply_softmax=True, algorithm=algorithm
        )
        difference = np.abs(np.array(result.scores) - expected_scores("softmax", case.logits, case.labels))
        assert difference.max() <= 0.02
        assert difference.mean() <= 0.01


@pytest.mark.gpu
class TestHalfPrecisionOnAGpu:
    """There the algorithms take different kernels; on a CPU they are equal bit for bit (`test_isolation.py`)."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_algorithms_agree(self, scorer_of: Callable[..., Scorer], dtype: str) -> None:
        random = np.random.default_rng(0)
        query = random.integers(0, SMALL_VOCABULARY, 700).tolist()
        items = [random.integers(0, SMALL_VOCABULARY, n).tolist() for n in (20, 1, 33, 150, 0, 64)]
        found = []
        for algorithm in ALGORITHMS:
            scorer = scorer_of("medium", dtype=dtype, device="cuda")
            result = scorer.score(query, items, label_token_ids=[3, 5], apply_softmax=True, algorithm=algorithm)
            found.append(np.array(result.scores))
        difference = np.abs(np.stack(found) - found[0])
        assert difference.max() <= 0.02
        assert difference.mean() <= 0.01


class Tampered(Backend):
    """A backend with a mistake planted into its batches."""

    def __init__(self, inner: Backend, tamper: Callable[[ForwardBatch], ForwardBatch]) -> None:
        self.config, self.info = inner.config, inner.info
        self._inner, self._tamper = inner, tamper

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        return self._inner.forward(self._tamper(batch) if len(batch.score_tokens) else batch)


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
        engine = ScoringEngine(scorer.engine.config, Tampered(scorer.engine.backend, tamper), None)
        items = [item for item in case.items if item]  # an empty item reads one prefix token less
        body = {"query": case.query, "items": items, "label_token_ids": list(case.labels), "apply_softmax": True}
        right = np.array(scorer.score(case.query, items, label_token_ids=case.labels, apply_softmax=True).scores)
        wrong = np.array(engine.score(parse_score_request({**body, "algorithm": "prefill_extend"})).scores)
        moved = np.abs(wrong - right).max(1)
        assert np.median(moved[1:]) > 10 * PROBABILITY_BOUND
