"""The evaluation against a real server whose model is a formula, and against one that leaks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from prefixwise.backends.fake import fake_logits
from prefixwise.bench.artifacts import EndpointEvaluation
from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.validation.evaluation import Endpoint, Mode, evaluate, mutation_of, num_steps, performance_of
from prefixwise.bench.validation.inputs import TokenChoice
from prefixwise.bench.validation.options import EvaluationShape
from tests.bench.wrong_server import wrong_server
from tests.server.server_process import server_process

CHOICE = TokenChoice(labels=(3, 5), delimiter=511, vocab_size=512)
SHAPE = EvaluationShape(item_counts=(1, 2), timed_runs=3, warmup_runs=1, query_tokens=16, item_tokens=5)


@pytest.fixture(scope="module")
def good() -> Iterator[str]:
    with server_process() as running:
        yield running.url


def run(url: str, mode: Mode, steps: list[str] | None = None) -> EndpointEvaluation:
    with ScoreClient(url, timeout_sec=30.0) as client:
        told = [] if steps is None else steps
        return evaluate(Endpoint(client, mode, "fake-model"), CHOICE, SHAPE, told.append)


def formula(context: Sequence[int]) -> list[float]:
    logits = fake_logits(np.array(context, np.int32), np.array(CHOICE.labels, np.int32)).astype(float)
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("mode", ["multi", "serial"])
def test_scores_are_those_of_query_and_item(good: str, mode: Mode) -> None:
    found = run(good, mode)
    isolation = found.isolation
    assert (len(isolation.query_ids), [len(item) for item in isolation.item_ids]) == (16, [2, 3, 4, 5, 6, 7, 8, 9])
    expected = [formula([*isolation.query_ids, *item]) for item in isolation.item_ids]
    assert np.abs(np.array(isolation.base_scores) - expected).max() < 1e-6
    assert (found.mode, found.url, found.model) == (mode, f"{good}/v1/score", "fake-model")
    assert (found.labels, found.delimiter) == ([3, 5], 511)
    assert found.settings == {
        "item_counts": [1, 2],
        "timed_runs": 3,
        "warmup_runs": 1,
        "query_tokens": 16,
        "item_tokens": 5,
        "seed": 0,
        "vocab_size": 512,
    }


def test_both_modes_ask_about_the_same(good: str) -> None:
    multi, serial = run(good, "multi"), run(good, "serial")
    assert multi.isolation == serial.isolation


def test_one_item_is_changed_in_the_same_length_and_in_another(good: str) -> None:
    isolation = run(good, "multi").isolation
    for mutation, length in ((isolation.same_length_mutation, 5), (isolation.changed_length_mutation, 12)):
        index = mutation.mutated_index
        others = [item for place, item in enumerate(mutation.mutated_item_ids) if place != index]
        assert others == [item for place, item in enumerate(isolation.item_ids) if place != index]
        assert len(mutation.mutated_item_ids[index]) == length
        assert mutation.scores[index] == pytest.approx(
            formula([*isolation.query_ids, *mutation.mutated_item_ids[index]]), abs=1e-6
        )
        assert mutation.unchanged_item_abs_diffs == [0.0] * 7
        assert mutation.max_abs_diff_unchanged == 0.0


def test_a_serial_server_is_asked_about_the_delimiter_too(good: str) -> None:
    steps: list[str] = []
    found = run(good, "serial", steps)
    assert steps == ["isolation", "query + delimiter", "1 items", "2 items"]
    assert len(steps) == num_steps("serial", SHAPE)
    assert found.semantic_alignment is not None
    query = [*found.isolation.query_ids, 511]
    assert found.semantic_alignment.query_plus_delimiter_ids == query
    expected = [formula([*query, *item]) for item in found.isolation.item_ids]
    assert np.abs(np.array(found.semantic_alignment.base_scores_query_plus_delimiter) - expected).max() < 1e-6


def test_a_multi_item_server_is_not(good: str) -> None:
    steps: list[str] = []
    assert run(good, "multi", steps).semantic_alignment is None
    assert steps == ["isolation", "1 items", "2 items"]
    assert len(steps) == num_steps("multi", SHAPE)


def test_a_leak_is_seen_by_who_sends_items_together(good: str) -> None:
    with wrong_server(good, "leak") as leaking:
        multi, serial = run(leaking, "multi").isolation, run(leaking, "serial").isolation
    for mutation in (multi.same_length_mutation, multi.changed_length_mutation):
        assert 0 < mutation.max_abs_diff_unchanged <= 0.03
        assert 0 < mutation.mean_abs_diff_unchanged < mutation.max_abs_diff_unchanged
    assert serial.same_length_mutation.max_abs_diff_unchanged == 0.0


def test_serial_sends_one_item_at_a_time_and_multi_all_of_them(good: str) -> None:
    with wrong_server(good, "error", only_items=8) as no_eight:
        assert len(run(no_eight, "serial").isolation.base_scores) == 8
        with pytest.raises(CallError, match="http_error: HTTP 500"):
            run(no_eight, "multi")


def test_a_serial_run_takes_as_long_as_all_its_calls(good: str) -> None:
    with wrong_server(good, "late", seconds=0.01) as late:
        serial = run(late, "serial").performance
    assert all(seconds >= 0.02 for seconds in serial["2"].latencies_sec)
    assert [len(each.latencies_sec) for each in serial.values()] == [3, 3]


def test_a_mutation_is_judged_by_the_label_that_moved_most() -> None:
    base, moved = [[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]], [[0.75, 0.5], [0.9, 0.1], [0.125, 0.5]]
    found = mutation_of(base, moved, 1, [[1], [2], [3]])
    assert found.unchanged_item_abs_diffs == [0.25, 0.5]
    assert (found.max_abs_diff_unchanged, found.mean_abs_diff_unchanged) == (0.5, 0.375)


def test_performance_by_hand() -> None:
    found = performance_of(6, [1.0, 3.0, 2.0])  # p95: 2 + 0.9 * (3 - 2)
    assert [found.p50_sec, found.p95_sec] == pytest.approx([2.0, 2.9])
    assert [found.items_per_sec_p50, found.items_per_sec_p95] == pytest.approx([3.0, 6 / 2.9])
