"""Documents best first: a rerank request on a backend whose scores can be worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend, fake_logits
from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.contract.request import Algorithm
from prefixwise.contract.rerank_request import Dialect
from prefixwise.contract.result import RerankResult, Truncation
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.reranker import Reranker
from prefixwise.engine.scheduler import Scheduler, SchedulerOptions
from prefixwise.prompts.profile import Piece, Profile
from prefixwise.prompts.profile_choice import ProfileChoice, builtin_profile, builtin_profiles
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.engine.live import engine_on
from tests.prompts.reranker_tokenizers import MAKERS, VOCAB_SIZE, read_text_tokenizer

TINY = Profile(
    name="tiny",
    description="",
    relevance="softmax",
    labels=("yes", "no"),
    before=(),
    body=(Piece("{query}:"), Piece("{document}")),
    after=(Piece("?"),),
)
DOCUMENTS = ["Paris", "", "12", "Paris", "London is not Paris", "? Paris", "世界", "21"]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextTokenizer]:
    base = tmp_path_factory.mktemp("tokenizers")
    return cache(lambda name: read_text_tokenizer(MAKERS[name](base / name)))


@pytest.fixture(scope="module")
def qwen(tokenizer_of: Callable[[str], TextTokenizer]) -> TextTokenizer:
    return tokenizer_of("qwen")


@contextmanager
def reranker_on(
    tokenizer: TextTokenizer | None,
    profile: Profile | None = TINY,
    *,
    warning: str | None = None,
    max_items: int = 100,
    prefix_cache: bool = True,
) -> Iterator[Reranker]:
    by_name = dict(builtin_profiles()) | ({} if profile is None else {profile.name: profile})
    choice = ProfileChoice(profile, "it is a test", by_name, warning)
    config = EngineConfig("fake", max_items_per_request=max_items, profiles=choice)
    scheduler = Scheduler(FakeBackend(VOCAB_SIZE), SchedulerOptions(prefix_cache=prefix_cache))
    with closing(ScoringEngine(config, scheduler, tokenizer)) as engine:
        yield Reranker(engine)


def rerank(reranker: Reranker, documents: list[str], query: str = "what", **fields: Any) -> RerankResult:
    return reranker.rerank(parse_rerank_request({"query": query, "documents": documents, **fields}))


def by_index(result: RerankResult) -> dict[int, float]:
    return {each.index: each.raw_score for each in result.results}


def logits_by_hand(tokenizer: TextTokenizer, texts: list[str], labels: tuple[str, ...]) -> list[float]:
    """After texts that are tokenized one by one, as the pieces of TINY are."""
    context = np.concatenate([tokenizer.encode(text) for text in texts])
    ids = np.array([tokenizer.label_id(label, 0) for label in labels], np.int32)
    return [float(each) for each in fake_logits(context, ids)]


def test_the_best_document_comes_first(qwen: TextTokenizer) -> None:
    with reranker_on(qwen) as reranker:
        result = rerank(reranker, DOCUMENTS)
    scores = [each.raw_score for each in result.results]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 3
    for each in result.results:
        assert each.document == DOCUMENTS[each.index]
        yes, no = logits_by_hand(qwen, ["what:", each.document, "?"], ("yes", "no"))
        assert each.raw_score == pytest.approx(yes - no, abs=1e-6)
        assert each.relevance_score == pytest.approx(1 / (1 + math.exp(no - yes)), abs=1e-6)
    assert (result.model, result.profile, result.warnings, result.debug) == ("fake", "tiny", (), None)


@pytest.mark.parametrize(
    ("relevance", "labels"),
    [("softmax", ("yes", "no", "1")), ("logit_diff", ("1", "0")), ("logit", ("Yes",)), ("prob", ("yes",))],
)
def test_relevance_is_what_the_profile_says(relevance: Any, labels: tuple[str, ...], qwen: TextTokenizer) -> None:
    everything = tuple(range(VOCAB_SIZE))
    with reranker_on(qwen, replace(TINY, relevance=relevance, labels=labels)) as reranker:
        result = rerank(reranker, DOCUMENTS)
    for each in result.results:
        logits = logits_by_hand(qwen, ["what:", each.document, "?"], labels)
        context = np.concatenate([qwen.encode(text) for text in ("what:", each.document, "?")])
        total = np.exp(fake_logits(context, np.array(everything, np.int32)).astype(np.float64)).sum()
        expected = {
            "softmax": math.exp(logits[0]) / sum(map(math.exp, logits)),
            "logit_diff": 1 / (1 + math.exp(logits[-1] - logits[0])),
            "logit": 1 / (1 + math.exp(-logits[0])),
            "prob": math.exp(logits[0]) / total,
        }
        assert each.relevance_score == pytest.approx(expected[relevance], rel=1e-5)


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@pytest.mark.parametrize(
    ("profile", "tokenizer"),
    [("qwen3-reranker", "qwen"), ("bge-reranker-v2-gemma", "gemma"), ("chat-yes-no", "smollm")],
)
def test_every_algorithm_reads_the_prompts_whole(
    algorithm: Algorithm, profile: str, tokenizer: str, tokenizer_of: Callable[[str], TextTokenizer]
) -> None:
    """With documents that share less of the prefix than others do, or are empty."""
    with reranker_on(tokenizer_of(tokenizer), builtin_profile(profile)) as reranker:
        request = parse_rerank_request({"query": "what is it", "documents": DOCUMENTS, "algorithm": algorithm})
        prepared = reranker.prepare(request)
        result = reranker.rerank(request)
    prompt = prepared.scoring.prompt
    labels = np.array([label for (label,) in prompt.label_ids], np.int32)
    for each in result.results:
        logits = fake_logits(prompt.context(each.index), labels).astype(np.float64)
        assert each.raw_score == logits[0] - (logits[1] if len(logits) == 2 else 0)


def test_an_empty_document_with_nothing_behind_it_is_scored(qwen: TextTokenizer) -> None:
    with reranker_on(qwen, replace(TINY, after=())) as reranker:
        result = rerank(reranker, ["Paris", "", "1"])
    yes, no = logits_by_hand(qwen, ["what:"], ("yes", "no"))
    assert by_index(result)[1] == pytest.approx(yes - no, abs=1e-6)


def test_equal_documents_get_equal_scores_and_stay_in_order(qwen: TextTokenizer) -> None:
    """As many as it takes for an unstable sort to move them."""
    documents = ["12", "Paris", "1"] * 30
    with reranker_on(qwen) as reranker:
        result = rerank(reranker, documents)
    scores = {
        document: {score for i, score in by_index(result).items() if documents[i] == document} for document in documents
    }
    assert [len(each) for each in scores.values()] == [1, 1, 1]
    assert len(set.union(*scores.values())) == 3
    positions = [each.index for each in result.results]
    for document in scores:
        found = [index for index in positions if documents[index] == document]
        assert found == sorted(found)


@pytest.mark.parametrize("top_n", [1, 3, len(DOCUMENTS), len(DOCUMENTS) + 5])
def test_only_the_best_are_given_where_that_is_asked(top_n: int, qwen: TextTokenizer) -> None:
    with reranker_on(qwen) as reranker:
        everything = rerank(reranker, DOCUMENTS)
        best = rerank(reranker, DOCUMENTS, top_n=top_n)
    assert best.results == everything.results[:top_n]
    assert best.usage.prompt_tokens == everything.usage.prompt_tokens


def test_a_score_does_not_depend_on_the_other_documents(qwen: TextTokenizer) -> None:
    with reranker_on(qwen) as reranker:
        together = by_index(rerank(reranker, DOCUMENTS))
        alone = {index: by_index(rerank(reranker, [document]))[0] for index, document in enumerate(DOCUMENTS)}
        backwards = by_index(rerank(reranker, DOCUMENTS[::-1]))
    assert together == alone
    assert together == {len(DOCUMENTS) - 1 - index: score for index, score in backwards.items()}


def test_a_long_document_is_as_relevant_as_its_best_chunk(qwen: TextTokenizer) -> None:
    profile = replace(TINY, max_context_len=2 + 2 + 1)  # two tokens of a document fit
    with reranker_on(qwen, profile) as reranker:
        chunks = by_index(rerank(reranker, ["12", "34", "56"]))
        cut = rerank(reranker, ["123456", "56"])
        whole = rerank(reranker, ["123456", "56"], max_chunks_per_doc=3)
        left = rerank(reranker, ["123456", "56"], truncation_side="left")
    assert by_index(whole) == {0: max(chunks.values()), 1: chunks[2]}
    assert max(chunks.values()) != chunks[0]
    assert by_index(cut) == {0: chunks[0], 1: chunks[2]}
    assert by_index(left) == {0: chunks[2], 1: chunks[2]}
    assert (cut.truncated, whole.truncated) == ((Truncation(0, 6, 2),), ())


def test_tokens_are_those_of_the_prefix_and_of_every_document(qwen: TextTokenizer) -> None:
    with reranker_on(qwen) as reranker:
        usage = rerank(reranker, ["12", "3", ""]).usage
    assert usage.prompt_tokens == 2 + 2 + 1 + 0


def test_a_prefix_is_computed_once(qwen: TextTokenizer) -> None:
    query = "Paris London " * 100
    with reranker_on(qwen) as reranker:
        prefix = reranker.prepare_prefix(query, None, None)
        first = rerank(reranker, ["1", "2"], query)
        second = rerank(reranker, ["1", "2"], query)
    assert prefix.tolist() == qwen.encode(f"{query}:").tolist()
    assert first.usage.cached_tokens == 0
    assert 0 < second.usage.cached_tokens <= len(prefix)
    assert first.results == second.results


def test_a_prefix_that_is_not_cached_cannot_be_prepared(qwen: TextTokenizer) -> None:
    with reranker_on(qwen, prefix_cache=False) as reranker, pytest.raises(RequestError) as caught:
        reranker.prepare_prefix("what", None, None)
    assert caught.value.code == "prefix_cache_disabled"


def test_a_request_may_name_a_profile_and_an_instruction(qwen: TextTokenizer) -> None:
    with reranker_on(qwen, warning="this model is not known") as reranker:
        default = rerank(reranker, DOCUMENTS)
        called_so = rerank(reranker, DOCUMENTS, profile="default")
        named = rerank(reranker, DOCUMENTS, profile="qwen3-reranker")
        instructed = rerank(reranker, DOCUMENTS, profile="qwen3-reranker", instruction="Find it")
    assert (default.profile, default.warnings) == ("tiny", ("this model is not known",))
    assert called_so == default
    assert (named.profile, named.warnings) == (
        "qwen3-reranker",
        ("profile qwen3-reranker is for qwen3 models, and this one is of the family fake",),
    )
    assert by_index(named) != by_index(default)
    assert by_index(named) != by_index(instructed)


def test_a_model_that_nothing_is_known_of_says_so(qwen: TextTokenizer) -> None:
    with closing(engine_on(FakeBackend(VOCAB_SIZE), tokenizer=qwen)) as engine:
        result = rerank(Reranker(engine), ["a"])
    assert result.profile == "chat-yes-no"
    assert len(result.warnings) == 1
    assert "no reranker profile is known for this model" in result.warnings[0]


def test_debug_is_given_where_it_is_asked_for(qwen: TextTokenizer) -> None:
    with reranker_on(qwen) as reranker:
        assert rerank(reranker, ["a"], return_debug=True).debug


def test_progress_is_reported(qwen: TextTokenizer) -> None:
    reported: list[tuple[int, int]] = []
    with reranker_on(qwen) as reranker:
        request = parse_rerank_request({"query": "what", "documents": DOCUMENTS})
        reranker.rerank(request, lambda done, total: reported.append((done, total)))
    assert reported[-1] == (len(DOCUMENTS), len(DOCUMENTS))


class TestRefusals:
    @pytest.mark.parametrize(
        ("profile", "message"),
        [
            ("nothing", "profile must be one of bge-reranker-v2-gemma"),
            ("", "profile must be one of bge-reranker-v2-gemma"),
            ("plain", 'profile "plain" has no labels of its own'),
            ("bge-reranker-v2-gemma", "this model's tokenizer lacks <bos>"),
        ],
    )
    def test_a_profile_that_does_not_fit(self, profile: str, message: str, qwen: TextTokenizer) -> None:
        with reranker_on(qwen) as reranker, pytest.raises(RequestError) as caught:
            rerank(reranker, ["a"], profile=profile)
        error = caught.value
        assert (error.code, error.status, error.param) == ("invalid_profile", 400, "profile")
        assert message in error.message

    def test_a_chat_profile_without_a_chat_template(self, tokenizer_of: Callable[[str], TextTokenizer]) -> None:
        alone = replace(builtin_profile("chat-yes-no"), name="alone", without_chat_template=None)
        lost = replace(alone, name="lost", without_chat_template="nowhere")
        for profile in (alone, lost):
            with reranker_on(tokenizer_of("gpt2"), profile) as reranker, pytest.raises(RequestError) as caught:
                rerank(reranker, ["a"])
            assert (caught.value.code, caught.value.param) == ("invalid_profile", "profile")

    def test_a_chat_profile_may_name_another_one_for_models_without_a_template(
        self, tokenizer_of: Callable[[str], TextTokenizer]
    ) -> None:
        with reranker_on(tokenizer_of("gpt2")) as reranker:
            assert rerank(reranker, ["a"], profile="chat-yes-no").profile == "question-yes-no"

    @pytest.mark.parametrize(("field", "dialect"), [("documents", "native"), ("texts", "tei")])
    def test_too_many_documents(self, field: str, dialect: Dialect, qwen: TextTokenizer) -> None:
        body = {"query": "what", field: ["a", "b", "c"]}
        with reranker_on(qwen, max_items=2) as reranker, pytest.raises(RequestError) as caught:
            reranker.rerank(parse_rerank_request(body, dialect))
        assert (caught.value.code, caught.value.param) == ("too_many_items", field)

    def test_no_tokenizer(self) -> None:
        with reranker_on(None) as reranker, pytest.raises(TokenizerError, match="send ids to /v1/score"):
            rerank(reranker, ["a"])

    def test_a_classifier_that_is_not_known(self, qwen: TextTokenizer) -> None:
        with reranker_on(qwen, None) as reranker, pytest.raises(RequestError, match="--profile") as caught:
            rerank(reranker, ["a"])
        assert caught.value.code == "invalid_profile"

    def test_scores_of_labels_from_a_classifier(self, qwen: TextTokenizer) -> None:
        backend = FakeBackend(VOCAB_SIZE)
        backend.config = replace(backend.config, num_classes=1)
        with closing(engine_on(backend, tokenizer=qwen)) as engine, pytest.raises(RequestError) as caught:
            engine.score(parse_score_request({"query": "q", "items": ["a"], "labels": ["yes"]}))
        assert caught.value.code == "no_label_logits"
        assert "expected a request without labels" in caught.value.message

    def test_one_document_that_does_not_fit_spoils_nothing_that_follows(self, qwen: TextTokenizer) -> None:
        profile = replace(TINY, max_context_len=8)
        with reranker_on(qwen, profile) as reranker:
            with pytest.raises(RequestError) as caught:
                rerank(reranker, ["1", "1234567"], truncate=False)
            assert caught.value.item_index == 1
            assert len(rerank(reranker, ["1", "1234567"]).results) == 2
