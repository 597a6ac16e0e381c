"""Chats with items in their place: the tokens are those that transformers gives for each chat alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import RequestError, TokenizerError
from prefixwise.contract.judge import parse_judge_request
from prefixwise.models.config import ModelConfig
from prefixwise.prompts import chat_places
from prefixwise.prompts.judge import build_judge_prompt
from prefixwise.prompts.template import Prompt
from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.golden import read_by_transformers
from tests.prompts.merging_tokenizer import CHAT_TEMPLATE, VOCABULARY, merging_tokenizer, token_texts

Chat = list[dict[str, str]]
RUBRIC = "Judge whether the answer is relevant.\n\nQuestion: what is the capital of France?\n\nAnswer: {item}"
CHATS: dict[str, Chat] = {
    "item last": [{"role": "user", "content": RUBRIC}],
    "text behind": [{"role": "user", "content": RUBRIC + "\n\nAnswer yes or no."}],
    "item first": [{"role": "user", "content": "{item} Does it answer the query?"}],
    "nothing else": [{"role": "user", "content": "{item}"}],
    "turns": [
        {"role": "user", "content": "Judge whether {item} is relevant."},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Are you helpful?"},
    ],
    "prefilled": [{"role": "user", "content": RUBRIC}, {"role": "assistant", "content": "Relevance judgment:"}],
}
ITEMS = ["Paris", " Paris is the capital.\n", "", "s", ".com", "\n\nFind the code?\n", "世界 é"]


def model(max_context_len: int = 4096) -> ModelConfig:
    return FakeBackend(vocab_size=1024, max_context_len=max_context_len).config


def built(tokenizer: TextTokenizer | None, messages: Chat, **fields: Any) -> Prompt:
    request = parse_judge_request({"messages": messages, "answers": "yes/no", **fields})
    return build_judge_prompt(request, tokenizer, model())[0]


def by_transformers(reader: Any, messages: Chat, item: str) -> list[int]:
    filled = [{**each, "content": each["content"].replace("{item}", item)} for each in messages]
    ends = {"continue_final_message" if filled[-1]["role"] == "assistant" else "add_generation_prompt": True}
    ids: list[int] = reader.apply_chat_template(filled, tokenize=True, return_dict=False, enable_thinking=False, **ends)
    return ids


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("kind", ["qwen", "gemma", "smollm"])
def test_tokens_are_those_of_transformers(
    kind: str, name: str, tokenizer_folder: Callable[[str], Path], text_tokenizer: Callable[[str], TextTokenizer]
) -> None:
    reader, messages = read_by_transformers(tokenizer_folder(kind)), CHATS[name]
    prompt = built(text_tokenizer(kind), messages, items=ITEMS)
    for index, item in enumerate(ITEMS):
        if kind == "gemma" and not item:  # its template would strip the rubric's last space, too, which all items share
            continue
        assert prompt.context(index).tolist() == by_transformers(reader, messages, item), item
    filled = [{**each, "content": each["content"].replace("{item}", ITEMS[1])} for each in messages]
    alone = built(text_tokenizer(kind), filled)
    assert alone.context(0).tolist() == prompt.context(1).tolist()


@pytest.mark.parametrize("kind", ["qwen", "gemma", "smollm"])
def test_the_rubric_is_the_shared_prefix(kind: str, text_tokenizer: Callable[[str], TextTokenizer]) -> None:
    tokenizer = text_tokenizer(kind)
    prompt = built(tokenizer, CHATS["item last"], items=["Paris", "London"])
    num_rubric = len(tokenizer.encode(RUBRIC.removesuffix(" {item}")))
    assert len(prompt.prefix_ids) >= num_rubric
    assert prompt.sequences.lens.max() < 30
    assert prompt.prompt_tokens == len(prompt.prefix_ids) + len(prompt.sequences.flat)
    assert np.array_equal(built(tokenizer, CHATS["item last"], items=["s"]).prefix_ids, prompt.prefix_ids)


@pytest.mark.parametrize("kind", ["qwen", "gemma", "smollm"])
@pytest.mark.parametrize(
    ("name", "answers"),
    [("item last", ["yes", "10", "1", "not relevant"]), ("prefilled", [" yes", " 10", " 1", " not relevant", "no"])],
)
def test_answers_are_what_they_add_to_the_chat(
    kind: str,
    name: str,
    answers: list[str],
    tokenizer_folder: Callable[[str], Path],
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    reader = read_by_transformers(tokenizer_folder(kind))
    prompt = built(text_tokenizer(kind), CHATS[name], items=["Paris"], answers=answers)
    context = prompt.context(0).tolist()
    for answer, ids in zip(answers, prompt.label_ids, strict=True):
        whole = reader.encode(reader.decode(context) + answer, add_special_tokens=False)
        is_cut = whole[: len(context)] != context  # GPT-2's split: a line break before a word is no part of two
        assert not is_cut or (kind == "smollm" and name == "item last")
        assert list(ids) == (reader.encode(answer, add_special_tokens=False) if is_cut else whole[len(context) :])


class TestByHand:
    """x before each message, z behind it, y before the answer; `ab`, `bc` and `abc` are one token."""

    @pytest.fixture
    def tokenizer(self) -> TextTokenizer:
        return merging_tokenizer(chat_template=CHAT_TEMPLATE)

    def test_an_item_may_merge_with_the_text_around_it(self, tokenizer: TextTokenizer) -> None:
        prompt = built(tokenizer, [{"role": "user", "content": "a{item}c"}], items=["b", "x", ""], answers="x/y")
        assert [token_texts(prompt.context(i).tolist()) for i in range(3)] == ["xabczy", "xaxczy", "xaczy"]
        assert prompt.context(0).tolist() == [VOCABULARY[each] for each in ("x", "abc", "z", "y")]

    def test_an_assistants_last_message_is_continued(self, tokenizer: TextTokenizer) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]
        assert token_texts(built(tokenizer, messages, answers="x/y").context(0).tolist()) == "xazxc"

    def test_an_answer_that_would_change_the_text_before_it_stands_alone(self, tokenizer: TextTokenizer) -> None:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
        prompt = built(tokenizer, messages, answers=["bc", "x"])
        assert prompt.label_ids == ((VOCABULARY["bc"],), (VOCABULARY["x"],))

    def test_long_items_are_cut_where_asked(self, tokenizer: TextTokenizer) -> None:
        prompt = built(
            tokenizer,
            [{"role": "user", "content": "{item}"}],
            items=["xyzx", "z"],
            answers="x/y",
            max_tokens_per_item=2,
        )
        assert [token_texts(prompt.context(i).tolist()) for i in range(2)] == ["xxyzy", "xzzy"]
        assert [(each.index, each.original_tokens, each.kept_tokens) for each in prompt.truncated] == [(0, 4, 2)]

    @pytest.mark.parametrize(
        ("answers", "code", "message"),
        [
            ("1-5", "empty_answers", 'got "1" which has none'),
            (["a1", "a"], "invalid_answers", 'got "a1" and "a" with the same'),
        ],
    )
    def test_answers_need_tokens_of_their_own(
        self, tokenizer: TextTokenizer, answers: object, code: str, message: str
    ) -> None:
        with pytest.raises(RequestError, match=message) as caught:
            built(tokenizer, [{"role": "user", "content": "a"}], answers=answers)
        assert (caught.value.code, caught.value.param) == (code, "answers")

    def test_a_chat_that_is_too_long_is_the_messages_fault(self, tokenizer: TextTokenizer) -> None:
        for fields in ({}, {"items": ["a"]}):
            content = "x" * 50 + ("{item}" if fields else "")
            body = {"messages": [{"role": "user", "content": content}], "answers": "x/y", **fields}
            with pytest.raises(RequestError, match="messages must fit the model's 40 tokens, got 5") as caught:
                build_judge_prompt(parse_judge_request(body), tokenizer, model(40))
            assert (caught.value.code, caught.value.param) == ("context_too_long", "messages")


class TestTemplates:
    MESSAGES: Chat = [{"role": "user", "content": "a{item}"}]  # noqa: RUF012

    def test_a_model_without_a_template_or_a_tokenizer(self) -> None:
        with pytest.raises(RequestError, match="this model has no chat template") as caught:
            built(merging_tokenizer(), self.MESSAGES, items=["b"])
        assert (caught.value.code, caught.value.status, caught.value.param) == ("no_chat_template", 400, "messages")
        with pytest.raises(TokenizerError, match="messages cannot be read"):
            built(None, self.MESSAGES, items=["b"])

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('no users') }}", "fails: no users"),
            ("{{ messages[0].role }}", "must show {item} once, and shows it 0 times"),
            ("{{ messages[0].content }}{{ messages[0].content }}", "shows it 2 times"),
        ],
    )
    def test_a_template_that_does_not_take_the_messages(self, template: str, message: str) -> None:
        with pytest.raises(RequestError) as caught:
            built(merging_tokenizer(chat_template=template), self.MESSAGES, items=["b"])
        assert (caught.value.code, caught.value.param) == ("invalid_messages", "messages")
        assert message in caught.value.message

    def test_a_template_that_leaves_the_prefilled_answer_out(self) -> None:
        tokenizer = merging_tokenizer(chat_template="{{ messages[0].content }}")
        with pytest.raises(RequestError, match="leaves the last message out"):
            built(tokenizer, [*self.MESSAGES, {"role": "assistant", "content": "x"}], items=["b"])

    def test_a_rubric_is_rendered_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes a process. A long one is not kept."""
        rendered: list[object] = []

        def count(template: str, variables: Any) -> str:
            rendered.append(variables)
            return str(variables["messages"][0]["content"])

        monkeypatch.setattr(chat_places, "render_chat_template", count)
        tokenizer = merging_tokenizer(chat_template="{# of this test #}")
        for items in (["b"], ["c", "a"]):
            built(tokenizer, self.MESSAGES, items=items, answers="x/y")
        assert len(rendered) == 1
        long = [{"role": "user", "content": "1" * 70_000 + "x"}]
        for _ in range(2):
            built(tokenizer, long, answers="x/y")
        assert len(rendered) == 3


def test_answers_without_the_space_of_a_prefilled_beginning_are_warned_of(
    text_tokenizer: Callable[[str], TextTokenizer],
) -> None:
    for answers, number in (("yes/no", 2), ([" yes", " no"], 0)):
        request = parse_judge_request({"messages": CHATS["prefilled"], "items": ["a"], "answers": answers})
        warnings = build_judge_prompt(request, text_tokenizer("smollm"), model())[1]
        assert len(warnings) == number
        assert all("answers[" in each and "you may mean" in each for each in warnings)
