"""`prefixwise profiles`: the reranker profiles that come with the package, and whether a file of yours is one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.failures import FAILED, MISUSED, CommandError, tell_error
from prefixwise.cli.output import stdout_width, write_data
from prefixwise.cli.text_table import Column, label_name, render_table, visible
from prefixwise.contract.errors import ProfileError

if TYPE_CHECKING:
    from prefixwise.prompts.profile import Profile

Targets = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME|FILE", help="A profile to show, or .toml files to check; all when left out."),
]


def profiles(
    targets: Targets = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="The list as one line of JSON.")] = False,
) -> None:
    """List the reranker profiles that come with the package, show the file of one, or check files of yours.

    To write a profile start from a copy: prefixwise profiles qwen3-reranker > mine.toml
    """
    from prefixwise.prompts.profile_files import builtin_profile_text, builtin_profiles

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
    """A line for each: good ones on stdout, bad ones on stderr. Exits with a status where any is bad.

    By the rule of --profile, so that what is ok here is ok there.
    """
    from prefixwise.prompts.profile_files import find_profile

    all_good = True
    for name in names:
        try:
            profile = find_profile(name)
        except ProfileError as error:
            tell_error(str(error))
            all_good = False
        else:
            write_data(f"{visible(name)}: ok, profile {visible(profile.name)}\n")
    if not all_good:
        raise typer.Exit(FAILED)


def _json(found: Sequence[Profile]) -> str:
    return json.dumps({"profiles": [_profile_json(profile) for profile in found]}) + "\n"


def _profile_json(profile: Profile) -> dict[str, object]:
    return {
        "name": profile.name,
        "description": profile.description,
        "relevance": profile.relevance,
        "labels": profile.labels,
        "instruction": profile.instruction,
        "recognise": {"names": profile.names, "families": profile.families},
    }


def _table(found: Sequence[Profile]) -> str:
    """What a profile is for stands below it: beside it, it would have no room."""
    columns = [
        Column("profile", [profile.name for profile in found]),
        Column("relevance", [profile.relevance for profile in found]),
        Column("labels", [" ".join(map(label_name, profile.labels)) or "-" for profile in found]),
        Column("for models called", [", ".join(profile.names) or "-" for profile in found]),
    ]
    header, *lines = render_table(columns, stdout_width()).splitlines(keepends=True)
    return header + "".join(f"{line}  {each.description}\n" for line, each in zip(lines, found, strict=True))
