from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from prefixwise.cli.main import main
from prefixwise.engine.engine import ScoringEngine
from prefixwise.launch.loading import OnProgram
from prefixwise.launch.options import EngineOptions
from tests.cli.fake_program import fake_engine

FAKE_PROGRAM = (sys.executable, "-m", "tests.cli.fake_program")
REAL_PROGRAM = (sys.executable, "-m", "prefixwise")


@dataclass(frozen=True)
class Ran:
    """What a run of the program left behind."""

    status: int
    out: str
    err: str


RunMain = Callable[..., Ran]


@pytest.fixture(scope="session")
def shared_engine() -> ScoringEngine:
    return fake_engine()


@pytest.fixture
def run_main(
    shared_engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunMain:
    """Run the program in this process, on the fake model."""

    def open_engine(options: EngineOptions, on_program: OnProgram | None) -> ScoringEngine:
        return shared_engine if options == EngineOptions() else fake_engine(options)

    def run(*args: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()  # what was said before is not the program's, as when a checkpoint was made
        with pytest.raises(SystemExit) as exited:
            main(args)
        assert isinstance(exited.value.code, int)
        return Ran(exited.value.code, *capsys.readouterr())

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(shared_engine, "close", lambda: None)  # the next test uses it, too
    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    return run


@pytest.fixture
def asked_engines(run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> list[EngineOptions]:
    """What engines are asked for with by the program, which is stopped there."""
    asked: list[EngineOptions] = []

    def open_engine(options: EngineOptions, on_program: OnProgram | None) -> ScoringEngine:
        asked.append(options)
        raise KeyboardInterrupt  # seen enough

    monkeypatch.setattr("prefixwise.cli.run_request.open_engine", open_engine)
    return asked


def plain_environment(**extra: str) -> dict[str, str]:
    """This environment, without what would decide about colour or width."""
    deciding = ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "GITHUB_ACTIONS", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if name not in deciding}
    return {**kept, "TERM": "xterm-256color", **extra}


def num_threads() -> str:
    """Of PyTorch in this process: a CPU's bits depend on it."""
    return str(sys.modules["torch"].get_num_threads()) if "torch" in sys.modules else "1"


def run_process(command: Sequence[str], *, stdin: bytes = b"", **environment: str) -> Ran:
    done = subprocess.run(command, input=stdin, capture_output=True, env=plain_environment(**environment), timeout=120)
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def run_on_terminal(command: Sequence[str], **environment: str) -> Ran:
    """As `run_process`, but with stderr a terminal; stdout stays a pipe."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=plain_environment(**environment))
    os.close(theirs)
    shown = _read_terminal(ours)
    out, _ = process.communicate(timeout=120)
    return Ran(process.returncode, out.decode(), shown.decode())


def _read_terminal(terminal: int) -> bytes:
    shown = b""
    try:
        while chunk := os.read(terminal, 65_536):
            shown += chunk
    except OSError:  # how Linux says that the other side has closed
        pass
    finally:
        os.close(terminal)
    return shown
