"""A chat template around texts that are not known yet: it is rendered once, and cut where each of them stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from prefixwise.models.chat_template import ChatTemplateError, render_chat_template
from prefixwise.prompts.tokenizer import BLANK, TextTokenizer

Messages = Sequence[tuple[str, str]]  # the role of each message, and the name of its text


@dataclass(frozen=True)
class RenderedPlaces:
    """The text of a template, with a placeholder for each text."""

    text: str
    stripped: frozenset[str]  # names of the texts that the template strips of blanks

    def split(self, name: str) -> tuple[str, str]:
        """The text before and after a placeholder."""
        before, _, after = self.text.partition(place_of(name))
        return before, after


def place_of(name: str) -> str:
    """A placeholder: characters that have no meaning, and that nobody writes."""
    return f"\uf8f0{name}\uf8f1"


def render_places(
    tokenizer: TextTokenizer, messages: Messages, variables: Mapping[str, Any] | None = None
) -> RenderedPlaces | None:
    """None if the template fails, or does not show each text once. Variables whose value is a placeholder count too.

    The content of a message is text or, where the template does not take that, a list of parts.
    """
    variables = {**tokenizer.special_tokens, **(variables or {})}
    names = [name for _, name in messages]
    places = [*map(place_of, names), *(value for value in variables.values() if str(value).startswith("\uf8f0"))]
    for is_structured in (False, True):
        contents = [_content(BLANK + place_of(name) + BLANK, is_structured=is_structured) for name in names]
        chat = [{"role": role, "content": content} for (role, _), content in zip(messages, contents, strict=True)]
        text = _rendered(tokenizer.chat_template or "", json.dumps({**variables, "messages": chat}, sort_keys=True))
        if text is not None and all(text.count(place) == 1 for place in places):
            stripped = frozenset(name for name in names if BLANK + place_of(name) + BLANK not in text)
            for name in names:
                text = text.replace(BLANK + place_of(name) + BLANK, place_of(name))
            return RenderedPlaces(text, stripped)
    return None


def _content(text: str, *, is_structured: bool) -> object:
    return [{"type": "text", "text": text}] if is_structured else text


@lru_cache(maxsize=32)
def _rendered(template: str, variables: str) -> str | None:
    """It takes a process, so it is done once. `variables`: as JSON, which can be a key of the cache."""
    try:
        return render_chat_template(template, json.loads(variables))
    except ChatTemplateError:
        return None
