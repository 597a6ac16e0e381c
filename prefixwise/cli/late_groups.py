"""Groups of verbs that are imported when they are called: `prefixwise score` need not wait for `prefixwise ops`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


def late_group(module: str, name: str, help_text: str, *, no_args_is_help: bool) -> typer.Typer:
    """Stands for the `typer.Typer` called `name` in the module, and has its place taken by it when it is entered."""

    class LateGroup(TyperGroup):
        def make_context(self, *args: Any, **kwargs: Any) -> Any:
            group = get_group(getattr(import_module(module), name))
            group.help = group.help or self.help
            group.no_args_is_help = self.no_args_is_help
            return group.make_context(*args, **kwargs)

    return typer.Typer(cls=LateGroup, help=help_text, no_args_is_help=no_args_is_help)
