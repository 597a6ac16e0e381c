"""Where output goes: `write_data` to stdout for what was asked for, `say` to stderr for everything about it.

rich decides about colour: none where the stream is no terminal, none with NO_COLOR set.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

PIPE_CLOSED = 141  # what a shell reports for a program that SIGPIPE ended


def write_data(text: str) -> None:
    """Write to stdout, all of it now. Raises `typer.Exit` where nobody reads any more."""
    try:
        # Line by line: with PYTHONUNBUFFERED one long write that a reader cuts short would look like success.
        sys.stdout.writelines(text.splitlines(keepends=True))
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more as it exits: let that go nowhere and not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None


def say(line: str, *, style: str = "") -> None:
    """One line on stderr, never wrapped."""
    from rich.text import Text

    open_console(sys.stderr).print(Text(line, style=style))


def styled(line: str, style: str) -> str:
    """The line as stdout is to show it: with escape codes on a terminal, else as it is."""
    from rich.text import Text

    console = open_console(sys.stdout)
    with console.capture() as capture:
        console.print(Text(line, style=style), end="")
    return capture.get()


def open_console(stream: TextIO) -> Console:
    """A console that adds nothing of its own: no wrapping, no highlighting, no markup in an item's text."""
    from rich.console import Console

    return Console(file=stream, soft_wrap=True, highlight=False, markup=False, emoji=False)


def stdout_width() -> int:
    """Columns of the terminal; 80 where there is none and COLUMNS does not say."""
    return shutil.get_terminal_size().columns


def on_terminal() -> bool:
    """Is somebody watching stderr? Then progress may be shown there."""
    return sys.stderr.isatty()
