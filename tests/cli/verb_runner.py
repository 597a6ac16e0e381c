"""One verb as a program of its own, with the statuses and the error lines of `prefixwise`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import typer

from prefixwise.cli.commands import Verbs
from prefixwise.cli.failures import CommandError, report_failure
from prefixwise.contract.errors import PrefixwiseError
from tests.cli.conftest import Ran


def run_verb(verb: Callable[..., None], capsys: pytest.CaptureFixture[str], *args: str) -> Ran:
    app = Verbs()
    app.command()(verb)
    capsys.readouterr()  # what was said before is not the verb's
    try:
        status: int | None = app([*args], prog_name="verb", standalone_mode=False)
    except (PrefixwiseError, CommandError, typer.TyperException) as error:
        status = report_failure(error)
    return Ran(status or 0, *capsys.readouterr())
