"""`prefixwise validate`, run in this process, with what it says caught."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import pytest

from prefixwise.cli.main import main
from tests.cli.conftest import Ran


def run_validate(*args: object) -> Ran:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exited:
        main(["validate", *map(str, args)])
    assert isinstance(exited.value.code, int)
    return Ran(exited.value.code, out.getvalue(), err.getvalue())


def result_of(ran: Ran) -> dict[str, Any]:
    """The last line of stdout, which must be all of it."""
    (line,) = ran.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found
