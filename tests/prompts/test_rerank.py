"""Prompts by a profile: what is cut where a document is too long, and what profile and model must agree on.

Which tokens a profile makes of its pieces is pinned in `test_golden_ids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import ProfileError, RequestError
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import Truncation
from prefixwise.prompts.profile import Piece, Profile
from prefixwise.prompts.profile_choice import builtin_profile
from prefixwise.prompts.rerank import RerankPrompt, RerankPrompts
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.golden import QUERY, SETTINGS, Case, profile_of_case, read_by_transformers
from tests.prompts.recipes import RECIPES
from tests.prompts.reranker_tokenizers import VOCAB_SIZE, read_text_tokenizer

MODEL = FakeBackend(VOCAB_SIZE, max_context_len=32_768).config
# Every character here is a token: three before the body, two of it before the document, three behind it.
TINY = Profile(
    name="tiny",
    description="",
    relevance="softmax",
    labels=("1", "0"),
    before=(Piece("<<"), Piece("<")),
    body=(Piece("{query}"), Piece("="), Piece("{document}")),
    after=(Piece("}}"), Piece("+-")),
)
NUM_AROUND = 3 + 2 + 3
RERANKERS = ("qwen3-reranker", "bge-reranker-v2-gemma", "mxbai-rerank-v2")


@pytest.fixture(scope="module")
def qwen(text_tokenizer: Callable[[str], TextTokenizer]) -> TextTokenizer:
    return text_tokenizer("qwen")


def prompts_of(profile: Profile, tokenizer: TextTokenizer) -> RerankPrompts:
    return RerankPrompts(profile, tokenizer, replace(MODEL, num_classes=1 if profile.classifier else 0))


def make(tokenizer: TextTokenizer, documents: list[str], profile: Profile = TINY, **fields: Any) -> RerankPrompt:
    request = RerankRequest("7", tuple(documents), **fields)
    return RerankPrompts(profile, tokenizer, MODEL).prompt(request)


def texts(tokenizer: TextTokenizer, made: RerankPrompt) -> list[str]:
    """What the model reads, row by row."""
    prompt = made.prompt
    rows = [prompt.context(row).tolist() for row in range(len(prompt.sequences))]
    assert [len(row) for row in rows] == prompt.context_lens().tolist()
    return ["".join(map(tokenizer.decode_token, row)) for row in rows]


def room_for(num_tokens: int) -> Profile:
    return replace(TINY, max_context_len=NUM_AROUND + num_tokens)


def error_of(tokenizer: TextTokenizer, documents: list[str], profile: Profile = TINY, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(tokenizer, documents, profile, **fields)
    return caught.value


def test_every_document_is_a_row_behind_the_shared_prefix(qwen: TextTokenizer) -> None:
    made = make(qwen, ["123", "", "4"])
    assert texts(qwen, made) == ["<<<7=123}+-", "<<<7=}+-", "<<<7=4}+-"]
    assert "".join(map(qwen.decode_token, made.prompt.prefix_ids.tolist())) == "<<<7="
    assert made.owners.tolist() == [0, 1, 2]
    assert made.prompt.truncated == ()
    assert made.prompt.label_ids == ((qwen.label_id("1", 0),), (qwen.label_id("0", 0),))


class TestOneRow:
    """A document that is too long, and may not be cut into several."""

    def test_its_end_is_cut_and_what_follows_it_is_whole(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["12345", "1234", "123456789"], room_for(4))
        assert texts(qwen, made) == ["<<<7=1234}+-"] * 3
        assert made.prompt.truncated == (Truncation(0, 5, 4), Truncation(2, 9, 4))

    def test_its_beginning_is_cut_from_the_left(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["12345", "12"], room_for(4), truncation_side="left")
        assert texts(qwen, made) == ["<<<7=2345}+-", "<<<7=12}+-"]
        assert made.prompt.truncated == (Truncation(0, 5, 4),)

    @pytest.mark.parametrize(("side", "kept"), [("right", "123"), ("left", "345")])
    def test_a_request_may_ask_for_fewer_tokens(self, side: Any, kept: str, qwen: TextTokenizer) -> None:
        made = make(qwen, ["12345", "12"], max_tokens_per_doc=3, truncation_side=side)
        assert texts(qwen, made) == [f"<<<7={kept}}}+-", "<<<7=12}+-"]
        assert made.prompt.truncated == (Truncation(0, 5, 3),)

    def test_the_tighter_limit_holds(self, qwen: TextTokenizer) -> None:
        assert texts(qwen, make(qwen, ["12345"], room_for(2), max_tokens_per_doc=3)) == ["<<<7=12}+-"]
        assert texts(qwen, make(qwen, ["12345"], room_for(4), max_tokens_per_doc=3)) == ["<<<7=123}+-"]

    def test_a_limit_of_the_body_counts_neither_what_is_before_nor_after(self, qwen: TextTokenizer) -> None:
        assert texts(qwen, make(qwen, ["12345"], replace(TINY, max_body_len=5))) == ["<<<7=123}+-"]

    def test_the_models_own_limit_holds_for_every_profile(self, qwen: TextTokenizer) -> None:
        for profile in (TINY, room_for(100), replace(TINY, max_body_len=100)):
            prompts = RerankPrompts(profile, qwen, replace(MODEL, max_context_len=NUM_AROUND + 2))
            assert texts(qwen, prompts.prompt(RerankRequest("7", ("12345",)))) == ["<<<7=12}+-"]

    def test_tokens_are_counted_before_the_cut(self, qwen: TextTokenizer) -> None:
        assert make(qwen, ["12345", "12"], room_for(4)).prompt.prompt_tokens == 5 + 5 + 2


class TestChunks:
    def test_a_long_document_is_several_rows(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["123456789", "12", ""], room_for(4), max_chunks_per_doc=3)
        assert texts(qwen, made) == ["<<<7=1234}+-", "<<<7=5678}+-", "<<<7=9}+-", "<<<7=12}+-", "<<<7=}+-"]
        assert made.owners.tolist() == [0, 0, 0, 1, 2]
        assert made.prompt.truncated == ()

    def test_what_does_not_fit_into_the_chunks_is_cut(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["123456789", "12345"], room_for(4), max_chunks_per_doc=2)
        assert texts(qwen, made) == ["<<<7=1234}+-", "<<<7=5678}+-", "<<<7=1234}+-", "<<<7=5}+-"]
        assert made.prompt.truncated == (Truncation(0, 9, 8),)

    def test_from_the_left_the_last_chunks_are_kept(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["123456789"], room_for(4), max_chunks_per_doc=2, truncation_side="left")
        assert texts(qwen, made) == ["<<<7=2345}+-", "<<<7=6789}+-"]

    def test_a_limit_of_tokens_comes_before_the_chunks(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["123456789"], room_for(4), max_chunks_per_doc=3, max_tokens_per_doc=5)
        assert texts(qwen, made) == ["<<<7=1234}+-", "<<<7=5}+-"]
        assert made.prompt.truncated == (Truncation(0, 9, 5),)

    @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        lens=st.lists(st.integers(0, 30), min_size=1, max_size=5),
        room=st.integers(1, 12),
        max_chunks=st.none() | st.integers(1, 4),
        max_tokens=st.none() | st.integers(1, 30),
        side=st.sampled_from(["right", "left"]),
    )
    def test_the_rows_are_what_is_kept_of_each_document(
        self,
        lens: list[int],
        room: int,
        max_chunks: int | None,
        max_tokens: int | None,
        side: Any,
        text_tokenizer: Callable[[str], TextTokenizer],
    ) -> None:
        qwen = text_tokenizer("qwen")
        documents = [("1234567890" * 3)[:length] for length in lens]
        made = make(
            qwen,
            documents,
            room_for(room),
            max_chunks_per_doc=max_chunks,
            max_tokens_per_doc=max_tokens,
            truncation_side=side,
        )
        kept = ["" for _ in documents]
        for owner, text in zip(made.owners.tolist(), texts(qwen, made), strict=True):
            part = text.removeprefix("<<<7=").removesuffix("}+-")
            assert len(part) <= room
            kept[owner] += part
        limits = [min(room * (max_chunks or 1), max_tokens or 99, length) for length in lens]
        for document, text, limit in zip(documents, kept, limits, strict=True):
            assert text == (document[:limit] if side == "right" else document[len(document) - limit :])
        cut = [Truncation(i, lens[i], limits[i]) for i in range(len(lens)) if limits[i] < lens[i]]
        assert list(made.prompt.truncated) == cut
        assert made.owners.tolist() == sorted(made.owners.tolist())


class TestNoTruncation:
    def test_a_document_that_does_not_fit_is_an_error(self, qwen: TextTokenizer) -> None:
        error = error_of(qwen, ["1234", "12345", "123456"], room_for(4), truncate=False)
        assert (error.code, error.status, error.param, error.item_index) == ("context_too_long", 400, "documents", 1)
        assert "documents[1] must fit: expected at most 4 tokens, got 5" in error.message

    def test_it_is_called_what_the_caller_calls_it(self, qwen: TextTokenizer) -> None:
        error = error_of(qwen, ["12345"], room_for(4), truncate=False, documents_field="texts")
        assert (error.param, error.message.split()[0]) == ("texts", "texts[0]")

    def test_documents_that_fit_pass(self, qwen: TextTokenizer) -> None:
        assert texts(qwen, make(qwen, ["1234"], room_for(4), truncate=False)) == ["<<<7=1234}+-"]

    def test_chunks_are_room_too(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["12345678"], room_for(4), truncate=False, max_chunks_per_doc=2)
        assert len(texts(qwen, made)) == 2
        error = error_of(qwen, ["123456789"], room_for(4), truncate=False, max_chunks_per_doc=2)
        assert "expected at most 8 tokens, got 9" in error.message

    def test_a_limit_that_the_request_sets_cuts_all_the_same(self, qwen: TextTokenizer) -> None:
        made = make(qwen, ["12345"], room_for(4), truncate=False, max_tokens_per_doc=3)
        assert made.prompt.truncated == (Truncation(0, 5, 3),)


class TestLongQueries:
    def test_a_query_that_leaves_no_room_is_an_error(self, qwen: TextTokenizer) -> None:
        error = error_of(qwen, ["1"], room_for(0))
        assert (error.code, error.status, error.param) == ("context_too_long", 400, "query")
        assert "shorten the query" in error.message
        assert texts(qwen, make(qwen, ["1"], room_for(1))) == ["<<<7=1}+-"]

    @pytest.mark.parametrize("name", SETTINGS)
    def test_where_the_official_recipe_would_cut_the_query_we_refuse(
        self, name: str, text_tokenizer: Callable[[str], TextTokenizer]
    ) -> None:
        """The one difference: a query that was cut in silence asks for something else."""
        tokenizers, limit = SETTINGS[name]
        case = Case(tokenizers[0], QUERY, "", limit=limit)
        prompts = prompts_of(profile_of_case(name, case), text_tokenizer(tokenizers[0]))
        with pytest.raises(RequestError) as caught:
            prompts.prompt(RerankRequest("Paris " * limit, ("1",)))
        assert (caught.value.code, caught.value.param) == ("context_too_long", "query")

    @pytest.mark.parametrize("name", ["bge-reranker-v2-gemma", "mxbai-rerank-v2"])
    def test_a_query_beyond_three_quarters_of_the_recipes_limit_is_refused(
        self, name: str, text_tokenizer: Callable[[str], TextTokenizer]
    ) -> None:
        """There the recipes cut it, in silence."""
        (tokenizer,), _ = SETTINGS[name]
        prompts = RerankPrompts(
            profile_of_case(name, Case(tokenizer, "", "", limit=100)), text_tokenizer(tokenizer), MODEL
        )
        with pytest.raises(RequestError, match="query must have at most 75 tokens") as caught:
            prompts.prompt(RerankRequest("1" * 85, ("0" * 5,)))
        assert (caught.value.code, caught.value.param) == ("context_too_long", "query")
        assert prompts.prompt(RerankRequest("1" * 60, ("0" * 5,))).prompt.truncated == ()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_prefix_of_a_query_is_that_of_its_requests(
    name: str, text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    for tokenizer in SETTINGS[name][0]:
        prompts = prompts_of(profile_of_case(name, Case(tokenizer, "", "")), text_tokenizer(tokenizer))
        for instruction in (None, "Find it") if prompts.profile.takes_instruction else (None,):
            request = RerankRequest(QUERY, ("Paris", "", "1"), instruction=instruction)
            prefix = prompts.prefix(QUERY, instruction)
            assert prefix.tolist() == prompts.prompt(request).prompt.prefix_ids.tolist()
            assert len(prefix) >= len(text_tokenizer(tokenizer).encode(QUERY))


@pytest.mark.parametrize("name", RERANKERS)
def test_braces_of_query_and_instruction_are_text(
    name: str, tokenizer_folder: Callable[[str], Path], text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    (tokenizer,), _ = SETTINGS[name]
    prompts = RerankPrompts(builtin_profile(name), text_tokenizer(tokenizer), MODEL)
    query, instruction, document = "{document} {0} }{", "{query} {{x}}", "{instruction}"
    made = prompts.prompt(RerankRequest(query, (document,), instruction=instruction))
    reader = read_by_transformers(tokenizer_folder(tokenizer))
    assert made.prompt.context(0).tolist() == RECIPES[name].ids(reader, query, document, instruction)


def test_an_instruction_needs_a_place(qwen: TextTokenizer) -> None:
    error = error_of(qwen, ["1"], instruction="Find it")
    assert (error.code, error.param) == ("conflicting_parameters", "instruction")
    assert 'profile "tiny" takes no instruction, got "Find it"' in error.message


class TestFit:
    """Profile and model must belong together."""

    def test_labels_of_the_request_are_for_scoring_only(self, qwen: TextTokenizer) -> None:
        with pytest.raises(ProfileError, match='profile "plain" has no labels of its own, so it cannot rerank'):
            RerankPrompts(builtin_profile("plain"), qwen, MODEL)

    @pytest.mark.parametrize(
        ("name", "tokenizer", "lacking"),
        [
            ("qwen3-reranker", "smollm", "<think>, </think>"),
            ("qwen3-reranker", "gemma", "<|im_start|>, <|im_end|>, <think>, </think>"),
            ("mxbai-rerank-v2", "gpt2", "<|im_start|>, <|im_end|>"),
            ("bge-reranker-v2-gemma", "qwen", "<bos>"),
        ],
    )
    def test_special_tokens_must_be_there(
        self, name: str, tokenizer: str, lacking: str, text_tokenizer: Callable[[str], TextTokenizer]
    ) -> None:
        with pytest.raises(ProfileError, match=f"lacks {lacking.replace('|', '.')}: it is for another model"):
            RerankPrompts(builtin_profile(name), text_tokenizer(tokenizer), MODEL)

    @pytest.mark.parametrize("num_classes", [1, 2])
    def test_a_classifier_has_no_probabilities_and_no_third_label(self, num_classes: int, qwen: TextTokenizer) -> None:
        model = replace(MODEL, num_classes=num_classes)
        for profile in (
            replace(TINY, relevance="prob", labels=("yes",)),
            replace(TINY, relevance="softmax", labels=("yes", "no", "1")),
        ):
            with pytest.raises(ProfileError, match="this model is a classifier"):
                RerankPrompts(profile, qwen, model)

    def test_a_classifier_of_many_classes_cannot_rerank(self, qwen: TextTokenizer) -> None:
        with pytest.raises(ProfileError, match=r"a classifier of 3 classes, so it has no relevance .* use /classify"):
            RerankPrompts(TINY, qwen, replace(MODEL, num_classes=3))

    def test_labels_must_be_single_tokens(self, qwen: TextTokenizer) -> None:
        with pytest.raises(ProfileError, match=r'"tiny" needs labels that are one token each, .* "nay" is 3'):
            RerankPrompts(replace(TINY, labels=("1", "nay")), qwen, MODEL)

    def test_a_chat_needs_a_chat_template(self, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
        with pytest.raises(ProfileError, match='profile "chat-yes-no" needs a chat template, and this model has none'):
            RerankPrompts(builtin_profile("chat-yes-no"), text_tokenizer("gpt2"), MODEL)

    @pytest.mark.parametrize(("num_classes", "label_ids"), [(1, ((0,),)), (2, ((1,), (0,)))])
    def test_a_classifiers_labels_are_the_rows_of_its_head_the_last_one_first(
        self, num_classes: int, label_ids: tuple[tuple[int, ...], ...], qwen: TextTokenizer
    ) -> None:
        model = replace(MODEL, num_classes=num_classes)
        assert RerankPrompts(builtin_profile("qwen3-reranker"), qwen, model).label_ids == label_ids


class TestChat:
    @staticmethod
    def tokenizer_with(template: str, source: Path, folder: Path) -> TextTokenizer:
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "chat_template.jinja").write_text(template)
        return read_text_tokenizer(folder)

    def test_braces_of_the_template_are_text(self, tokenizer_folder: Callable[[str], Path], tmp_path: Path) -> None:
        template = "{{ '{role} {{ ' + messages[0].content + ' }} {query}' }}"
        qwen = self.tokenizer_with(template, tokenizer_folder("qwen"), tmp_path)
        (text,) = texts(qwen, make(qwen, ["123"], replace(TINY, chat=True)))
        assert text == "{role} {{ <<<7=123}+- }} {query}"

    def test_the_template_may_stand_before_a_document_alone(
        self, tokenizer_folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        qwen = self.tokenizer_with("[{{ messages[0].content }}]", tokenizer_folder("qwen"), tmp_path)
        profile = replace(TINY, chat=True, before=(), body=(Piece("{query}{document}"),))
        assert texts(qwen, make(qwen, ["123"], profile)) == ["[7123}+-]"]

    def test_the_template_goes_with_either_text_of_a_piece(
        self, tokenizer_folder: Callable[[str], Path], tmp_path: Path
    ) -> None:
        qwen = self.tokenizer_with("[{{ messages[0].content }}]", tokenizer_folder("qwen"), tmp_path)
        profile = replace(
            TINY,
            chat=True,
            before=(),
            body=(Piece("{instruction}?{query}", "{query}"), Piece("{document}")),
            after=(Piece("-{instruction}", "-"),),
        )
        assert texts(qwen, make(qwen, ["1"], profile)) == ["[71-]"]
        assert texts(qwen, make(qwen, ["1"], profile, instruction="8")) == ["[8?71-8]"]

    @pytest.mark.parametrize("instruction", ["", "  Find it"])
    def test_a_template_that_trims_its_message_trims_the_instruction(
        self,
        instruction: str,
        tokenizer_folder: Callable[[str], Path],
        text_tokenizer: Callable[[str], TextTokenizer],
    ) -> None:
        prompts = RerankPrompts(builtin_profile("chat-yes-no"), text_tokenizer("gemma"), MODEL)
        found = prompts.prompt(RerankRequest(QUERY, ("Paris",), instruction=instruction)).prompt.context(0)
        reader = read_by_transformers(tokenizer_folder("gemma"))
        assert found.tolist() == RECIPES["chat-yes-no"].ids(reader, QUERY, "Paris", instruction)
