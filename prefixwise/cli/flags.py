"""Command-line options from the fields of an options dataclass.

    @with_flags("engine", EngineOptions, ENGINE_FLAGS)
    def score(query: ..., *, engine: EngineOptions) -> None: ...

typer sees `query` and one option for each flag; `score` is called with one `EngineOptions`.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Annotated, Any

import typer

from prefixwise.cli.failures import MISUSED, CommandError
from prefixwise.contract.errors import PrefixwiseError

Verb = Callable[..., None]


def is_typed(context: Any, parameter: str) -> bool:
    """True if the option is on the command line: not left out, and not from the environment."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def finite(value: float | None) -> float | None:
    """An option's callback that rejects `nan` and `inf`."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


@dataclass(frozen=True)
class Flag:
    """One field as an option: its name, type and help text. The default is the field's."""

    kind: Any  # the type for typer; of one value if repeatable
    help: str
    metavar: str = "N"  # empty for a switch, which takes no value
    least: int | float | None = None
    name: str | None = None  # None: --field-name
    other_names: tuple[str, ...] = ()
    environment_variable: str | None = None
    repeatable: bool = False  # the field is a tuple
    turns_off: bool = False  # the switch sets the field to False

    def parameter(self, field: str, default: object, panel: str) -> inspect.Parameter:
        """The parameter for typer."""
        option = typer.Option(
            self.name or f"--{field.replace('_', '-')}",
            *self.other_names,
            min=self.least,
            metavar=self.metavar,
            envvar=self.environment_variable,
            callback=finite if self.kind is float else None,
            help=self.help,
            rich_help_panel=panel,
        )
        kind = list[self.kind] | None if self.repeatable else self.kind  # type: ignore[name-defined]
        return inspect.Parameter(
            field,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if self.repeatable else False if self.turns_off else default,
            annotation=Annotated[kind, option],
        )

    def field_value(self, given: Any) -> Any:
        """The field's value, from the value that typer has parsed."""
        if self.repeatable:
            return tuple(given or ())
        return not given if self.turns_off else given

    def check_environment(self, value: Any) -> None:
        """Raises CommandError where the variable is set and empty: it means something, and typer takes it for unset."""
        variable = self.environment_variable
        if variable is not None and value is None and os.environ.get(variable) == "":
            message = f"{variable} is set but empty"
            raise CommandError(message, hint=f"give it a value, or remove it with: unset {variable}", status=MISUSED)


def with_flags(
    parameter: str, options: type, flags: Mapping[str, Flag], *, panel: str, **defaults: object
) -> Callable[[Verb], Verb]:
    """Build a verb's `parameter`, an instance of the dataclass `options`, from options of the command line.

    `flags` maps field names to options; `defaults` replaces the dataclass's defaults for this verb.
    """
    of_dataclass = {field.name: field.default for field in fields(options)}
    added = [flag.parameter(name, {**of_dataclass, **defaults}[name], panel) for name, flag in flags.items()]

    def extend(verb: Verb) -> Verb:
        @wraps(verb)
        def run(**given: Any) -> None:
            values = {name: flag.field_value(given.pop(name)) for name, flag in flags.items()}
            for name, flag in flags.items():
                flag.check_environment(values[name])
            try:
                made = options(**values)
            except PrefixwiseError as error:  # a value that typer accepts and the dataclass refuses
                hint = f"prefixwise {verb.__name__} --help lists the options"
                raise CommandError(str(error), hint=hint, status=MISUSED) from None
            verb(**given, **{parameter: made})

        signature = inspect.signature(verb, eval_str=True)
        own = [each for each in signature.parameters.values() if each.name != parameter]
        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in [*own, *added]}
        return run

    return extend
