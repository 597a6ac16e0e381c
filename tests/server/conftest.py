"""Fixtures of the server's room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.app_client import AppClient, app_client
from tests.server.server_process import WORKERS, Form, ServerProcess, real_server


@pytest.fixture(scope="module")
def client() -> Iterator[AppClient]:
    """A ready server on the fake backend, without tokenizer, key or limits of its own."""
    with app_client() as made:
        yield made


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The clock of the supervisor's watch is the test's: lets seconds pass."""
    now = [100.0]
    monkeypatch.setattr("prefixwise.server.usage.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.fixture(params=[(), (WORKERS,)], ids=["one process", "workers"])
def form(request: pytest.FixtureRequest) -> Form:
    """The options of a server in each of its two forms."""
    options: Form = request.param
    return options


@pytest.fixture(scope="session")
def small_server(checkpoint_of: Callable[[str], Path]) -> Iterator[ServerProcess]:
    """`prefixwise serve` with a small model in float32, for tests that leave it as it was."""
    with real_server(f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32") as running:
        yield running


@pytest.fixture(scope="session")
def worker_server(checkpoint_of: Callable[[str], Path]) -> Iterator[ServerProcess]:
    """The same with two HTTP workers."""
    options = (f"--model-path={checkpoint_of('qwen3')}", "--dtype=float32", WORKERS)
    with real_server(*options) as running:
        yield running
