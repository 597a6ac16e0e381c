"""How far a batch job is, on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from prefixwise.cli.output import on_terminal, open_console, say

SECONDS_BETWEEN_LINES = 10.0


@dataclass
class BatchProgress:
    """Counts rows; whoever shows them looks here."""

    num_rows: int  # in all
    done: int  # rows, those of earlier runs with them
    failures: int
    items: int = 0  # of this run
    begin: float = field(default_factory=monotonic)
    on_change: Callable[[], None] = lambda: None
    _done_before: int = 0

    def __post_init__(self) -> None:
        self._done_before = self.done

    def add(self, rows: int, items: int, failures: int) -> None:
        """So many are done, and so many of them failed."""
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
        """None where nothing is known yet."""
        rows = self.done - self._done_before
        return (self.num_rows - self.done) * self.seconds / rows if rows else None

    def line(self) -> str:
        """All of it in words."""
        left = "?" if self.seconds_left is None else duration(self.seconds_left)
        failures = f"{self.failures:,} failed"
        return f"{self.done:,}/{self.num_rows:,} rows, {self.items_per_second:,.1f} items/s, {left} left, {failures}"


def duration(seconds: float) -> str:
    """h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def shown(progress: BatchProgress, *, quiet: bool) -> Iterator[None]:
    """Show it while the block runs; what came before does not count as its time."""
    progress.begin = monotonic()
    if quiet:
        yield
    elif on_terminal():
        with _as_bar(progress):
            yield
    else:
        progress.on_change = _lines(progress)
        yield


def reading(*, quiet: bool) -> Callable[[int], None]:
    """A callback with the number of rows found so far, which says it now and then."""
    last = monotonic()

    def tell(num_rows: int) -> None:
        nonlocal last
        if not quiet and monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            say(f"reading the input: {num_rows:,} rows so far")

    return tell


def _lines(progress: BatchProgress) -> Callable[[], None]:
    last = monotonic()

    def tell() -> None:
        nonlocal last
        if monotonic() - last >= SECONDS_BETWEEN_LINES:
            last = monotonic()
            say(progress.line())

    return tell


@contextmanager
def _as_bar(progress: BatchProgress) -> Iterator[None]:
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("scoring"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=open_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(progress.line(), total=progress.num_rows, completed=progress.done)
        progress.on_change = lambda: bar.update(task, completed=progress.done, description=progress.line())
        yield
