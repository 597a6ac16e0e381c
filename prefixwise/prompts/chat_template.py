"""A checkpoint's own chat template, as the text that stands before and after a user's message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, NoReturn

from prefixwise.contract.errors import TokenizerError

if TYPE_CHECKING:
    from jinja2.ext import Extension
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_MESSAGE = "(the message)"  # stands for it; no template has these words
_BLANK = " \n\t "  # around it
_TODAY = date(2024, 7, 26)  # what Llama 3's template writes where it is not told


@dataclass(frozen=True)
class ChatFrame:
    """The text before and after a user's message, and whether blanks around the message are taken away."""

    before: str
    after: str
    trims: bool


def chat_frame(template: str, special_tokens: Mapping[str, str]) -> ChatFrame:
    """What the template writes before and after the first message of a user, up to where the answer begins.

    A template is a program, and it comes with the checkpoint: it runs in a sandbox that lets it write text and nothing
    else. Its calendar stands still, since some would write the date into the prompt: scores must not change overnight.
    Raises TokenizerError where it does not show the message exactly once.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _TODAY.strftime
    try:
        text = environment.from_string(template).render(
            messages=[{"role": "user", "content": _BLANK + _MESSAGE + _BLANK}],
            add_generation_prompt=True,
            enable_thinking=False,  # the answer is to come at once
            tools=None,
            documents=None,
            **special_tokens,
        )
    except Exception as error:  # it may do anything wrong that a program can
        reason = str(error) or type(error).__name__
        raise TokenizerError(f"the checkpoint's chat template fails: {reason}") from None
    before, *rest = text.split(_MESSAGE)
    if len(rest) != 1:
        raise TokenizerError(f"the checkpoint's chat template must show a message once, it does so {len(rest)} times")
    is_kept = before.endswith(_BLANK) and rest[0].startswith(_BLANK)
    return ChatFrame(before.removesuffix(_BLANK), rest[0].removeprefix(_BLANK), trims=not is_kept)


def _generation_tag() -> type[Extension]:
    """`{% generation %}`, with which templates mark what an assistant has said; here it is text like any other."""
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  # as jinja2 asks for it

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
