"""Classifiers' heads and pooled hidden states: equal to Hugging Face transformers, and isolated bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefixwise import Scorer
from prefixwise.contract.errors import PrefixwiseWarning
from prefixwise.contract.request import Algorithm
from tests.checkpoints import add_tokenizer, make_classifier
from tests.reference import LOGIT_BOUND, PROBABILITY_BOUND, Floats, log_softmax

pytestmark = pytest.mark.usefixtures("programs_on_disk")

ALGORITHMS: tuple[Algorithm, ...] = ("serial", "packed", "prefill_extend")
TEXTS = ["The quick brown fox jumps", "yes", "Is this document relevant to the query? no"]
INPUTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]


@dataclass(frozen=True)
class Head:
    """A head, and how its checkpoint describes it."""

    num_labels: int
    problem_type: str | None = None
    label: str = "LABEL_"  # of its id2label: transformers' default or another

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"{self.label}{row}" for row in range(self.num_labels))


# Another head for each family: more classes than a tile of labels has, each problem type, a reward model's one logit.
HEADS = {
    "qwen3": Head(20, label="class "),
    "qwen2": Head(3, "multi_label_classification"),
    "llama": Head(1),
    "mistral": Head(2, "single_label_classification", "class "),
    "gemma": Head(4, "regression"),
    "medium": Head(20),
}


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """JAX compiles programs for every family. Every day: all algorithms for one, packed for the one that differs most.

    Heads do not depend on families, and `test_parity.py` has all families.
    """
    if parameters.get("place") != "jax-cpu":
        return False
    family, algorithm = parameters.get("family"), parameters.get("algorithm")
    if test == "test_other_items_do_not_move_a_bit":  # requests at once take prefill_extend
        return bool(algorithm == "prefill_extend")
    return family not in (None, "qwen3", "gemma") or (family == "gemma" and algorithm not in (None, "packed"))


@pytest.fixture(scope="module")
def classifier_of(
    checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A classifier by its family; all others of its parameters are those of `checkpoint_of`."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            head, causal = HEADS[family], checkpoint_of(family)
            size = 512 if family == "medium" else 64
            rows = 0.1 * np.random.default_rng(7).standard_normal((head.num_labels, size), np.float32)
            made[family] = make_classifier(
                tmp_path_factory.mktemp("heads") / family,
                causal,
                rows,
                problem_type=head.problem_type,
                id2label=dict(enumerate(head.labels)),
                label2id={label: row for row, label in enumerate(head.labels)},
            )
            add_tokenizer(made[family], bos=family == "llama")
        return made[family]

    return get


@dataclass(frozen=True)
class Truth:
    """transformers' own classifier, one sequence at a time."""

    model: Any

    @classmethod
    def load(cls, folder: Path) -> Truth:
        from transformers import AutoModelForSequenceClassification

        return cls(AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval())

    def logits_and_hidden(self, contexts: list[list[int]]) -> tuple[Floats, Floats]:
        """[I, C] and [I, D]: of the head, and after the final norm, at the last token."""
        logits, hidden = [], []
        for context in contexts:
            ids = torch.tensor([context])
            with torch.inference_mode():
                logits.append(self.model(ids).logits[0].double().numpy())
                hidden.append(self.model.model(ids).last_hidden_state[0, -1].double().numpy())
        return np.stack(logits), np.stack(hidden)


@pytest.fixture(scope="module", params=[name for name in HEADS if name != "medium"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, classifier_of: Callable[[str], Path]) -> Path:
    return classifier_of(family)


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    return Truth.load(folder)


QUERY: list[int] = np.random.default_rng(0).integers(0, 512, 150).tolist()  # longer than one KV block
ITEMS: list[list[int]] = [
    np.random.default_rng(1 + length).integers(0, 512, length).tolist() for length in (1, 2, 17, 140, 0, 5)
]


@pytest.fixture(scope="module")
def expected(truth: Truth) -> tuple[Floats, Floats]:
    return truth.logits_and_hidden([QUERY + item for item in ITEMS])


def options_of(place: dict[str, Any]) -> dict[str, Any]:
    """JAX on a CPU compiles programs of one size, with the KV cache of `scorer_of`, so that they are found on disk: a
    head is no part of a trunk. Many scorers share a GPU."""
    if place["device"] == "cuda":
        return {**place, "prefix_cache_bytes": 1 << 28, "batch_invariant": True}
    return {**place, "token_budget": 512, "prefix_cache_bytes": 1 << 26} if place["backend"] == "jax" else place


@pytest.fixture(scope="module")
def scorer(folder: Path, place: dict[str, Any], quick_compilation: None) -> Iterator[Scorer]:
    with Scorer(folder, dtype="float32", **options_of(place)) as made:
        yield made


class TestParity:
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_scores_and_hidden_states_equal_transformers(
        self, scorer: Scorer, family: str, expected: tuple[Floats, Floats], algorithm: Algorithm
    ) -> None:
        logits, hidden = expected
        result = scorer.score(QUERY, ITEMS, algorithm=algorithm, return_pooled_hidden_states=True)
        assert result.score_mode == "logit"
        assert result.labels == HEADS[family].labels
        assert np.abs(np.array(result.scores) - logits).max() <= LOGIT_BOUND
        assert result.pooled_hidden_states is not None
        assert np.abs(np.array(result.pooled_hidden_states) - hidden).max() <= LOGIT_BOUND
        assert np.ptp(logits, axis=0).min() > 0.1, "so that a mistake would show"
        one_label = pytest.warns(PrefixwiseWarning, match="softmax over one label")
        with one_label if HEADS[family].num_labels == 1 else nullcontext():
            shares = scorer.score(QUERY, ITEMS, algorithm=algorithm, apply_softmax=True)
        assert shares.pooled_hidden_states is None
        assert np.abs(np.array(shares.scores) - np.exp(log_softmax(logits))).max() <= PROBABILITY_BOUND

    def test_classes_are_those_of_transformers_pipeline(self, scorer: Scorer, folder: Path, truth: Truth) -> None:
        """Labels, activation by problem_type, and BOS where the tokenizer adds it."""
        from transformers import PreTrainedTokenizerFast, TextClassificationPipeline

        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        pipeline = TextClassificationPipeline(model=truth.model, tokenizer=tokenizer, device="cpu")
        found = scorer.classify(TEXTS)
        for text, one in zip(TEXTS, found.results, strict=True):
            (wanted,) = pipeline([text], top_k=None)
            assert one.label == wanted[0]["label"]
            scores = {each["label"]: each["score"] for each in wanted}
            for label, number in zip(found.labels, one.probs, strict=True):
                assert abs(scores[label] - number) <= LOGIT_BOUND
        raw = scorer.classify(TEXTS, use_activation=False)
        logits, hidden = truth.logits_and_hidden([tokenizer.encode(text) for text in TEXTS])
        assert np.abs(np.array([each.probs for each in raw.results]) - logits).max() <= LOGIT_BOUND
        assert raw.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in TEXTS)
        assert np.abs(scorer.embed(TEXTS).embeddings - hidden).max() <= LOGIT_BOUND


def test_a_causal_model_has_hidden_states_too(
    scorer_of: Callable[..., Scorer], reference_of: Callable[[str], Any], place: dict[str, Any], quick_compilation: None
) -> None:
    scorer, model = scorer_of("qwen3", token_budget=512, **place), reference_of("qwen3").model
    for ids, found in zip(INPUTS, scorer.embed(INPUTS).embeddings, strict=True):
        with torch.inference_mode():
            wanted = model.model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        assert np.abs(found - wanted).max() <= LOGIT_BOUND
    # Labels of many tokens have several rows per item: the state is that after the item.
    options: dict[str, Any] = {"return_pooled_hidden_states": True, "score_mode": "logprob"}
    one = scorer.score([5], [[6, 7]], label_token_ids=[3], **options)
    many = scorer.score([5], [[6, 7]], label_token_ids=[[3, 4, 5], [8]], label_scoring="sequence", **options)
    states = [np.array(each.pooled_hidden_states) for each in (one, many)]
    assert np.abs(states[0] - states[1]).max() <= LOGIT_BOUND


@pytest.fixture(scope="module")
def wide(classifier_of: Callable[[str], Path], place: dict[str, Any]) -> Iterator[Scorer]:
    """So wide that GEMMs of another number of rows would give other bits; compiled as for users. On a GPU
    through CUDA graphs, which float32 does not have."""
    dtype = "bfloat16" if place["device"] == "cuda" else "float32"
    with Scorer(classifier_of("medium"), dtype=dtype, **options_of(place)) as made:
        yield made


@pytest.mark.usefixtures("users_compilation")
class TestIsolation:
    @staticmethod
    def bits(scorer: Scorer, items: list[list[int]], **options: Any) -> list[tuple[list[float], list[float]]]:
        """Logits and hidden state of each item."""
        result = scorer.score(QUERY, items, return_pooled_hidden_states=True, **options)
        assert result.pooled_hidden_states is not None
        states = [state.tolist() for state in result.pooled_hidden_states if state is not None]
        return [(row, state) for row, state in zip(result.scores, states, strict=True) if row is not None]

    @pytest.mark.parametrize("algorithm", ["packed", "prefill_extend"])
    def test_other_items_do_not_move_a_bit(self, wide: Scorer, algorithm: Algorithm) -> None:
        base = self.bits(wide, ITEMS, algorithm=algorithm)
        random = np.random.default_rng(3)
        others = [random.integers(0, 512, 3 + number % 40).tolist() for number in range(30)]
        changed = [[7, *ITEMS[0]], *ITEMS[1:]]
        assert self.bits(wide, changed, algorithm=algorithm)[1:] == base[1:]
        assert self.bits(wide, ITEMS[::-1], algorithm=algorithm) == base[::-1]
        assert self.bits(wide, [*others[:15], *ITEMS, *others[15:]], algorithm=algorithm)[15:-15] == base
        assert self.bits(wide, ITEMS[2:3], algorithm=algorithm) == base[2:3]
        plain = wide.score(QUERY, ITEMS, algorithm=algorithm)
        assert plain.scores == [logits for logits, _ in base], "asking for hidden states changes no score"

    def test_requests_at_once_and_inputs_beside_others(self, wide: Scorer) -> None:
        """Some want hidden states, others do not: they run in the same steps."""
        alone = [wide.embed([ids]).embeddings[0].tolist() for ids in INPUTS]
        classes = [wide.classify([ids]).results[0].probs for ids in INPUTS]
        base = self.bits(wide, ITEMS)
        with ThreadPoolExecutor(6) as pool:
            embeds = [pool.submit(wide.embed, [*INPUTS, [3] * number]) for number in (1, 9, 70)]
            scored = [pool.submit(self.bits, wide, ITEMS) for _ in range(2)]
            classified = [pool.submit(wide.classify, [[8] * number, *INPUTS]) for number in (2, 30)]
        assert all(each.result().embeddings.tolist()[:3] == alone for each in embeds)
        assert all(each.result() == base for each in scored)
        for each in classified:
            assert [one.probs for one in each.result().results[1:]] == classes
