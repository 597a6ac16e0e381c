"""Signs of life on stderr, for a person at a terminal and for nobody else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prefixwise.cli.output import on_terminal, open_console, say

if TYPE_CHECKING:
    from prefixwise.engine.engine import OnProgress
    from prefixwise.engine.warmup import OnProgram

    OnCompile = Callable[[int, int, str], None]

MANY_ITEMS = 200  # up to this many, a bar would only flicker


def tell_loading(model: str | Path | None, *, quiet: bool) -> None:
    """Why nothing happens for a while. Nothing that moves: a download draws bars of its own below it."""
    if not quiet and on_terminal():
        say(f"loading {model or 'the embedded model'} ...", style="dim")


@contextmanager
def item_progress(num_items: int, *, quiet: bool) -> Iterator[OnProgress | None]:
    """A bar over the items, as the callback that moves it; None where there is to be no bar."""
    if quiet or num_items <= MANY_ITEMS or not on_terminal():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("scoring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("items"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=open_console(sys.stderr), transient=True) as progress:
        task = progress.add_task("scoring", total=num_items)

        def advance(done: int, total: int) -> None:
            # The engine counts segments, of which labels of many tokens give an item several.
            progress.update(task, completed=num_items * done // total)

        yield advance


@contextmanager
def warmup_progress(*, quiet: bool) -> Iterator[OnProgram | None]:
    """A bar over the programs that are compiled, as the callback that moves it; a line says before how many there are.

    Where nobody watches, the line is all.
    """
    if quiet:
        yield None
        return

    def tell(done: int, total: int, title: str) -> None:
        if not done:
            say(f"warm-up: {total} programs to compile")

    if not on_terminal():
        yield tell
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("programs"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=open_console(sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=None, visible=False)

        def show(done: int, total: int, title: str) -> None:
            tell(done, total, title)
            progress.update(task, completed=done, total=total, description=title, visible=True)

        yield show


@contextmanager
def compile_progress(*, quiet: bool) -> Iterator[OnCompile]:
    """A bar over programs that are compiled, as the callback that moves it; lines where nobody watches."""
    if quiet:
        yield lambda done, total, title: None
        return
    if not on_terminal():
        yield lambda done, total, title: say(f"[{done + 1}/{total}] compiling {title}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=open_console(sys.stderr), transient=True
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, title: progress.update(task, completed=done, total=total, description=title)
