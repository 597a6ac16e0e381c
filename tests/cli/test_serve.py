"""What `serve` shares with the other verbs; its own flags are tested in tests/test_launch_server.py."""

from __future__ import annotations

from tests.cli.conftest import REAL_PROGRAM, run_process


def test_a_profile_that_is_not_there_is_an_error_with_a_hint_before_the_model_is_loaded() -> None:
    ran = run_process([*REAL_PROGRAM, "serve", "--port", "0", "--model", "no such model", "--profile", "nobody"])
    error, hint = ran.err.splitlines()[-2:]
    assert (ran.status, ran.out) == (1, "")
    assert error.startswith('error: no profile is called "nobody"; expected bge-')
    assert hint.startswith("hint: `prefixwise profiles` lists")
