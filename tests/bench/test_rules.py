from __future__ import annotations

from collections.abc import Callable

import pytest

from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.kinds.score_matrix import MatrixRow, confirm_sizes, is_eligible, select_winner
from prefixwise.bench.rules import Differences, first_run_penalty, mean, percentile, score_differences


def row(size: int, throughput: float | None, p95: float | None = 100.0, success_rate: float = 1.0) -> MatrixRow:
    return MatrixRow(
        client_chunk_size=size,
        num_chunks=1,
        timed_runs=4,
        successful_runs=int(4 * success_rate),
        success_rate=success_rate,
        status="ok" if success_rate == 1.0 else "partial_failure",
        p50_total_e2e_ms=p95,
        p95_total_e2e_ms=p95,
        mean_total_e2e_ms=p95,
        mean_chunk_call_ms=p95,
        p95_chunk_call_ms=p95,
        throughput_items_sec=throughput,
        first_run_penalty_ratio=1.0,
        failure_reason_counts={},
        usd_per_run=None,
        items_per_usd=None,
        reference_scores=None,
        run_records=[],
    )


def winner_of(*rows: MatrixRow, is_correct: Callable[[MatrixRow], bool] | None = None) -> int | None:
    winner = select_winner(rows, is_correct=is_correct)
    return None if winner is None else winner.client_chunk_size


# Percentiles: place (n - 1) * percent / 100 among the ordered values, linearly between the two nearest.


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 0, 7.0),
        ([7.0], 95, 7.0),
        ([10.0, 20.0], 50, 15.0),
        ([10.0, 20.0], 95, 19.5),
        ([40.0, 10.0, 30.0, 20.0], 50, 25.0),  # place 1.5 of 10 20 30 40
        ([40.0, 10.0, 30.0, 20.0], 25, 17.5),  # place 0.75
        ([10.0, 20.0, 30.0, 40.0, 50.0], 95, 48.0),  # place 3.8
        ([10.0, 20.0, 30.0, 40.0, 50.0], 99, 49.6),  # place 3.96
        ([10.0, 20.0, 30.0, 40.0, 50.0], 0, 10.0),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 100, 50.0),
        ([10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0], 95, 67.0),  # place 5.7
    ],
)
def test_a_percentile_lies_on_the_line_between_its_neighbours(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-12)


def test_a_percentile_leaves_the_values_in_their_order() -> None:
    values = [3.0, 1.0, 2.0]
    percentile(values, 50)
    assert values == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("percent", [-0.1, 100.1])
def test_a_percent_is_from_0_to_100(percent: float) -> None:
    with pytest.raises(ValueError, match=f"from 0 to 100, got {percent}"):
        percentile([1.0], percent)


def test_of_nothing_there_is_neither_percentile_nor_mean() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        percentile([], 50)
    with pytest.raises(ValueError, match="at least one value"):
        mean([])


def test_a_mean_adds_up_without_loss() -> None:
    assert mean([1e16, 1.0, -1e16]) == 1 / 3


# The first run


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([300.0, 100.0, 200.0], 2.0),  # 300 / mean(100, 200)
        ([100.0, 100.0], 1.0),
        ([50.0, 100.0], 0.5),
        ([100.0], None),
        ([], None),
        ([100.0, 0.0], None),
    ],
)
def test_the_first_run_is_held_against_the_mean_of_the_others(totals: list[float], expected: float | None) -> None:
    assert first_run_penalty(totals) == expected


# Which row is recommended


def test_a_row_is_eligible_when_all_runs_succeeded_and_its_figures_exist() -> None:
    assert is_eligible(row(1, 10.0))
    assert not is_eligible(row(1, 10.0, success_rate=0.75))
    assert not is_eligible(row(1, None))
    assert not is_eligible(row(1, 10.0, p95=None))


def test_the_highest_throughput_wins() -> None:
    assert winner_of(row(1, 10.0), row(2, 30.0), row(4, 20.0)) == 2


def test_without_an_eligible_row_there_is_no_winner() -> None:
    assert winner_of() is None
    assert winner_of(row(1, 10.0, success_rate=0.5), row(2, None, None, 0.0)) is None


def test_a_row_that_failed_a_run_cannot_win_and_does_not_set_the_guardrail() -> None:
    # Were 40 ms the best p95, the guardrail would be at 50 ms and neither of the rest within it.
    assert winner_of(row(1, 10.0, 100.0), row(2, 20.0, 120.0), row(4, 99.0, 40.0, 0.75)) == 2


def test_a_p95_at_the_guardrail_is_within_it() -> None:
    assert winner_of(row(1, 10.0, 100.0), row(8, 50.0, 125.0)) == 8  # 1.25 x 100 ms


def test_a_p95_over_the_guardrail_is_not() -> None:
    assert winner_of(row(1, 10.0, 100.0), row(8, 50.0, 125.001)) == 1


def test_the_guardrail_can_be_moved() -> None:
    rows = [row(1, 10.0, 100.0), row(8, 50.0, 150.0)]
    at_bound, below = select_winner(rows, 1.5), select_winner(rows, 1.49)
    assert at_bound is not None and at_bound.client_chunk_size == 8
    assert below is not None and below.client_chunk_size == 1


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)])
def test_on_a_tie_the_smaller_chunk_wins(sizes: tuple[int, int]) -> None:
    assert winner_of(row(1, 10.0), *(row(size, 30.0) for size in sizes)) == 4


def test_a_row_whose_scores_are_wrong_neither_wins_nor_sets_the_guardrail() -> None:
    rows = [row(1, 10.0, 200.0), row(2, 90.0, 40.0), row(4, 20.0, 240.0)]
    assert winner_of(*rows) == 2
    assert winner_of(*rows, is_correct=lambda each: each.client_chunk_size != 2) == 4


# What is measured again


@pytest.mark.parametrize(
    ("winner", "expected"),
    [
        (8, [1, 4, 8, 16]),
        (1, [1, 2]),
        (2, [1, 2, 4]),
        (16, [1, 8, 16]),
    ],
)
def test_confirmed_are_1_the_winner_and_its_neighbours(winner: int, expected: list[int]) -> None:
    rows = [row(size, 99.0 if size == winner else 10.0) for size in (1, 2, 4, 8, 16)]
    assert confirm_sizes(rows, select_winner(rows)) == expected


def test_neighbours_are_among_the_sizes_that_worked() -> None:
    rows = [row(1, 10.0), row(2, 10.0), row(4, 10.0, success_rate=0.5), row(8, 30.0), row(16, None, None, 0.0)]
    assert confirm_sizes(rows, select_winner(rows)) == [1, 2, 8]


def test_1_is_not_confirmed_where_it_did_not_work_or_was_not_measured() -> None:
    failed = [row(1, 10.0, success_rate=0.5), row(2, 10.0), row(4, 30.0), row(8, 20.0)]
    assert confirm_sizes(failed, select_winner(failed)) == [2, 4, 8]
    assert confirm_sizes(failed[1:], select_winner(failed[1:])) == [2, 4, 8]


def test_sizes_in_any_order_are_confirmed_in_theirs() -> None:
    rows = [row(16, 10.0), row(1, 10.0), row(8, 30.0), row(4, 10.0)]
    assert confirm_sizes(rows, select_winner(rows)) == [1, 4, 8, 16]


def test_without_a_winner_nothing_is_confirmed() -> None:
    assert confirm_sizes([row(1, 10.0, success_rate=0.0)], None) == []


# Correctness


def test_differences_are_taken_value_by_value() -> None:
    found = score_differences([[0.5, 0.5], [0.25, 0.75]], [[0.5, 0.25], [0.75, 0.75]])
    assert found == Differences(max_abs_diff=0.5, mean_abs_diff=0.1875, num_compared=4)  # (0 + 1/4 + 1/2 + 0) / 4


@pytest.mark.parametrize(
    ("largest", "average", "passes"),
    [
        (0.0, 0.0, True),
        (0.02, 0.01, True),
        (0.02000001, 0.01, False),
        (0.02, 0.01000001, False),
        (0.5, 0.5, False),
    ],
)
def test_the_gate_is_open_up_to_both_bounds(largest: float, average: float, passes: bool) -> None:
    assert Differences(largest, average, 10).within() is passes


def test_the_bounds_of_the_gate_can_be_moved() -> None:
    found = Differences(0.5, 0.25, 10)
    assert found.within(max_abs=0.5, mean_abs=0.25)
    assert not found.within(max_abs=0.49, mean_abs=0.25)
    assert not found.within(max_abs=0.5, mean_abs=0.24)


@pytest.mark.parametrize(
    ("scores", "reference", "message"),
    [
        ([[0.1, 0.9]], [[0.1, 0.9], [0.1, 0.9]], r"got 1 rows of \[2\] and 2 rows of \[2\]"),
        ([[0.1, 0.9]], [[0.1]], r"got 1 rows of \[2\] and 1 rows of \[1\]"),
        ([], [], "nothing to compare"),
        ([[]], [[]], "nothing to compare"),
    ],
)
def test_tables_of_other_shapes_are_not_compared(scores: Scores, reference: Scores, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_differences(scores, reference)
