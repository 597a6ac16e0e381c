from __future__ import annotations

import itertools
from typing import Any

import pytest

from prefixwise.batch import worker
from prefixwise.batch.parts import Row
from prefixwise.batch.requests import RowDefaults
from prefixwise.batch.work_folder import RowResult
from prefixwise.batch.worker import RowScorer
from prefixwise.contract.errors import BatchError, InvalidValueError
from prefixwise.contract.parse import parse_rerank_request, parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.reranker import Reranker
from prefixwise.forward.backend import PROBE
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.launch.options import EngineOptions
from tests.batch.inputs import rows
from tests.cli.fake_program import fake_engine

LABELS = {"labels": ["y", "z"]}
DEFAULTS = RowDefaults(LABELS)


def results_of(
    engine: ScoringEngine, bodies: list[dict[str, Any]], defaults: RowDefaults = DEFAULTS
) -> list[RowResult]:
    return RowScorer(engine, defaults).score([Row(number + 1, body) for number, body in enumerate(bodies)])


def test_every_row_has_the_scores_that_it_has_alone(engine: ScoringEngine) -> None:
    results = results_of(engine, rows(150))
    assert [result.line for result in results] == list(range(1, 151))
    for body, result in zip(rows(150), results, strict=True):
        alone = engine.score(parse_score_request({**body, **LABELS}))
        assert result.to_json() == {"line": result.line, "id": body["id"], "scores": alone.scores}


def test_documents_are_reranked(engine: ScoringEngine) -> None:
    body = {"query": "q", "documents": ["one", "two", "three"]}
    (result,) = results_of(engine, [body])
    alone = Reranker(engine).rerank(parse_rerank_request(body))
    assert [each["index"] for each in result.outcome["results"]] == [each.index for each in alone.results]
    assert [each["raw_score"] for each in result.outcome["results"]] == [each.raw_score for each in alone.results]
    assert result.warnings == alone.warnings
    assert result.num_items == 3


def test_unknown_fields_are_warnings_of_the_row(engine: ScoringEngine) -> None:
    good = rows(1)[0]
    plain, noted = results_of(engine, [good, {**good, "note": "mine"}])
    assert (plain.warnings, noted.warnings) == ((), ('the field "note" is unknown and was ignored',))
    assert noted.outcome == plain.outcome


def test_rows_that_fail_do_not_hurt_the_others(engine: ScoringEngine) -> None:
    broken = InvalidValueError("no good", code="broken", param="query")
    scorer = RowScorer(engine, DEFAULTS)
    good = rows(1)[0]
    read = [
        Row(1, good),
        Row(2, broken),
        Row(3, {"id": "x", "query": 5, "items": ["a"]}),  # refused when it is parsed
        Row(4, {"id": "y", "query": "q", "items": ["a" * 500]}),  # refused when it is prepared
        Row(5, {**good, "id": ["not", "a", "key"]}),
        Row(6, good),
    ]
    results = scorer.score(read)
    assert [result.outcome.get("error", {}).get("code") for result in results] == [
        *(None, "broken", "invalid_query_type", "context_too_long", "invalid_id", None)
    ]
    assert [result.id for result in results] == [good["id"], None, "x", "y", None, good["id"]]
    assert results[0].outcome == results[5].outcome
    assert results[1].to_json() == {
        "line": 2,
        "error": {"code": "broken", "message": "no good", "param": "query"},
    }


def test_items_that_fail_are_reported_where_that_is_asked_for(engine: ScoringEngine) -> None:
    body = {"query": "q", "items": ["a", "a" * 500], "on_item_error": "report"}
    (result,) = results_of(engine, [body])
    assert result.outcome["scores"][1] is None
    assert [error["index"] for error in result.outcome["item_errors"]] == [1]
    assert result.num_items == 1


def test_items_that_were_cut_are_named(engine: ScoringEngine) -> None:
    (result,) = results_of(engine, [{"query": "q", "items": ["abcdef ghi", "a"], "max_tokens_per_item": 1}])
    assert result.outcome["truncated"][0]["kept_tokens"] == 1


def test_rows_of_one_query_are_submitted_next_to_each_other(
    engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    submit = engine.submit

    def spy(prepared: PreparedRequest, **how: Any) -> Any:
        seen.append(str(prepared.request.query))
        return submit(prepared, **how)

    monkeypatch.setattr(engine, "submit", spy)
    bodies = rows(40)
    results_of(engine, bodies)
    assert len(seen) == 40
    assert len(list(itertools.groupby(seen))) == len({body["query"] for body in bodies})


def test_no_more_rows_than_allowed_are_in_flight(engine: ScoringEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MAX_ROWS_IN_FLIGHT", 3)
    running = most = 0
    submit, finish = engine.submit, engine.finish

    def count_submit(prepared: PreparedRequest, **how: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        return submit(prepared, **how)

    def count_finish(*args: Any) -> Any:
        nonlocal running
        running -= 1
        return finish(*args)

    monkeypatch.setattr(engine, "submit", count_submit)
    monkeypatch.setattr(engine, "finish", count_finish)
    results_of(engine, rows(20))
    assert (running, most) == (0, 3)


def test_a_queue_that_is_full_is_waited_for() -> None:
    engine = fake_engine(EngineOptions(max_queued_tokens=30))
    try:
        results = results_of(engine, rows(60))
    finally:
        engine.close()
    assert not any(result.is_failure for result in results)


def test_results_are_reported_as_they_come(engine: ScoringEngine) -> None:
    told: list[int] = []
    RowScorer(engine, DEFAULTS).score(
        [Row(1, {"query": 5, "items": ["a"]}), Row(2, rows(1)[0])], lambda result: told.append(result.line)
    )
    assert sorted(told) == [1, 2]


@pytest.mark.parametrize(
    ("is_dead", "reason"),
    [(False, "RuntimeError: no such kernel"), (True, "UnavailableError: .* the device has failed")],
)
def test_an_engine_that_fails_ends_the_work(is_dead: bool, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    start = engine.backend.start

    def fail(batch: ForwardBatch) -> RunningForward:
        if batch is PROBE and not is_dead:
            return start(batch)
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine.backend, "start", fail)
    try:
        for _ in range(2):  # the second time, a dead engine takes no row
            with pytest.raises(BatchError, match=rf"the engine failed at the row of line .*: {reason}"):
                results_of(engine, rows(3))
    finally:
        engine.close()
