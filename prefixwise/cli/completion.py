"""`prefixwise completion`: the script with which a shell completes verbs, options and their values."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from prefixwise.cli.output import write_data

VARIABLE = "_PREFIXWISE_COMPLETE"  # set by the scripts, when they call the program

Shell = Annotated[
    Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)
]


def completion(shell: Shell) -> None:
    """Print the completion script of a shell: verbs, options and the values of options.

    \b
    ~/.bashrc                    source <(prefixwise completion bash)
    ~/.zshrc, after compinit     source <(prefixwise completion zsh)
    ~/.config/fish/config.fish   prefixwise completion fish | source
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    write_data(get_completion_script(prog_name="prefixwise", complete_var=VARIABLE, shell=shell) + "\n")


def register_shells() -> None:
    """Let typer answer a shell's script. Does nothing in a call that no script has made."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
