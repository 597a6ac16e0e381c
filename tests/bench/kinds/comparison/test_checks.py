from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.kinds.samples import GONE, check, reported, warned

FIRST = "portable_view__rows__0__correctness"
WHERE = "portable_view.rows[0].correctness"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"{FIRST}__max_abs_diff": 0.0201}, f"{WHERE}.pass: expected False (by its differences 0.0201 and 0.01)"),
        ({f"{FIRST}__mean_abs_diff": 0.0101}, f"{WHERE}.pass: expected False (by its differences 0.02 and 0.0101)"),
        ({f"{FIRST}__pass": False}, f"{WHERE}.pass: expected True (by its differences 0.02 and 0.01), got False"),
        ({f"{FIRST}__max_abs_diff": None}, f"{WHERE}.pass: expected False (nothing was compared), got True"),
        ({f"{FIRST}__max_abs_diff": 0.005}, f"{WHERE}.mean_abs_diff: expected at most max_abs_diff, 0.005, got 0.01"),
        ({f"{FIRST}__num_compared": 0}, f"{WHERE}.num_compared: expected at least 1, as there are differences, got 0"),
        (
            {"best_native_view__correctness__max_abs_diff": 1.0},
            "best_native_view.correctness.pass: expected False (by its differences 1 and 0), got True",
        ),
        (
            {"portable_view__rows__1__client_chunk_size": 1},
            "portable_view.rows[1].client_chunk_size: expected a size that no other row has, got 1",
        ),
        (
            {"portable_view__rows__0__jax": {"client_chunk_size": 4}},
            "portable_view.rows[0].jax.client_chunk_size: expected 1 (of the row), got 4",
        ),
        (
            {"portable_view__backend_best__pytorch__winner__client_chunk_size": 2},
            "portable_view.backend_best.pytorch.winner.client_chunk_size: expected 1 (by the rows), got 2",
        ),
        (
            {"portable_view__winner__winner__client_chunk_size": 2},
            "portable_view.winner.winner.client_chunk_size: expected 1 (by the rows), got 2",
        ),
        (
            {"best_native_view__pytorch_selected": None, "best_native_view__winner__winner__backend": "pytorch"},
            "best_native_view.winner.winner.backend: expected jax (by the rows), got pytorch",
        ),
        ({"correctness__thresholds": GONE}, "correctness.thresholds: expected numbers for max_abs_diff and mean_abs_"),
        ({"recommendations__overall": GONE}, "recommendations.overall: expected the field, got nothing"),
    ],
)
def test_what_does_not_follow_is_told_with_its_field(tmp_path: Path, changes: dict[str, object], error: str) -> None:
    assert any(error in each for each in reported(check(tmp_path, "comparison", **changes)))


def test_what_is_odd_is_a_warning(tmp_path: Path) -> None:
    """JAX's scores are not PyTorch's, so JAX has no best row; the file says so, as it should."""
    failed = {f"{FIRST}__max_abs_diff": 0.5, f"{FIRST}__pass": False, f"{FIRST}__detail": "item 3"}
    winner = {"winner": {"backend": "pytorch", "client_chunk_size": 1}, "ratio": None}
    lost = {"portable_view__backend_best__jax": {"winner": None}, "portable_view__winner": winner}
    report = check(tmp_path, "comparison", inputs={}, **failed, **lost)
    assert report.is_valid
    assert warned(report) == [
        f"{WHERE}.pass: expected true, got false: item 3",
        "portable_view.rows[1].pytorch: expected a row of this backend, got None",
        "inputs: expected the matrices that were compared, got nothing",
    ]


def test_a_backend_without_an_eligible_row_has_no_best(tmp_path: Path) -> None:
    nothing = {
        "portable_view__rows__0__jax__success_rate": 0.5,
        "portable_view__rows__0__pytorch__p95_total_e2e_ms": None,
        "portable_view__rows__0__deltas": None,
        "portable_view__backend_best": {"jax": {"winner": None}, "pytorch": {"winner": None}},
        "portable_view__winner": {"winner": None},
    }
    assert check(tmp_path, "comparison", **nothing).is_valid


def test_what_another_tool_does_not_quote_is_not_judged(tmp_path: Path) -> None:
    """Rows without metrics, a winner without a ratio, no deltas, no date."""
    rows = {f"portable_view__rows__0__{name}": {"client_chunk_size": 1} for name in ("jax", "pytorch")}
    less = {
        "portable_view__rows__0__deltas": GONE,
        "portable_view__winner": {"winner": {"backend": "pytorch", "client_chunk_size": 1}},
        "best_native_view__jax_selected": {"client_chunk_size": 1},
        "best_native_view__winner": {"winner": {"backend": "pytorch", "client_chunk_size": 1}},
        "generated_at_utc": GONE,
    }
    report = check(tmp_path, "comparison", **rows, **less)
    assert reported(report) == []


def test_a_tie_is_marked_but_by_the_earlier_system(tmp_path: Path) -> None:
    same = {"throughput_items_sec": 40.0, "p95_total_e2e_ms": 50.0, "success_rate": 1.0, "client_chunk_size": 1}
    unmarked = {"winner": {"backend": "jax", "client_chunk_size": 1}}
    changes = {"best_native_view__pytorch_selected": same, "best_native_view__winner": unmarked}
    assert reported(check(tmp_path, "comparison", **changes)) == []
    claimed = check(tmp_path, "comparison", **{**changes, "best_native_view__winner": {**unmarked, "tie": False}})
    assert reported(claimed) == ["best_native_view.winner.winner.backend: expected tie (by the rows), got jax"]


@pytest.mark.parametrize("winner", [{}, {"eligible_count": 1}, {"backend": "draw"}, None])
@pytest.mark.parametrize("view", ["portable_view", "best_native_view"])
def test_a_view_without_a_winner_is_invalid(tmp_path: Path, view: str, winner: object) -> None:
    assert any(
        each.startswith(f"{view}.winner")
        for each in reported(check(tmp_path, "comparison", **{f"{view}__winner": winner}))
    )
