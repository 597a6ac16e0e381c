"""`prefixwise profiles`: lists the built-in reranker profiles, prints one, or checks profile files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.failures import FAILED, MISUSED, CommandError, print_error
from prefixwise.cli.output import Column, label_name, render_table, stdout_width, visible, write_data
from prefixwise.contract.errors import ProfileError

if TYPE_CHECKING:
    from prefixwise.prompts.profile import Profile

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME|FILE", help="A profile to print, or .toml files to check; default: list all."),
]


def profiles(
    targets: Targets = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The list as one line of JSON.")] = False,
) -> None:
    """List the built-in reranker profiles, print the file of one, or check your own files.

    To write a profile start from a copy: prefixwise profiles qwen3-reranker > mine.toml
    """
    from prefixwise.prompts.profile_choice import builtin_profile_text, builtin_profiles

    builtin = builtin_profiles()
    if as_json and targets:
        raise CommandError("--json is for the list: expected it without a name or file", status=MISUSED)
    if not targets:
        found = list(builtin.values())
        write_data(_json(found) if as_json else _table(found))
    elif builtin.keys().isdisjoint(targets):
        _check_files(targets)
    elif len(targets) == 1:
        write_data(builtin_profile_text(targets[0]))
    else:
        raise CommandError("a built-in profile is shown alone: expected one name, or files", status=MISUSED)


def _check_files(names: Sequence[str]) -> None:
    """Print a line for each: valid ones on stdout, invalid ones on stderr. Raises `typer.Exit` if any is invalid.

    A file that passes here is accepted by --profile.
    """
    from prefixwise.prompts.profile_choice import find_profile

    all_valid = True
    for name in names:
        try:
            profile = find_profile(name)
        except ProfileError as error:
            print_error(str(error))
            all_valid = False
        else:
            write_data(f"{visible(name)}: ok, profile {visible(profile.name)}\n")
    if not all_valid:
        raise typer.Exit(FAILED)


def _json(found: Sequence[Profile]) -> str:
    return json.dumps({"profiles": [_profile_json(profile) for profile in found]}) + "\n"


def _profile_json(profile: Profile) -> dict[str, object]:
    return {
        "name": profile.name,
        "description": profile.description,
        "relevance": profile.relevance,
        "labels": profile.labels,
        "label_token_ids": profile.label_token_ids,
        "instruction": profile.instruction,
        "recognise": {"names": profile.names, "families": profile.families},
    }


def _labels(profile: Profile) -> str:
    names = [*map(label_name, profile.labels), *(f"token {each}" for each in profile.label_token_ids)]
    return " ".join(names) or "-"


def _models(profile: Profile) -> str:
    """The patterns of their names; for `*`, which is any name, the families."""
    return f"any {', '.join(profile.families)}" if "*" in profile.names else ", ".join(profile.names) or "-"


def _table(found: Sequence[Profile]) -> str:
    """The description is printed below its profile; beside it there is no room."""
    columns = [
        Column("profile", [profile.name for profile in found]),
        Column("relevance", [profile.relevance for profile in found]),
        Column("labels", [_labels(profile) for profile in found]),
        Column("for models called", [_models(profile) for profile in found]),
    ]
    header, *lines = render_table(columns, stdout_width()).splitlines(keepends=True)
    return header + "".join(f"{line}  {each.description}\n" for line, each in zip(lines, found, strict=True))
