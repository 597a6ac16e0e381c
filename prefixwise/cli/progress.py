"""Progress on stderr: bars on a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from prefixwise.cli.output import on_terminal, open_console, say
from prefixwise.contract.errors import count

if TYPE_CHECKING:
    from prefixwise.engine.engine import OnProgress
    from prefixwise.launch.loading import OnProgram

    OnCompile = Callable[[int, int, str], None]

MANY_ITEMS = 200  # up to this many, a bar would only flicker


def print_loading(model: str | Path | None, *, quiet: bool) -> None:
    """Print that the model is loading. No bar: a download draws its own below."""
    if not quiet and on_terminal():
        say(f"loading {model or 'the embedded model'} ...", style="dim")


@contextmanager
def item_progress(num_items: int, *, quiet: bool) -> Iterator[OnProgress | None]:
    """The callback that advances a bar over the items; None without a bar."""
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
            # The engine counts segments; an item has several if its labels have several tokens.
            progress.update(task, completed=num_items * done // total)

        yield advance


@contextmanager
def warmup_progress(*, quiet: bool) -> Iterator[OnProgram | None]:
    """The callback that advances a bar over the programs to compile, after a line with their number.

    Without a terminal only the line is printed.
    """
    if quiet:
        yield None
        return

    def print_total(done: int, total: int, title: str) -> None:
        if not done:
            say(f"warm-up: {total} programs to compile")

    if not on_terminal():
        yield print_total
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
            print_total(done, total, title)
            progress.update(task, completed=done, total=total, description=title, visible=True)

        yield show


@contextmanager
def compile_progress(*, quiet: bool) -> Iterator[OnCompile]:
    """The callback that advances a bar over the programs to compile; lines without a terminal."""
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


@contextmanager
def step_progress(total: int, what: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """The callback that takes the title of the next of `total` steps: a bar on a terminal, plain lines elsewhere."""
    done = 0
    if quiet:
        yield lambda title: None
        return
    if not on_terminal():

        def print_step(title: str) -> None:
            nonlocal done
            done += 1
            say(f"[{done}/{total}] {what}: {title}")

        yield print_step
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=open_console(sys.stderr), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(title: str) -> None:
            nonlocal done
            progress.update(task, completed=done, description=f"{what}: {title}")
            done += 1

        yield advance


SECONDS_BETWEEN_LINES = 10.0


@dataclass
class BatchProgress:
    """Counts the rows of a batch job."""

    num_rows: int  # in all
    done: int  # rows, including those of earlier runs
    failures: int
    items: int = 0  # of this run
    begin: float = field(default_factory=monotonic)
    on_change: Callable[[], None] = lambda: None
    _done_before: int = 0

    def __post_init__(self) -> None:
        self._done_before = self.done

    def add(self, rows: int, items: int, failures: int) -> None:
        """Count finished rows, their items, and the failures among the rows."""
        self.done += rows
        self.items += items
        self.failures += failures
        self.on_change()

    @property
    def seconds(self) -> float:
        return max(monotonic() - self.begin, 1e-9)

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds

    @property
    def seconds_left(self) -> float | None:
        """None before the first row of this run."""
        rows = self.done - self._done_before
        return (self.num_rows - self.done) * self.seconds / rows if rows else None

    def line(self) -> str:
        """The progress as one line."""
        left = "?" if self.seconds_left is None else duration(self.seconds_left)
        failures = f"{self.failures:,} failed"
        return f"{self.done:,}/{self.num_rows:,} rows, {self.items_per_second:,.1f} items/s, {left} left, {failures}"


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def show_progress(progress: BatchProgress, *, quiet: bool) -> Iterator[None]:
    """Show the progress while the block runs; its clock starts here."""
    progress.begin = monotonic()
    if quiet:
        yield
    elif on_terminal():
        with _as_bar(progress):
            yield
    else:
        progress.on_change = _lines(progress)
        yield


def reading_progress(*, quiet: bool) -> Callable[[int], None]:
    """A callback for the number of rows read so far, which prints it every 10 s."""
    last = monotonic()

    def on_rows(num_rows: int) -> None:
        nonlocal last
        if not quiet and monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            say(f"reading the input: {count(num_rows, 'row')} so far")

    return on_rows


def _lines(progress: BatchProgress) -> Callable[[], None]:
    last = monotonic()

    def on_change() -> None:
        nonlocal last
        if monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            say(progress.line())

    return on_change


@contextmanager
def _as_bar(progress: BatchProgress) -> Iterator[None]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=open_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(progress.line(), total=progress.num_rows, completed=progress.done)
        progress.on_change = lambda: bar.update(task, completed=progress.done, description=progress.line())
        yield
