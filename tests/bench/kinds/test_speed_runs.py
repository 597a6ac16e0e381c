from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kinds.samples import check, reported, warned


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"measured__arrivals": 6}, "measured.arrivals: expected 5 (sent + dropped), got 6"),
        ({"measured__errors_by_code": {}}, "measured.sent: expected 3 (answered + errors_by_code), got 4"),
        ({"measured__qps_answered": 2.5}, "measured.qps_answered: expected 1.5 (answered / wall_sec), got 2.5"),
        ({"measured__items_per_sec": 1.5}, "measured.items_per_sec: expected 15 (items answered / wall_sec), got 1.5"),
        (
            {"measured__latency__p99_ms": 21.0},
            "measured.latency: expected p50 <= p95 <= p99 <= max, got [10.0, 19.0, 21.0, 20.0]",
        ),
        ({"measured__latency": None}, "measured.latency: expected metrics where something was answered, and only"),
    ],
)
def test_the_counts_of_a_load_add_up(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    (only,) = reported(check(tmp_path, "load", **changes))
    assert only.startswith(error)


TIMES = {"measured__rate_sec": 2.0, "measured__drain_sec": 0.0}
GOODPUT = {"p99_bound_ms": 20.0, "requests_per_sec": 1.5, "items_per_sec": 15.0, "share_within_bound": 0.6}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"measured__qps_answered": 2.5}, "measured.qps_answered: expected 1.5 (answered / rate_sec), got 2.5"),
        ({"measured__drain_sec": 1.0}, "measured.drain_sec: expected 0 (wall_sec - send_sec), got 1"),
        (
            {"measured__rate_sec": 1.5, "measured__qps_answered": 2.0, "measured__items_per_sec": 20.0},
            "measured.rate_sec: expected from send_sec 2 to wall_sec 2, got 1.5",
        ),
        (
            {"measured__goodput": {**GOODPUT, "requests_per_sec": 0.5, "bound_met": False}},
            "measured.goodput.requests_per_sec: expected 1.5 (in time / rate_sec), got 0.5",
        ),
    ],
)
def test_rates_are_by_the_time_that_is_said(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert reported(check(tmp_path, "load", **TIMES)) == []
    assert reported(check(tmp_path, "load", **{**TIMES, **changes})) == [error]


def test_a_client_that_was_the_limit_and_a_run_cut_short_are_odd(tmp_path: Path) -> None:
    load = warned(check(tmp_path, "load", measured__client_limited=True, cut_short=True))
    assert load[-2:] == [
        "measured.client_limited: expected false, got true: the metrics are the client's",
        "cut_short: expected false, got true",
    ]
    assert warned(check(tmp_path, "ab", cut_short=True))[-1] == "cut_short: expected false, got true"


def test_a_warm_up_is_checked_too(tmp_path: Path) -> None:
    empty: dict[str, object] = dict.fromkeys(("arrivals", "sent", "dropped", "answered"), 0) | {"errors_by_code": {}}
    rates = dict.fromkeys(("qps_offered", "qps_sent", "qps_answered", "items_per_sec", "send_sec", "wall_sec"), 0.0)
    nothing = dict.fromkeys(("latency", "service_latency", "sender_late", "goodput"))
    assert check(tmp_path, "load", warmup={**empty, **rates, **nothing}).is_valid
    wrong = check(tmp_path, "load", warmup={**empty, **rates, **nothing, "arrivals": 1})
    assert reported(wrong) == ["warmup.arrivals: expected 0 (sent + dropped), got 1"]


def test_errors_and_drops_are_odd(tmp_path: Path) -> None:
    assert warned(check(tmp_path, "load")) == [
        "measured.errors_by_code: expected none, got {'timeout': 1}",
        "measured.dropped: expected 0, got 1",
    ]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"variants__0__median_ms": 250.0}, "variants[0].median_ms: expected 500 (by its runs), got 250"),
        ({"variants__0__p95_ms": 750.0}, "variants[0].p95_ms: expected 725 (by its runs), got 750"),
        ({"variants__0__items_per_sec": 10.0}, "variants[0].items_per_sec: expected 20 (items / median), got 10"),
        ({"variants__0__runs": []}, "variants[0].runs: expected at least one run, as it is ok, got none"),
        ({"variants__1__name": "packed"}, "variants[1].name: expected a name that no other variant has, got packed"),
        ({"variants__1__failure": None}, "variants[1].status: expected ok (by failure), got failed"),
        (
            {"variants__0__scores_vs_first__max_abs_diff": 0.021},
            "variants[0].scores_agree: expected False (by its differences 0.021 and 0), got True",
        ),
        (
            {"variants__1__scores_agree": True},
            "variants[1].scores_agree: expected False (nothing was compared), got True",
        ),
    ],
)
def test_the_figures_of_a_variant_follow_from_its_runs(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert reported(check(tmp_path, "ab", **changes)) == [error]


TIME_MS = 1000 * 0.1875**0.5  # the geometric mean of 250 and 750 ms
BY_TIME = {"variants__0__time_ms": TIME_MS, "variants__0__items_per_sec": 10_000 / TIME_MS}
SPEED = {"low": None, "high": None, "confidence": 0.95, "num_rounds": 2}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"variants__0__time_ms": 500.0}, "variants[0].time_ms: expected 433.0127019 (by its rounds), got 500"),
        (
            {"variants__0__items_per_sec": 20.0},
            "variants[0].items_per_sec: expected 23.09401077 (items / time), got 20",
        ),
        (
            {"variants__0__speed_vs_first": {**SPEED, "ratio": 1.5}},
            "variants[0].speed_vs_first.ratio: expected 1 (of the times), got 1.5",
        ),
    ],
)
def test_time_rate_and_ratio_are_one_estimate(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert reported(check(tmp_path, "ab", **BY_TIME)) == []
    assert reported(check(tmp_path, "ab", **{**BY_TIME, **changes})) == [error]


def test_one_round_a_failure_and_other_scores_are_odd(tmp_path: Path) -> None:
    differing = {"variants__0__scores_vs_first__max_abs_diff": 0.5, "variants__0__scores_agree": False}
    report = check(tmp_path, "ab", rounds=1, **differing)
    assert report.is_valid
    assert warned(report) == [
        "variants[0].scores_agree: expected true, got false",
        "variants[1].status: expected ok, got failed: timeout",
        "rounds: expected several, for an interval, got 1",
    ]
