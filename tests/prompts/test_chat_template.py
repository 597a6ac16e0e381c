"""A checkpoint's chat template: what it writes around a message, and what it is not allowed to do."""

from __future__ import annotations

from typing import Any

import pytest

from prefixwise.contract.errors import TokenizerError
from prefixwise.prompts.chat_template import ChatFrame, chat_frame
from tests.prompts.reranker_tokenizers import CHATML, GEMMA_CHAT

SHOW = "{{ messages[0].content }}"
LLAMA_DATE = (
    "{%- if strftime_now is defined %}{%- set date = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date = '26 Jul 2024' %}{%- endif %}Today: {{ date }}\n" + SHOW
)


def test_the_frame_is_what_stands_around_the_message() -> None:
    assert chat_frame(f"<s>{SHOW}</s>\n<a>", {}) == ChatFrame("<s>", "</s>\n<a>", trims=False)


def test_a_template_that_trims_is_known() -> None:
    assert chat_frame("[{{ messages[0].content | trim }}]", {}) == ChatFrame("[", "]", trims=True)
    assert chat_frame("[ {{ messages[0].content }} \n]", {}) == ChatFrame("[ ", " \n]", trims=False)


def test_the_answer_begins_at_once() -> None:
    """It is asked for, and no thinking before it."""
    frame = chat_frame(CHATML, {})
    before, after = frame.before, frame.after
    assert before == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    assert after == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_special_tokens_are_given_by_their_roles() -> None:
    frame = chat_frame(GEMMA_CHAT, {"bos_token": "<bos>"})
    before, after = frame.before, frame.after
    assert (before, after) == ("<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n")
    assert chat_frame(GEMMA_CHAT, {}).before == "<start_of_turn>user\n"


@pytest.mark.parametrize(
    ("template", "special"),
    [
        (CHATML, {}),
        (GEMMA_CHAT, {"bos_token": "<bos>"}),
        ("{% for m in messages %}\n    {% if loop.first %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n", {}),
        ("{% for m in messages %}[{{ m['content'] | trim }}]{% if loop.first %}{% break %}{% endif %}{% endfor %}", {}),
        ("{{ {'é': messages[0].role} | tojson }} {{ messages[0]['content'] }}\n\n", {}),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ messages[-1].content }}", {}),
        ("{% macro show(m) %}<{{ m.content }}>{% endmacro %}{{ show(messages[0]) }}", {}),
        ("{{ messages[0].get('name', 'nobody') }}: {{ messages[0].content }}", {}),
        ("{% if tools is not none %}Tools: {{ tools }}\n{% endif %}" + SHOW, {}),
    ],
    ids=["chatml", "gemma", "trimmed blocks", "break", "tojson", "namespace", "macro", "methods", "no tools"],
)
def test_the_frame_is_what_transformers_writes(template: str, special: dict[str, str]) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=template, **special
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "my words"}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    frame = chat_frame(template, special)
    assert frame.before + "my words" + frame.after == text


def test_it_is_always_the_same_day() -> None:
    """Scores must not change overnight."""
    assert chat_frame(LLAMA_DATE, {}).before == "Today: 26 Jul 2024\n"
    assert chat_frame("{{ strftime_now('%Y-%m-%d') }}" + SHOW, {}).before == "2024-07-26"


def test_what_an_assistant_says_may_be_marked() -> None:
    template = "<{% generation %}[" + SHOW + "]{% endgeneration %}>"
    assert chat_frame(template, {}) == ChatFrame("<[", "]>", trims=False)


@pytest.mark.parametrize("shown", [0, 2, 3])
def test_a_message_must_be_shown_once(shown: int) -> None:
    with pytest.raises(TokenizerError, match=f"must show a message once, it does so {shown} times"):
        chat_frame(f"a {SHOW * shown} b", {})


@pytest.mark.parametrize(
    "attempt",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'config.json' %}",
        "{% import 'os' as os %}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ '{0.__class__.__mro__[1]}'.format(1) }}",
    ],
)
def test_a_template_can_write_text_and_nothing_else(attempt: str) -> None:
    with pytest.raises(TokenizerError, match=r"the checkpoint's chat template fails: ."):
        chat_frame(attempt + SHOW, {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only system messages, please') }}", "only system messages, please"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content | nosuchfilter }}", "nosuchfilter"),
        ("{{ unknown.attribute }}", "'unknown' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 'a'.index('b') }}", "not found"),
    ],
)
def test_a_template_that_fails_is_one_error(template: str, message: str) -> None:
    with pytest.raises(TokenizerError, match="the checkpoint's chat template fails: ") as caught:
        chat_frame(template, {})
    assert message in str(caught.value)


def test_a_template_without_end_is_one_error() -> None:
    with pytest.raises(TokenizerError, match="the checkpoint's chat template fails: "):
        chat_frame("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}" + SHOW, {})
