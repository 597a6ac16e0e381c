"""Commands as processes: streamed, ended with their caller, and their error messages."""

from __future__ import annotations

import sys

import pytest

from prefixwise.bench.remote.targets import processes
from prefixwise.bench.remote.targets.base import CommandResult, TargetError
from prefixwise.bench.remote.targets.processes import run_streamed


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_status_lines_and_output_are_told_apart() -> None:
    lines: list[str] = []
    code = (
        "import sys; print('one', file=sys.stderr, flush=True); print('two', file=sys.stderr); print('{}'); sys.exit(3)"
    )
    done = run_streamed(python(code), lines.append)
    assert (done.status, done.stdout, lines) == (3, "{}\n", ["one", "two"])


def test_bytes_that_are_no_text_and_floods_are_taken() -> None:
    code = (
        r"import os; os.write(2, b'\xff\xfe\n' * 50_000); os.write(2, b'x' * 3_000_000); os.write(1, b'y' * 3_000_000)"
    )
    done = run_streamed(python(code))
    assert len(done.stdout) == 3_000_000
    assert done.stderr.endswith("x" * 100)


def test_a_listener_that_fails_ends_the_command_and_is_heard_of() -> None:
    """As where whoever reads us stops reading: a full pipe must not keep it waiting."""

    def listen(line: str) -> None:
        raise BrokenPipeError("nobody reads")

    code = "import sys, time\nfor _ in range(100_000): print('x' * 80, file=sys.stderr)\ntime.sleep(600)"
    with pytest.raises(BrokenPipeError, match="nobody reads"):
        run_streamed(python(code), listen)


@pytest.mark.parametrize(("heartbeat", "heard"), [(True, "True\n"), (False, "False\n")])
def test_a_sign_of_life_is_sent_where_it_is_asked_for(
    heartbeat: bool, heard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "HEARTBEAT_SECONDS", 0.05)
    code = "import select, sys; print(bool(select.select([0], [], [], 1.0)[0]))"
    assert run_streamed(python(code), heartbeat=heartbeat).stdout == heard


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(TargetError, match="no-such-program cannot be run: No such file"):
        run_streamed(["no-such-program"])


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (CommandResult(1, "", "note\nerror: no space\n"), "no space"),
        (CommandResult(2, "", "run 1\nrun 2\nrun 3"), "it ended with status 2; its last lines: run 2 / run 3"),
        (CommandResult(-9, "", ""), "it was ended by SIGKILL without a message"),
        (CommandResult(143, "", "run 1"), "it was ended by SIGTERM; its last lines: run 1"),
    ],
)
def test_what_is_told_of_a_failure(done: CommandResult, words: str) -> None:
    assert done.message == words
