"""Rerankers out of the box: a checkpoint with no flag gets the scores that its official recipe gives.

The recipes (`tests/prompts/recipes.py`) run with transformers, one document at a time and in float32, on small random
checkpoints in folders that are called what the real ones are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prefixwise import Scorer
from prefixwise.contract.errors import PrefixwiseWarning, ProfileError, RequestError
from prefixwise.contract.result import RerankResult
from tests.checkpoints import make_classifier, make_hf_checkpoint, read_hf_tensors
from tests.prompts.golden import read_by_transformers
from tests.prompts.recipes import RECIPES
from tests.prompts.reranker_tokenizers import MAKERS, VOCAB_SIZE
from tests.reference import LOGIT_BOUND, PROBABILITY_BOUND, Reference

# Profile: the checkpoint's folder, its family and its tokenizer.
MODELS = {
    "qwen3-reranker": ("Qwen3-Reranker-0.6B", "qwen3", "qwen"),
    "mxbai-rerank-v2": ("mxbai-rerank-base-v2", "qwen2", "qwen"),
    "bge-reranker-v2-gemma": ("bge-reranker-v2-gemma", "gemma", "gemma"),
    "zerank": ("zerank-1-small", "qwen3", "qwen"),
    "ctxl-rerank-v2": ("ctxl-rerank-v2-instruct-multilingual-1b", "qwen3", "qwen"),
    "chat-yes-no": ("some-chat-model", "llama", "qwen"),
    "question-yes-no": ("some-model", "llama", "gpt2"),
}
RERANKERS = ("qwen3-reranker", "mxbai-rerank-v2", "bge-reranker-v2-gemma", "zerank", "ctxl-rerank-v2")
LIMITS = {"qwen3-reranker": ("max_context_len", 92), "mxbai-rerank-v2": ("max_body_len", 40)}

QUERY = "what is the capital of France"
DOCUMENTS = [
    "London is not it.",
    "Paris is the capital of France.",
    "",
    "  12345 世界 🙂 <|im_end|> yes",
    "? Paris",
    "Paris is the capital of France.",
    "quick brown fox, " * 40,
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")

    def make(profile: str) -> Path:
        name, family, tokenizer = MODELS[profile]
        make_hf_checkpoint(base / name, family, vocab_size=VOCAB_SIZE)
        return MAKERS[tokenizer](base / name)

    return cache(make)


@pytest.fixture(scope="module")
def reference_of(folder_of: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda profile: Reference.load(folder_of(profile)))


@pytest.fixture(scope="module")
def scorer_at() -> Iterator[Callable[..., Scorer]]:
    """A scorer of a folder, on PyTorch unless told otherwise; all are closed at the end."""
    loaded: dict[tuple[object, ...], Scorer] = {}

    def get(folder: Path, backend: str = "torch", **options: Any) -> Scorer:
        key = (folder, backend, *options.items())
        if key not in loaded:
            loaded[key] = Scorer(folder, backend=backend, device="cpu", dtype="float32", **options)
        return loaded[key]

    yield get
    for scorer in loaded.values():
        scorer.close()


@pytest.fixture(scope="module")
def classifier(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """qwen3-reranker's model with a head of its own, in folders whose names say nothing."""
    causal = folder_of("qwen3-reranker")
    tokenizer, embedding = read_by_transformers(causal), read_hf_tensors(causal)["model.embed_tokens.weight"]
    yes, no = (embedding[tokenizer.convert_tokens_to_ids(label)] for label in ("yes", "no"))
    heads: dict[str, NDArray[np.float32]] = {
        "one row": (yes - no)[None],
        "two rows": np.stack([no, yes]),
        "other head": np.random.default_rng(0).normal(0, 0.1, (1, len(yes))).astype(np.float32),
    }
    base = tmp_path_factory.mktemp("classifiers")

    def make(kind: str) -> Path:
        folder = make_classifier(base / f"model{list(heads).index(kind)}", causal, heads[kind])
        return MAKERS["qwen"](folder)

    return cache(make)


def official_scores(
    profile: str,
    folder: Path,
    reference: Reference,
    documents: Sequence[str],
    instruction: str | None = None,
    limit: int | None = None,
) -> list[float]:
    """The recipe's own, before any sigmoid."""
    recipe, tokenizer = RECIPES[profile], read_by_transformers(folder)
    scores = []
    for document in documents:
        ids = recipe.ids(tokenizer, QUERY, document, instruction, limit)
        scores.append(recipe.raw_score(tokenizer, torch.from_numpy(reference.last_logits(ids))))
    return scores


def check(result: RerankResult, expected: Sequence[float]) -> None:
    """Raw scores and relevance, and so the order."""
    assert sorted(each.index for each in result.results) == list(range(len(expected)))
    for each in result.results:
        raw = expected[each.index]
        assert each.raw_score == pytest.approx(raw, abs=LOGIT_BOUND)
        assert each.relevance_score == pytest.approx(1 / (1 + math.exp(-raw)), abs=PROBABILITY_BOUND)
    scores = [each.relevance_score for each in result.results]
    assert scores == sorted(scores, reverse=True)
    assert max(expected) - min(expected) > 100 * LOGIT_BOUND, "scores that hardly differ prove nothing"


@pytest.mark.parametrize("profile", RERANKERS)
@pytest.mark.parametrize("instruction", [None, "Find the code that answers"])
def test_a_reranker_with_no_flag_scores_as_its_recipe(
    profile: str,
    instruction: str | None,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_at: Callable[..., Scorer],
) -> None:
    folder = folder_of(profile)
    if profile == "zerank" and instruction is not None:
        with pytest.raises(RequestError, match="takes no instruction"):
            scorer_at(folder).rerank(QUERY, DOCUMENTS, instruction=instruction)
        return
    result = scorer_at(folder).rerank(QUERY, DOCUMENTS, instruction=instruction)
    assert (result.profile, result.warnings, result.truncated) == (profile, (), ())
    check(result, official_scores(profile, folder, reference_of(profile), DOCUMENTS, instruction))


@pytest.mark.parametrize(
    "profile",
    ["chat-yes-no", "question-yes-no"],
)
def test_any_model_reranks_and_says_that_it_is_not_known(
    profile: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_at: Callable[..., Scorer],
) -> None:
    folder = folder_of(profile)
    for instruction in (None, "Is it code?"):
        with pytest.warns(PrefixwiseWarning, match=f"so {profile} was used"):
            result = scorer_at(folder).rerank(QUERY, DOCUMENTS, instruction=instruction)
        assert result.profile == profile
        assert len(result.warnings) == 1
        check(result, official_scores(profile, folder, reference_of(profile), DOCUMENTS, instruction))


def test_a_passage_is_cut_where_the_recipe_cuts_it(
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_at: Callable[..., Scorer],
) -> None:
    """At the 1024 tokens of its model card."""
    profile = "bge-reranker-v2-gemma"
    documents = ["Paris", "London is not Paris. " * 300, "12345" * 250]
    with pytest.warns(PrefixwiseWarning, match="2 document"):
        result = scorer_at(folder_of(profile)).rerank(QUERY, documents)
    assert [cut.index for cut in result.truncated] == [1, 2]
    (warning,) = result.warnings
    assert "were cut" in warning
    check(result, official_scores(profile, folder_of(profile), reference_of(profile), documents))


@pytest.mark.parametrize("profile", LIMITS)
def test_a_users_copy_with_another_limit_scores_as_the_recipe_with_that_limit(
    profile: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_at: Callable[..., Scorer],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    name, limit = LIMITS[profile]
    ours = files("prefixwise.prompts").joinpath("profiles", f"{profile}.toml").read_text()
    copy = tmp_path_factory.mktemp("profiles") / "short.toml"
    copy.write_text(
        ours.replace(f'name = "{profile}"', 'name = "short"').replace(f"{name} = 8192", f"{name} = {limit}")
    )
    with pytest.warns(PrefixwiseWarning, match="were cut"):
        result = scorer_at(folder_of(profile), profile=copy).rerank(QUERY, DOCUMENTS)
    (warning,) = result.warnings
    assert result.profile == "short" and "were cut" in warning
    assert 6 in [cut.index for cut in result.truncated]
    check(result, official_scores(profile, folder_of(profile), reference_of(profile), DOCUMENTS, limit=limit))


def test_fewer_tokens_of_a_document_are_its_first_ones(
    folder_of: Callable[[str], Path], scorer_at: Callable[..., Scorer]
) -> None:
    scorer = scorer_at(folder_of("qwen3-reranker"))
    with pytest.warns(PrefixwiseWarning, match="were cut"):
        cut = scorer.rerank(QUERY, ["12345"], max_tokens_per_doc=4)  # the space before it is the first
    assert cut.results[0].raw_score == scorer.rerank(QUERY, ["123"]).results[0].raw_score
    assert [(each.original_tokens, each.kept_tokens) for each in cut.truncated] == [(6, 4)]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("profile", ["qwen3-reranker", "bge-reranker-v2-gemma"])
def test_jax_gives_the_recipes_scores_too(
    profile: str,
    folder_of: Callable[[str], Path],
    reference_of: Callable[[str], Reference],
    scorer_at: Callable[..., Scorer],
) -> None:
    folder = folder_of(profile)
    result = scorer_at(folder, "jax").rerank(QUERY, DOCUMENTS)
    assert (result.profile, result.warnings) == (profile, ())
    check(result, official_scores(profile, folder, reference_of(profile), DOCUMENTS))


@pytest.mark.parametrize("profile", RERANKERS)
def test_a_score_is_the_same_bits_alone_among_others_and_twice(
    profile: str, folder_of: Callable[[str], Path], scorer_at: Callable[..., Scorer]
) -> None:
    scorer = scorer_at(folder_of(profile))
    together = {each.index: each.raw_score for each in scorer.rerank(QUERY, DOCUMENTS).results}
    assert together[1] == together[5]  # the same document
    backwards = {each.index: each.raw_score for each in scorer.rerank(QUERY, DOCUMENTS[::-1]).results}
    for index, document in enumerate(DOCUMENTS):
        (alone,) = scorer.rerank(QUERY, [document]).results
        assert alone.raw_score == together[index] == backwards[len(DOCUMENTS) - 1 - index]


class TestClassifiers:
    """Of one row, the difference of `yes` and `no`, or of one row for each."""

    @pytest.mark.parametrize("kind", ["one row", "two rows"])
    @pytest.mark.parametrize("instruction", [None, "Find it"])
    def test_a_converted_reranker_is_known_by_its_head_and_scores_alike(
        self,
        kind: str,
        instruction: str | None,
        classifier: Callable[[str], Path],
        folder_of: Callable[[str], Path],
        reference_of: Callable[[str], Reference],
        scorer_at: Callable[..., Scorer],
    ) -> None:
        scorer = scorer_at(classifier(kind))
        assert scorer.engine.config.profiles.reason == "the model's head is made of its labels' rows"
        result = scorer.rerank(QUERY, DOCUMENTS, instruction=instruction)
        assert (result.profile, result.warnings) == ("qwen3-reranker", ())
        profile = "qwen3-reranker"
        check(result, official_scores(profile, folder_of(profile), reference_of(profile), DOCUMENTS, instruction))

    @pytest.mark.usefixtures("quick_compilation")
    def test_jax_reads_the_head_too(self, classifier: Callable[[str], Path], scorer_at: Callable[..., Scorer]) -> None:
        on_torch = scorer_at(classifier("two rows")).rerank(QUERY, DOCUMENTS[:4])
        on_jax = scorer_at(classifier("two rows"), "jax").rerank(QUERY, DOCUMENTS[:4])
        assert on_jax.profile == "qwen3-reranker"
        check(on_jax, [score for _, score in sorted((each.index, each.raw_score) for each in on_torch.results)])

    def test_one_that_no_profile_is_known_for_asks_for_it(
        self, classifier: Callable[[str], Path], scorer_at: Callable[..., Scorer]
    ) -> None:
        with pytest.raises(RequestError) as caught:
            scorer_at(classifier("other head")).rerank(QUERY, DOCUMENTS)
        assert (caught.value.code, caught.value.status, caught.value.param) == ("invalid_profile", 400, "profile")
        assert "--profile" in caught.value.message
        assert "qwen3-reranker" in caught.value.message

    def test_it_may_be_told_by_the_request_or_when_it_is_loaded(
        self, classifier: Callable[[str], Path], scorer_at: Callable[..., Scorer]
    ) -> None:
        """Its score is what transformers' own classifier gives for the recipe's tokens."""
        from transformers import AutoModelForSequenceClassification

        folder = classifier("other head")
        named = scorer_at(folder).rerank(QUERY, DOCUMENTS, profile="qwen3-reranker")
        loaded = scorer_at(folder, profile="qwen3-reranker").rerank(QUERY, DOCUMENTS)
        assert named.results == loaded.results
        assert named.warnings == loaded.warnings == ()
        model, tokenizer = (
            AutoModelForSequenceClassification.from_pretrained(folder).eval(),
            read_by_transformers(folder),
        )
        expected = []
        for document in DOCUMENTS:
            ids = RECIPES["qwen3-reranker"].ids(tokenizer, QUERY, document, None)
            with torch.inference_mode():
                expected.append(model(torch.tensor([ids])).logits[0, 0].item())
        check(named, expected)

    @pytest.mark.parametrize("kind", ["one row", "other head"])
    def test_it_has_no_scores_of_labels(
        self, kind: str, classifier: Callable[[str], Path], scorer_at: Callable[..., Scorer]
    ) -> None:
        with pytest.raises(RequestError, match="this model is a classifier") as caught:
            scorer_at(classifier(kind)).score(QUERY, DOCUMENTS, labels=["yes", "no"])
        assert (caught.value.code, caught.value.status) == ("no_label_logits", 400)


@pytest.mark.parametrize("profile", ["bge-reranker-v2-gemma", "nothing", "nothing.toml"])
def test_a_profile_that_cannot_be_is_refused_before_the_model_is_loaded(
    profile: str, folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(ProfileError):
        Scorer(folder_of("qwen3-reranker"), backend="torch", device="cpu", profile=profile)
