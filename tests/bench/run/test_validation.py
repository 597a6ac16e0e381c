"""The evaluation against a real server whose model is a formula, and against one that leaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import fake_logits
from prefixwise.bench.client import CallError, ScoreClient
from prefixwise.bench.kinds.evaluation import EndpointEvaluation, mutation_of, performance_of
from prefixwise.bench.options import EvaluationShape
from prefixwise.bench.run.validation import (
    Endpoint,
    Mode,
    TokenChoice,
    TokenSource,
    combine,
    evaluate,
    num_steps,
    reported_vocab_size,
    settle_tokens,
)
from prefixwise.bench.run.workload import WorkloadOptions, make_workload
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError, PrefixwiseError
from tests.bench.evaluations import DELIMITER, isolation, multi_evaluation, serial_evaluation, took
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
        reported = [] if steps is None else steps
        return evaluate(Endpoint(client, mode, "fake-model"), CHOICE, SHAPE, reported.append)


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
        assert len(mutation.mutated_item_ids) == length
        assert mutation.scores[mutation.mutated_index] == pytest.approx(
            formula([*isolation.query_ids, *mutation.mutated_item_ids]), abs=1e-6
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
    found = mutation_of(base, moved, 1, [2])
    assert found.unchanged_item_abs_diffs == [0.25, 0.5]
    assert (found.max_abs_diff_unchanged, found.mean_abs_diff_unchanged) == (0.5, 0.375)


def test_performance_by_hand() -> None:
    found = performance_of(6, [1.0, 3.0, 2.0])  # p95: 2 + 0.9 * (3 - 2)
    assert [found.p50_sec, found.p95_sec] == pytest.approx([2.0, 2.9])
    assert [found.items_per_sec_p50, found.items_per_sec_p95] == pytest.approx([3.0, 6 / 2.9])


SMALL = TokenSource(TokenChoice((0, 1), delimiter=5, vocab_size=10), seed=0)


@pytest.mark.parametrize(
    ("info", "models", "size"),
    [
        ({"model": {"vocab_size": 512}, "vocab_size": 7}, {}, 512),
        ({"model": "a name", "vocab_size": 7}, {}, 7),
        ({}, {"data": [{"id": "m", "vocab_size": 9}]}, 9),
        ({"model": {"vocab_size": True}}, {"data": [{"vocab_size": 0}]}, None),
        ({}, {"data": []}, None),
        ({}, {}, None),
    ],
)
def test_the_vocabulary_size_is_what_the_server_tells(
    info: dict[str, Any], models: dict[str, Any], size: int | None
) -> None:
    assert reported_vocab_size(info, models) == size


def settle(labels: list[int] | None, delimiter: int | None, size: int | None) -> tuple[TokenChoice, list[str]]:
    return settle_tokens(labels, delimiter, size, "a model that is not here")


def test_defaults_stay_where_the_vocabulary_has_them() -> None:
    assert settle(None, None, 151_644) == (TokenChoice((9454, 2753), 151_643, 151_644), [])


def test_a_default_that_the_vocabulary_lacks_is_replaced_and_that_is_said() -> None:
    choice, notes = settle(None, None, 151_643)
    assert choice == TokenChoice((9454, 2753), 151_642, 151_643)
    assert len(notes) == 1
    assert notes[0].endswith("(151643): 151642, its last id")
    choice, notes = settle(None, None, 512)
    assert choice == TokenChoice((0, 1), 511, 512)
    assert "the default label_token_ids [9454, 2753] is not in the vocabulary" in notes[1]


def test_a_model_that_is_here_gives_tokens_of_its_own_as_for_a_workload(checkpoint_of: Callable[[str], Path]) -> None:
    facts = token_facts(str(checkpoint_of("qwen3")))
    choice, _ = settle_tokens(None, None, 512, str(checkpoint_of("qwen3")))
    workload = make_workload(WorkloadOptions(query_tokens=1, num_items=1), facts)
    assert choice == TokenChoice(tuple(workload.label_token_ids), workload.delimiter_token_id, 512)
    # A server under that name with another vocabulary is another model.
    assert settle_tokens(None, None, 500, str(checkpoint_of("qwen3")))[0] == TokenChoice((0, 1), 499, 500)


def test_what_replaces_a_default_is_not_what_was_given() -> None:
    assert settle(None, 1, 512)[0] == TokenChoice((0, 2), 1, 512)
    assert settle([511, 3], None, 512)[0] == TokenChoice((511, 3), 510, 512)


@pytest.mark.parametrize(("labels", "delimiter"), [([3, 512], None), (None, 512), ([-1], 3)])
def test_a_given_id_that_the_vocabulary_lacks_is_an_error(labels: list[int] | None, delimiter: int | None) -> None:
    with pytest.raises(PrefixwiseError, match="must be from 0 to 511 for this server, got"):
        settle(labels, delimiter, 512)


def test_a_vocabulary_must_have_some_tokens() -> None:
    with pytest.raises(PrefixwiseError, match="at least 8 tokens is needed, got 7"):
        settle(None, None, 7)


def test_without_a_size_ids_stay_below_the_largest_that_is_named() -> None:
    choice, notes = settle(None, None, None)
    assert choice == TokenChoice((9454, 2753), 151_643, 151_644)
    assert "ids stay below 151644" in notes[0]
    assert settle([3, 900], 7, None)[0].vocab_size == 901


def test_tokens_are_the_same_for_a_name_and_others_for_another() -> None:
    again = TokenSource(SMALL.choice, seed=0)
    assert SMALL.draw("a", 50) == again.draw("a", 50)
    assert SMALL.draw("a", 50) != SMALL.draw("b", 50)
    assert SMALL.draw("a", 50) != TokenSource(SMALL.choice, seed=1).draw("a", 50)


def test_all_tokens_may_come_but_the_delimiter() -> None:
    assert set(SMALL.draw("many", 500)) == {0, 1, 2, 3, 4, 6, 7, 8, 9}


def test_others_differ_at_every_place_and_are_not_the_delimiter_either() -> None:
    tokens = SMALL.draw("many", 500)
    others = SMALL.other("other", tokens)
    assert all(one != other for one, other in zip(tokens, others, strict=True))
    assert set(others) == {0, 1, 2, 3, 4, 6, 7, 8, 9}


def test_items_have_lengths_of_their_own() -> None:
    assert [len(item) for item in SMALL.isolation_items(20)] == [17, 18, 19, 20, 21, 22, 23, 24]
    assert [len(item) for item in SMALL.isolation_items(1)] == [1, 1, 1, 1, 2, 3, 4, 5]
    assert [len(item) for item in SMALL.items("a", 3, 4)] == [4, 4, 4]


SERIAL = [[0.5, 0.5], [0.5, 0.5]]  # against [[0.5, 0.5], [0.25, 0.75]]: 0, 0, 0.25, 0.25


ALIGNED = [[0.5, 0.5], [0.375, 0.625]]  # 0, 0, 0.125, 0.125


def test_equivalence_is_of_the_query_alone_and_of_the_query_with_the_delimiter() -> None:
    found = combine(multi_evaluation(), serial_evaluation(SERIAL, ALIGNED))
    alone, aligned = found.equivalence, found.equivalence_query_plus_delimiter
    assert aligned is not None
    assert (alone.max_abs_diff, alone.mean_abs_diff, alone.num_compared) == (0.25, 0.125, 4)
    assert (aligned.max_abs_diff, aligned.mean_abs_diff, aligned.num_compared) == (0.125, 0.0625, 4)
    assert (found.model, found.multi_url, found.serial_url) == (
        "a-model",
        "http://multi/v1/score",
        "http://serial/v1/score",
    )


def test_isolation_is_that_of_the_multi_item_server() -> None:
    multi = multi_evaluation(isolation=isolation([[0.5, 0.5], [0.25, 0.75]], same=0.25, changed=0.125))
    serial = serial_evaluation(isolation=isolation(SERIAL, same=0.5, changed=0.5))
    found = combine(multi, serial).isolation
    assert found.same_length_mutation_max_abs_diff == 0.25
    assert found.changed_length_mutation_max_abs_diff == 0.125


def test_speed_ups_are_ratios_of_medians_for_counts_that_both_have() -> None:
    found = combine(multi_evaluation(), serial_evaluation()).performance
    assert list(found) == ["1", "8", "32"]
    assert [each.speedup_vs_serial_p50 for each in found.values()] == [1.0, 3.0, 6.0]
    assert (found["32"].multi_p50_sec, found["32"].serial_p50_sec) == (1.0, 6.0)
    assert found["32"].speedup_vs_serial_p95 == 4.5


@pytest.mark.parametrize(
    ("multi", "serial", "error"),
    [
        ({}, {"model": "another"}, "both evaluations must have the same model, got a-model and another"),
        ({"labels": [4, 9]}, {}, r"the same labels, got \[4, 9\] and \[4, 5\]"),
        ({"delimiter": 9}, {}, f"the same delimiter, got 9 and {DELIMITER}"),
        ({"mode": "serial"}, {}, "expected an evaluation of mode multi, got one of mode serial"),
        ({}, {"semantic_alignment": None}, "the serial evaluation has no semantic_alignment"),
        ({"base": [[0.5, 0.5]]}, {}, "scores must be of one shape"),
        ({"performance": {"8": took(1e-9).model_copy(update={"p50_sec": 0.0})}}, {}, "more than 0 s, got 0.0"),
    ],
)
def test_evaluations_that_do_not_go_together_are_an_error(
    multi: dict[str, Any], serial: dict[str, Any], error: str
) -> None:
    with pytest.raises(ArtifactError, match=error):
        combine(multi_evaluation(**multi), serial_evaluation(**serial))


def test_other_items_are_an_error() -> None:
    other = isolation(SERIAL).model_copy(update={"item_ids": [[1, 2], [4]]})
    with pytest.raises(ArtifactError, match="the same item_ids"):
        combine(multi_evaluation(), serial_evaluation(isolation=other))
