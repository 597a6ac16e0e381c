from __future__ import annotations

import pytest

from prefixwise.cli import progress as progress_module
from prefixwise.cli.progress import BatchProgress, duration, reading_progress, show_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress_module, "monotonic", lambda: now[0])
    return now


def test_rates_are_those_of_this_run(clock: list[float]) -> None:
    progress = BatchProgress(num_rows=100, done=40, failures=1)
    with show_progress(progress, quiet=True):
        assert progress.line() == "40/100 rows, 0.0 items/s, ? left, 1 failed"
        clock[0] += 10
        progress.add(20, 50, 2)
        assert progress.line() == "60/100 rows, 5.0 items/s, 0:00:20 left, 3 failed"


def test_where_nobody_watches_a_line_comes_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    progress = BatchProgress(num_rows=100, done=0, failures=0)
    with show_progress(progress, quiet=False):
        for _ in range(25):
            clock[0] += 1
            progress.add(1, 2, 0)
    assert capsys.readouterr().err.splitlines() == [
        "10/100 rows, 2.0 items/s, 0:01:30 left, 0 failed",
        "20/100 rows, 2.0 items/s, 0:01:20 left, 0 failed",
    ]


def test_a_long_input_is_told_while_it_is_read(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    tell, hush = reading_progress(quiet=False), reading_progress(quiet=True)
    for num_rows in (1000, 2000, 3000):
        clock[0] += 6
        tell(num_rows)
        hush(num_rows)
    assert capsys.readouterr().err == "reading the input: 2,000 rows so far\n"


def test_durations_have_hours() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 36_000)] == ["0:00:00", "0:01:01", "10:00:00"]
