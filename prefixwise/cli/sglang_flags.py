"""Other servers' launch lines: `serve` takes every flag of SGLang (`sglang_flags.toml`), TEI's --auto-truncate, and the
model as an argument without a name, as vLLM does.

A flag that has a counterpart here is replaced by it before the options are parsed. One that would change what is served
is an error. All other flags are checked, taken out and named in one line of the log.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import typer

from prefixwise.cli.commands import VerbCommand
from prefixwise.cli.failures import MISUSED, CommandError

_KEY = "prefixwise.without_effect"  # in the context's `meta`
_AUTO_TRUNCATE, _NO_AUTO_TRUNCATE = "--auto-truncate", "--no-auto-truncate"  # the first with or without true or false
_MODEL_FLAGS, _REVISION = ("--model-path", "--model"), "--revision"


class Ignored(NamedTuple):
    """A flag as given that has no effect here."""

    text: str
    is_always_so: bool = False  # the switch asks for what this server always does


class ServeCommand(VerbCommand):
    """A verb with the options of `serve`, SGLang's flags beside them, and perhaps a model without a name."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[MODEL]", *super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # a shell completes an unfinished line
            return super().parse_args(ctx, args)
        known = {
            name: getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
        }
        reader = _Reader(args, known, ctx.token_normalize_func, f"{ctx.command_path} --help lists the options")
        own = list(reader.own_args())
        ctx.meta[_KEY] = reader.ignored
        return super().parse_args(ctx, own)


def without_effect(context: typer.Context) -> list[Ignored]:
    """SGLang's flags on this command line that have no effect."""
    found: list[Ignored] = context.meta.get(_KEY, [])
    return found


class _Reader:
    """Goes through the arguments once."""

    def __init__(self, args: Sequence[str], known: Mapping[str, bool], spell: Callable[[str], str], hint: str) -> None:
        self.ignored: list[Ignored] = []
        self._known = known  # whether each option of the verb is a switch; `cluster` has fewer than `serve`
        self._spell = spell
        self._hint = hint
        self._rest = list(reversed(args))
        self._model: str | None = None  # as given
        self._named_by = ""  # its flag, or the model itself in quotes
        self._must_be_model: list[tuple[str, str, str]] = []  # names and values of flags, and why

    def own_args(self) -> Iterator[str]:
        """The arguments that are ours, and those that replace SGLang's. Raises CommandError."""
        table, truncates, revision = _table(), True, None
        while self._rest:
            arg = self._rest.pop()
            name, equals, value = arg.partition("=")
            given = value if equals else None
            if arg in ("true", "false"):
                raise self._error(f"expected a model or an option, got {arg!r}: a switch takes no value")
            if not arg.startswith("-"):
                self._name_model(arg, repr(arg))
                yield from (_MODEL_FLAGS[0], arg)
            elif name in (_AUTO_TRUNCATE, _NO_AUTO_TRUNCATE):
                truncates = name == _AUTO_TRUNCATE and self._truth(name, given)
            elif name == _REVISION:
                revision = self._value(name, given)
            elif name in self._known:
                yield from self._own(arg, name)
            elif name in table["same"] and table["same"][name] in self._known:
                yield from self._own(table["same"][name] + arg.removeprefix(name), table["same"][name])
            elif name in table["same"]:
                self.ignored.append(Ignored(f"{name} {self._value(name, given)}"))
            elif name in table["means"]:
                self._no_value(name, given)
                yield from table["means"][name]
            elif name in table["refused"]:
                self._refuse(name, given, **table["refused"][name])
            elif name in table["always"]["switches"]:
                self._no_value(name, given)
                self.ignored.append(Ignored(name, is_always_so=True))
            elif (first := f"--{self._spell(name.removeprefix('--'))}") in self._known:
                yield from self._own(arg, first)
            elif not self._ignore(name, given, table["without_effect"]):
                yield from (arg, *reversed(self._rest))  # an error: what follows may be a value
                return
        self._check_must_be_model()
        if not truncates:
            yield _NO_AUTO_TRUNCATE
        if revision is not None:
            yield from self._at_revision(revision)

    def _own(self, arg: str, name: str) -> Iterator[str]:
        """The option called `name`, and its value if that is another argument. Where other servers take a list, ours is
        repeated."""
        yield arg
        _, equals, value = arg.partition("=")
        if not (equals or self._known[name]) and self._rest:
            value = self._rest.pop()
            yield value
            while name in _table()["lists"]["names"] and self._rest and not self._rest[-1].startswith("-"):
                yield f"{name}={self._rest.pop()}"
        if name in _MODEL_FLAGS:
            self._name_model(value, arg)

    def _name_model(self, model: str, named_by: str) -> None:
        """Of two flags the last one counts."""
        if self._named_by and not (self._named_by.startswith("-") and named_by.startswith("-")):
            raise self._error(f"expected the model once, got {self._named_by} and {named_by}")
        self._model, self._named_by = model, named_by

    def _at_revision(self, revision: str) -> Iterator[str]:
        """The model's hub id with its revision, as ours is spelled; files have none."""
        if self._model is None or Path(self._model).expanduser().exists():
            self.ignored.append(Ignored(f"{_REVISION} {revision}"))
        else:
            yield from ("--model-path", f"{self._model}@{revision}")

    def _ignore(self, name: str, given: str | None, kinds: Mapping[str, Sequence[str]]) -> bool:
        """Take the flag and its values; False if it is none of SGLang's."""
        kind = next((kind for kind, names in kinds.items() if name in names), None)
        if kind is None:
            return False
        values: list[str] = []
        if kind == "switches":
            self._no_value(name, given)
        elif kind == "lists" and given is None:
            while self._rest and not self._rest[-1].startswith("--"):
                values.append(self._rest.pop())
        elif kind == "number_lists":
            values.append(self._value(name, given))
            while given is None and self._rest and _is_number(self._rest[-1]):
                values.append(self._rest.pop())
        else:
            values.append(self._value(name, given))
        self._check_number(name, kind, values)
        self.ignored.append(Ignored(" ".join([name, *values])))
        return True

    def _refuse(self, name: str, given: str | None, harmless: Sequence[str], why: str) -> None:
        value = self._value(name, given)
        if "{model}" in harmless:
            self._must_be_model.append((name, value, why))
        elif value not in harmless:
            raise self._error(f"{name} {value} is not served: {why}")
        self.ignored.append(Ignored(f"{name} {value}"))

    def _check_must_be_model(self) -> None:
        for name, value, why in self._must_be_model:
            if value != self._model:
                raise self._error(f"{name} {value} is not served: {why}")

    def _truth(self, name: str, given: str | None) -> bool:
        """A switch that may be followed by true or false, as TEI has it."""
        if given is None:
            given = self._rest.pop() if self._rest and self._rest[-1] in ("true", "false") else "true"
        if given not in ("true", "false"):
            raise self._error(f"Invalid value for '{name}': expected true or false, got {given!r}")
        return given == "true"

    def _value(self, name: str, given: str | None) -> str:
        if given is None and (not self._rest or self._rest[-1].startswith("--")):
            raise self._error(f"Option '{name}' requires an argument.")
        return self._rest.pop() if given is None else given

    def _no_value(self, name: str, given: str | None) -> None:
        if given is not None:
            raise self._error(f"Option '{name}' does not take a value, got {given!r}")

    def _check_number(self, name: str, kind: str, values: Sequence[str]) -> None:
        a_number = (float, "a number")
        number = {"integers": (int, "an integer"), "numbers": a_number, "number_lists": a_number}.get(kind)
        if number is None:
            return
        for value in values:
            try:
                number[0](value)
            except ValueError:
                raise self._error(f"Invalid value for '{name}': expected {number[1]}, got {value!r}") from None

    def _error(self, message: str) -> CommandError:
        return CommandError(message, hint=self._hint, status=MISUSED)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@cache
def _table() -> Any:
    return tomllib.loads((files("prefixwise.cli") / "sglang_flags.toml").read_text(encoding="utf-8"))
