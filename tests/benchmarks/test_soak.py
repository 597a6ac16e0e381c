"""`benchmarks.soak`: each verdict finds what breaks its promise, the plan has every act, and a short run works."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.__main__ import describe_run, parse_options
from benchmarks.soak.cases import Case, make_cases, values_of, with_reference
from benchmarks.soak.conductor import CHURN, ENDS, FAULTS, SURVIVED, Conductor, make_plan
from benchmarks.soak.recording import Disruption, Exchange, Life, Recording, Sample
from benchmarks.soak.report import soak_report
from benchmarks.soak.supervisor import FLAGS
from benchmarks.soak.verdicts import MAX_RSS_GROWTH, MIB, grown_by, judge
from prefixwise.bench.render.html import report_html

SCORED = Exchange("score ids", 1.0, 1.1, "answered", 200, "", as_expected=True)
KILLED = Disruption("SIGKILL", 10.0, 14.0, ("503", "lost", "unreachable"))
DRAINED = Disruption("SIGTERM", 20.0, 24.0, ("503", "lost", "unreachable"), spares_earlier=True)


def idle(time: float, **changes: Any) -> Sample:
    return Sample(time, 1, 300 * MIB, 40, 20, time / 10, 0, 0, 0, is_idle=True)._replace(**changes)


def recording_of(*exchanges: Exchange, samples: list[Sample] | None = None) -> Recording:
    """A run without a fault of ours, and these requests."""
    return Recording(
        "soak",
        "a machine",
        "a version",
        "2026-11-16T12:00:00Z",
        seconds=60.0,
        num_begun=1 + len(exchanges),
        exchanges=[SCORED, *exchanges],
        samples=[idle(float(time)) for time in range(10)] if samples is None else samples,
        lives=[Life(1, 0.0, 2.0, 60.0, 0)],
        disruptions=[KILLED, DRAINED],
    )


def failed(recording: Recording) -> list[str]:
    return [verdict.name for verdict in judge(recording) if not verdict.passed]


def test_a_run_that_keeps_every_promise_passes() -> None:
    assert failed(recording_of()) == []


@pytest.mark.parametrize(
    ("exchange", "verdict"),
    [
        (SCORED._replace(as_expected=False, detail="item 3: expected 0.5, got 0.25"), "bits"),
        (SCORED._replace(status=500, code="internal_error", as_expected=False), "errors"),
        (SCORED._replace(status=503, code="not_ready", as_expected=False), "errors"),
        (SCORED._replace(ending="lost", status=0, as_expected=False), "errors"),
        (SCORED._replace(status=400, code="invalid_json", as_expected=False), "answers"),
        (SCORED._replace(status=400, code="empty_query", as_expected=False, kind="wrong request"), "answers"),
        (SCORED._replace(ending="unanswered", status=0, as_expected=False), "endings"),
    ],
    ids=["wrong-bits", "500", "503", "lost", "refused", "other-error", "unanswered"],
)
def test_one_request_against_a_promise_is_found(exchange: Exchange, verdict: str) -> None:
    assert verdict in failed(recording_of(exchange))


def test_a_full_queue_and_a_client_that_leaves_are_as_documented() -> None:
    refused = SCORED._replace(status=429, code="queue_full", as_expected=False)
    assert failed(recording_of(refused, SCORED._replace(ending="hung_up", status=0), SCORED, SCORED)) == []


@pytest.mark.parametrize(
    ("begin", "end", "changes", "is_excused"),
    [
        (9.0, 10.5, {"ending": "lost", "status": 0}, True),  # in flight when the process was killed
        (13.0, 13.1, {"status": 503}, True),
        (12.0, 12.1, {"status": 500}, False),  # no signal makes a 500
        (14.1, 14.2, {"status": 503}, False),  # it is ready again
        (19.0, 20.5, {"ending": "lost", "status": 0}, False),  # a drain loses nothing
        (19.9, 20.5, {"status": 503}, True),  # it arrived when the drain had begun
        (21.0, 21.1, {"ending": "unreachable", "status": 0}, True),
    ],
)
def test_an_error_is_excused_by_what_explains_it_alone(
    begin: float, end: float, changes: dict[str, Any], is_excused: bool
) -> None:
    exchange = SCORED._replace(begin=begin, end=end, as_expected=False, **changes)
    assert ("errors" not in failed(recording_of(exchange))) is is_excused


def test_a_request_without_a_record_is_found() -> None:
    recording = recording_of()
    recording.num_begun += 1
    assert failed(recording) == ["endings"]


def test_a_server_that_refuses_everything_fails() -> None:
    refused = SCORED._replace(status=429, code="queue_full", as_expected=False)
    assert failed(recording_of(refused)) == ["service"]
    assert failed(recording_of(*[SCORED] * 9, refused._replace(kind="pin"))) == ["service"]


def test_a_fault_that_ends_otherwise_fails() -> None:
    recording = recording_of()
    recording.disruptions.append(replace(KILLED, failure="expected exit status 70, got still running"))
    assert failed(recording) == ["faults"]


@pytest.mark.parametrize(
    ("field", "step", "verdict"),
    [("rss", 8 * MIB, "memory"), ("files", 1, "open files"), ("threads", 1, "threads")],
)
def test_a_leak_is_found(field: str, step: int, verdict: str) -> None:
    samples = [idle(float(time)) for time in range(20)]
    samples = [each._replace(**{field: getattr(each, field) + int(each.time) * step}) for each in samples]
    assert failed(recording_of(samples=samples)) == [verdict]


def test_growth_is_that_of_tenths_not_of_single_samples() -> None:
    assert grown_by([*[100.0] * 30, *[100.0] * 29, 10_000.0]) == 0
    assert grown_by([0.0, 5.0]) == 5
    once = [idle(float(time), rss=(300 + 2 * MAX_RSS_GROWTH // MIB * (time == 5)) * MIB) for time in range(10)]
    assert failed(recording_of(samples=once)) == []


@pytest.mark.parametrize("field", ["used_blocks", "pinned_blocks", "requests"])
def test_what_an_idle_server_still_holds_is_found(field: str) -> None:
    samples = [idle(float(time), **{field: int(time == 7)}) for time in range(10)]
    assert failed(recording_of(samples=samples)) == ["left behind"]


class TestCases:
    CASE = Case("score", "/v1/score", {"items": [[1], [2]]}, "items", expected=(([0.5], None), ([0.25], None)))
    RANKED = Case("rerank", "/rerank", {"texts": ["a", "b", "c"], "top_n": 2}, "texts", True, (0.1, 0.3, 0.3))

    def test_one_other_bit_is_a_problem(self) -> None:
        assert self.CASE.problem({"scores": [[0.5], [0.25]]}) == ""
        assert self.CASE.problem({"scores": [[0.5], [0.25 + 2**-54]]}).startswith("item 1: expected")
        assert self.CASE.problem({"scores": [[0.5]]}).startswith("expected items [0, 1]")
        assert self.CASE.problem({"scores": [[0.5], None]}) != ""

    def test_a_ranking_has_its_order_and_its_length(self) -> None:
        right = [{"index": 1, "score": 0.3}, {"index": 2, "score": 0.3}]
        assert self.RANKED.problem(right) == ""
        assert self.RANKED.problem(right[::-1]) != ""
        assert self.RANKED.problem(right[:1]) != ""

    def test_the_reference_asks_for_each_item_alone(self) -> None:
        asked = []

        async def ask(path: str, body: dict[str, Any]) -> Any:
            asked.append(body)
            return [{"index": 0, "score": float(len(asked))}]

        (case,) = asyncio.run(with_reference([self.RANKED], ask))
        assert asked == [{"texts": ["a"]}, {"texts": ["b"]}, {"texts": ["c"]}]
        assert case.expected == (1.0, 2.0, 3.0)

    def test_the_pool_is_the_same_for_the_same_seed(self) -> None:
        assert make_cases(3, 6) == make_cases(3, 6) != make_cases(4, 6)

    def test_values_are_found_in_every_dialect(self) -> None:
        assert values_of({"rankings": [{"index": 2, "logit": 1.5}]}) == [(2, 1.5)]
        assert values_of({"results": [{"index": 0, "relevance_score": 0.5}]}) == [(0, 0.5)]
        with pytest.raises(StopIteration):
            values_of({"error": {}})


def test_an_hour_has_every_act_several_times() -> None:
    plan = make_plan(3600, seed=0)
    counts = Counter(name for _, name in plan)
    assert counts.keys() == {*ENDS, *SURVIVED}
    assert min(counts.values()) >= 2
    assert all(at < 3600 * CHURN for at, name in plan if name in ENDS)
    assert plan == make_plan(3600, seed=0) != make_plan(3600, seed=1)


def test_every_fault_that_the_process_does_not_survive_is_an_end() -> None:
    assert {name for name, fault in FAULTS.items() if fault.is_fatal} < set(ENDS)


def test_wrong_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--clients", "0"])
    assert "--clients must be at least 1, got 0" in capsys.readouterr().err


def test_a_short_run_keeps_its_promises_and_can_be_read_again(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """On the fake backend, whose process starts without a framework."""
    recording = describe_run(parse_options([]))
    messages: list[str] = []
    flags = [*FLAGS, "--backend=fake"]
    conductor = Conductor(tmp_path, checkpoint_of("qwen3"), recording, messages.append, flags)
    plan = [(0.5, "raise"), (1.0, "SIGKILL"), (1.5, "wrong shape")]
    asyncio.run(conductor.run(2.5, seed=0, clients=6, pause=0.02, num_mixed=6, plan=plan))
    verdicts = {verdict.name: verdict for verdict in judge(recording)}
    # A process of seconds has too few idle samples, and may not have come to every kind of request.
    judged = [verdicts[name] for name in ("bits", "errors", "answers", "endings", "faults", "left behind")]
    assert [(each.name, each.against) for each in judged if not each.passed] == []
    assert [life.status for life in recording.lives] == [-9, 0]
    recording.write(tmp_path / "recording.json")
    again = Recording.read(tmp_path / "recording.json")
    assert again == recording
    page = report_html(soak_report(again, judge(again)))
    assert "Every score is that of its item alone".lower() in page.lower()
    assert page.count("<svg") == 5
