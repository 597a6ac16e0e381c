"""The classes of all verbs and groups: how `--help` looks, `-h`, and spellings of earlier versions.

Help is plain text of at most 80 columns with one section per panel. A long name has a line of its own, so none is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.cli.output import say, write_data

# Options by their former name, without dashes; every verb that has the new one accepts both.
FORMER_SPELLINGS: Mapping[str, str] = {
    "base-url": "url",
    "delimiter": "delimiter-token-id",
    "labels": "label-token-ids",
    "top-n": "top",
}

_SETTINGS = {"help_option_names": ["-h", "--help"]}
_UNLIMITED = 1_000  # characters of a verb's first sentence, which may take several lines
_LAST_PANEL = "Options"  # of options that name no panel, as --help
_MAX_NAME_WIDTH = 28  # a longer name has a line of its own
_GAP = "  "
_NO_BREAK = "\xa0"  # a space that textwrap does not break at
_BRACKETS = re.compile(r"\[[^]]*\]$")


class VerbCommand(TyperCommand):
    """A verb."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_panels(self.get_params(ctx), ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replaces former spellings, and prints a note for each that was used."""
        names = {name for param in self.get_params(ctx) for name in param.opts}
        spelling = _Spelling(ctx.token_normalize_func, names)
        ctx.token_normalize_func = spelling
        rest = super().parse_args(ctx, args)
        for former in dict.fromkeys(spelling.used if not ctx.resilient_parsing else ()):
            say(f"note: --{former} is deprecated; use --{FORMER_SPELLINGS[former]}")
        return rest


class VerbGroup(TyperGroup):
    """A group of verbs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises CommandError where a verb is missing, after the help that lists them."""
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            write_data(ctx.get_help() + "\n")
            raise _command_error(ctx, "expected one of these commands, got none")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises CommandError for an unknown verb."""
        try:
            return super().resolve_command(ctx, args)
        except typer.TyperException as error:
            raise _command_error(ctx, error.format_message()) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_panels(self.get_params(ctx), ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        named = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, verb.get_short_help_str(_UNLIMITED)) for name, verb in named if verb and not verb.hidden]
        with formatter.section("Commands"):
            write_entries(rows, formatter)


def _command_error(ctx: Any, message: str) -> CommandError:
    return CommandError(message, hint=f"{ctx.command_path} --help lists the commands", status=MISUSED)


class Verbs(typer.Typer):
    """A group that verbs are added to; they and their help are of the classes above."""

    def __init__(self, *, cls: type[TyperGroup] = VerbGroup, **settings: Any) -> None:
        super().__init__(
            cls=cls,
            context_settings=_SETTINGS,
            rich_markup_mode=None,
            add_completion=False,
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[Any], Any]:
        context_settings = {**_SETTINGS, **settings.pop("context_settings", {})}
        return super().command(name, cls=cls or VerbCommand, context_settings=context_settings, **settings)


class _Spelling:
    """The name of an option as it is now, without dashes. Remembers which former ones it has replaced."""

    def __init__(self, normalize: Callable[[str], str] | None, names: set[str]) -> None:
        self._normalize = normalize
        self._names = names
        self.used: list[str] = []

    def __call__(self, token: str) -> str:
        if f"--{FORMER_SPELLINGS.get(token)}" in self._names:
            self.used.append(token)
            return FORMER_SPELLINGS[token]
        return token if self._normalize is None else self._normalize(token)


def write_panels(params: list[Any], ctx: Any, formatter: Any) -> None:
    """One section for each panel, in the order of the options; that of --help is the last."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if record is None:
            continue
        name, text = record
        is_argument = param.param_type_name == "argument"
        panel = param.rich_help_panel or ("Arguments" if is_argument else _LAST_PANEL)
        panels.setdefault(panel, []).append((param.metavar or name if is_argument else name, text))
    for title, records in sorted(panels.items(), key=lambda panel: panel[0] == _LAST_PANEL):
        with formatter.section(title):
            write_entries(records, formatter)


def write_entries(records: Sequence[tuple[str, str]], formatter: Any) -> None:
    """Names on the left, explanations on the right. Names of options are never broken, nor are defaults that fit."""
    named = [(" ".join(name.split()), text) for name, text in records]
    left = formatter.current_indent + min(max(len(name) for name, _ in named), _MAX_NAME_WIDTH) + len(_GAP)
    for name, text in named:
        start = f"{'':{formatter.current_indent}}{name}"
        if len(start) + len(_GAP) > left and text:
            formatter.write(f"{start}\n")
            start = ""
        for line in _wrapped(text, formatter.width - left) or [""]:
            formatter.write(f"{start:{left}}{line}".rstrip() + "\n")
            start = ""


def _wrapped(text: str, width: int) -> list[str]:
    def unbroken(found: re.Match[str]) -> str:
        return found[0].replace(" ", _NO_BREAK) if len(found[0]) <= width else found[0]

    lines = wrap(_BRACKETS.sub(unbroken, text), width, break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]
