"""The overload benchmark: what passes, and the script on a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overload import Call, device_shares, judge, kinds_of, parse_options, tokens_per_second

ROOT = Path(__file__).parents[2]
SMALL, LARGE = kinds_of(5000)
DEADLINE = 10.0


def calls_of(*, latency: float = 2.0, outcome: str = "scored") -> list[Call]:
    """One large request a second for 100 s."""
    return [Call(LARGE, float(second), second + latency, outcome) for second in range(100)]


def small(latency: float) -> Call:
    return Call(SMALL, 50.0, 50.0 + latency, "scored")


def passes(*calls: Call, capacity: float = LARGE.num_tokens) -> bool:
    passed: bool = judge(calls, capacity, 100.0, DEADLINE)["passed"]
    return passed


def test_a_rate_counts_what_was_scored_in_time_until_the_last_answer() -> None:
    calls = [*calls_of(), *calls_of(outcome="429 queue_too_long"), *calls_of(latency=DEADLINE + 1)]
    assert tokens_per_second(calls) == 2 * 100 * LARGE.num_tokens / 110
    assert tokens_per_second(calls, DEADLINE) == 100 * LARGE.num_tokens / 110


def test_the_shares_of_the_kinds_are_all_of_the_traffic() -> None:
    assert SMALL.share + LARGE.share == 1.0


@pytest.mark.parametrize(
    ("large_tokens", "sizes"), [(10**6, (400, 5000)), (5000, (400, 5000)), (870, (55, 875)), (1, (28, 188))]
)
def test_requests_are_as_large_as_the_device_is_fast_up_to_a_bound(large_tokens: int, sizes: tuple[int, int]) -> None:
    small, large = kinds_of(large_tokens)
    assert (small.num_tokens, large.num_tokens) == sizes


def test_it_passes_with_nine_tenths_of_the_capacity() -> None:
    assert passes(*calls_of(), small(1.0))
    assert not passes(*calls_of(), small(1.0), capacity=1.15 * LARGE.num_tokens)


def test_it_fails_with_a_late_answer_or_slow_small_requests_or_none() -> None:
    assert not passes(*calls_of(), small(1.0), Call(LARGE, 0.0, DEADLINE + 0.1, "scored"))
    assert not passes(*calls_of(), small(0.6 * DEADLINE))
    assert not passes(*calls_of())


def test_the_device_is_shared_by_requests_in_time_others_and_idleness() -> None:
    calls = [*calls_of(), *calls_of(latency=DEADLINE + 1)]
    shares = device_shares(calls, DEADLINE, 99.0, 250 * LARGE.num_tokens)
    assert shares == {"busy_share": 0.9, "in_time_share": 0.4, "device_share": 0.36}


def test_a_running_server_takes_no_flags() -> None:
    assert parse_options(["--", "--device", "cpu"]).flags == ["--device", "cpu"]
    with pytest.raises(SystemExit):
        parse_options(["--url", "http://127.0.0.1:1", "--", "--device", "cpu"])


@pytest.mark.slow
def test_the_script_prints_what_it_found() -> None:
    command = [sys.executable, "-m", "benchmarks.overload", "--seconds=30", "--capacity-seconds=10"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert ran.returncode == (not found["passed"])
    assert found["late"] == 0
    assert found["outcomes"]["small"]["scored"] > 0
