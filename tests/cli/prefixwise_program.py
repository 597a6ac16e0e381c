"""`prefixwise` in this process, where a fixture that outlives one test needs its exit status."""

from __future__ import annotations

import pytest

from prefixwise.cli.main import main


def exit_status(*args: str) -> int:
    """Of `prefixwise` with these arguments."""
    with pytest.raises(SystemExit) as exited:
        main(args)
    assert isinstance(exited.value.code, int)
    return exited.value.code
