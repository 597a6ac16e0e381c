"""The one way into a checkpoint's chat template: it is rendered with placeholders, and cut where each of them stands.

chat_frame      the text around a user's message             rerank profiles
render_places   the text around several texts                guards, cross-encoders
render          the text of messages that are known          judges (`chat.py`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prefixwise.contract.errors import TokenizerError
from prefixwise.models.chat_template import ChatTemplateError, render_chat_template
from prefixwise.prompts.tokenizer import TextTokenizer

Messages = Sequence[tuple[str, str]]  # the role of each message, and its text or the name of its text

BLANK = " \n\t "  # around a placeholder, to see whether the template strips blanks
_CACHED_CHARS = 1 << 16  # of messages whose text is kept: a template takes a process
# What transformers' `apply_chat_template` passes, and that the answer follows at once.
_OF_A_CHAT: dict[str, Any] = {"enable_thinking": False, "tools": None, "documents": None}


def place_of(name: str) -> str:
    """A placeholder: characters that have no meaning, and that nobody writes."""
    return f"\uf8f0{name}\uf8f1"


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a template. Raises ChatTemplateError."""
    key = json.dumps(variables, sort_keys=True)
    function = _rendered if len(key) <= _CACHED_CHARS else _rendered.__wrapped__
    text, failure = function(template, key)
    if failure is not None:
        raise ChatTemplateError(failure)
    return text


@lru_cache(maxsize=64)
def _rendered(template: str, variables: str) -> tuple[str, str | None]:
    """The text, or why the template fails. `variables`: as JSON, which can be a key of the cache."""
    try:
        return render_chat_template(template, json.loads(variables)), None
    except ChatTemplateError as error:
        return "", str(error)


def chat_variables(
    special_tokens: Mapping[str, str], messages: Messages, *, add_generation_prompt: bool = True
) -> dict[str, Any]:
    """Of messages, each a role and a text. `add_generation_prompt`: end with the beginning of the assistant's one."""
    chat = [{"role": role, "content": content} for role, content in messages]
    return {**_OF_A_CHAT, "messages": chat, "add_generation_prompt": add_generation_prompt, **special_tokens}


@dataclass(frozen=True)
class ChatFrame:
    """The text before and after a user's message, and whether the template strips blanks around the message."""

    before: str
    after: str
    trims: bool


def chat_frame(template: str, special_tokens: Mapping[str, str]) -> ChatFrame:
    """The text that the template writes before and after the first message of a user, up to the answer.

    Raises TokenizerError if the template fails, or does not show the message exactly once.
    """
    place = place_of("message")
    try:
        text = render(template, chat_variables(special_tokens, [("user", BLANK + place + BLANK)]))
    except ChatTemplateError as error:
        raise TokenizerError(f"the checkpoint's chat template fails: {error}") from None
    before, *rest = text.split(place)
    if len(rest) != 1:
        raise TokenizerError(f"the checkpoint's chat template must show a message once, got {len(rest)} times")
    has_blanks = before.endswith(BLANK) and rest[0].startswith(BLANK)
    return ChatFrame(before.removesuffix(BLANK), rest[0].removeprefix(BLANK), trims=not has_blanks)


@dataclass(frozen=True)
class RenderedPlaces:
    """The text of a template, with a placeholder for each text."""

    text: str
    stripped: frozenset[str]  # names of the texts that the template strips of blanks

    def split(self, name: str) -> tuple[str, str]:
        """The text before and after a placeholder."""
        before, _, after = self.text.partition(place_of(name))
        return before, after


def render_places(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any] | None = None
) -> RenderedPlaces:
    """Messages are roles and names of texts. Variables whose value is a placeholder are texts, too.

    The content of a message is text or, where the template does not take that, a list of parts. Raises TokenizerError
    with the reason if the template takes neither: it fails, or does not show each text once.
    """
    variables = {**tokenizer.special_tokens, **(variables or {})}
    names, reason = [name for _, name in messages], ""
    places = [*map(place_of, names), *(value for value in variables.values() if str(value).startswith("\uf8f0"))]
    for is_structured in (False, True):
        contents = [_content(BLANK + place_of(name) + BLANK, is_structured=is_structured) for name in names]
        chat = [{"role": role, "content": content} for (role, _), content in zip(messages, contents, strict=True)]
        try:
            text = render(tokenizer.chat_template or "", {**variables, "messages": chat})
        except ChatTemplateError as error:
            reason = reason or f"fails: {error}"
            continue
        if all(text.count(place) == 1 for place in places):
            stripped = frozenset(name for name in names if BLANK + place_of(name) + BLANK not in text)
            for name in names:
                text = text.replace(BLANK + place_of(name) + BLANK, place_of(name))
            return RenderedPlaces(text, stripped)
        counts = ", ".join(f"{place[1:-1]} {text.count(place)} times" for place in places)
        reason = reason or f"must show each text once, and shows {counts}"
    raise TokenizerError(f"the checkpoint's chat template {reason}")


def _content(text: str, *, is_structured: bool) -> object:
    return [{"type": "text", "text": text}] if is_structured else text
