"""The comparison of two backends, with metrics worked out by hand: 6 items, so 100 ms are 60 items a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixwise.bench.files import read_artifact, sha256_of, write_artifact
from prefixwise.bench.kinds.base import BackendName, EvaluationView
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.kinds.score_matrix import MatrixRow, ScoreMatrix
from prefixwise.bench.rules import Bounds
from prefixwise.bench.run.comparison import compare, read_inputs
from prefixwise.bench.run.matrix import SweepOptions
from prefixwise.contract.errors import ArtifactError
from tests.bench.matrix_samples import SCORES, bad_row, good_row, shifted, write_matrix

Rows = Sequence[MatrixRow]
JAX: Rows = (good_row(1, 600.0), good_row(2, 200.0), good_row(6, 100.0))
PYTORCH: Rows = (good_row(1, 300.0), good_row(2, 150.0), good_row(6, 120.0))


def write(
    folder: Path, backend: BackendName, rows: Rows, view: EvaluationView = "portable", confirmed: Rows = (), **more: Any
) -> Path:
    options = SweepOptions(backend, view, tuple(row.client_chunk_size for row in rows))
    return write_matrix(folder / f"{backend}_{view}.json", options, rows, confirmed, **more)


def compared(folder: Path, jax: Rows = JAX, pytorch: Rows = PYTORCH, **options: float) -> Comparison:
    """Without best-native files."""
    inputs = read_inputs(write(folder, "jax", jax), write(folder, "pytorch", pytorch), None, None)
    return compare(inputs, Bounds(**options))


class TestPortableView:
    def test_rows_stand_side_by_side_with_deltas(self, tmp_path: Path) -> None:
        rows = compared(tmp_path).portable_view.rows
        assert [row.client_chunk_size for row in rows] == [1, 2, 6]
        first = rows[0]
        assert first.jax is not None and first.pytorch is not None and first.deltas is not None
        assert first.jax["throughput_items_sec"] == pytest.approx(10.0)
        assert first.pytorch["throughput_items_sec"] == pytest.approx(20.0)
        assert "reference_scores" not in first.jax
        assert first.deltas["throughput_items_sec"] == pytest.approx(-10.0)
        assert first.deltas["throughput_items_sec_pct"] == pytest.approx(-50.0)
        assert first.deltas["p95_total_e2e_ms"] == pytest.approx(300.0)
        assert first.deltas["p95_total_e2e_ms_pct"] == pytest.approx(100.0)
        assert first.deltas["items_per_usd"] is None

    def test_the_best_of_each_and_the_better_of_the_two(self, tmp_path: Path) -> None:
        """60 items/s against 50."""
        view = compared(tmp_path).portable_view
        assert [best.place for best in view.backend_best.values()] == [("jax", 6), ("pytorch", 6)]
        assert view.winner.place == ("jax", 6)
        assert view.winner.ratio == pytest.approx(1.2)
        assert view.winner.deltas is not None
        assert view.winner.deltas["throughput_items_sec"] == pytest.approx(10.0)

    def test_the_guardrail_is_that_of_all_rows(self, tmp_path: Path) -> None:
        """JAX's fastest is beyond 1.25 x PyTorch's 45 ms, and its second is still faster than PyTorch."""
        fastest = good_row(6, 50.0).model_copy(update={"p95_total_e2e_ms": 60.0})
        steady = good_row(2, 55.0).model_copy(update={"p95_total_e2e_ms": 45.0})
        comparison = compared(tmp_path, [good_row(2, 52.0), fastest], [steady, good_row(6, 300.0)])
        view = comparison.portable_view
        assert (view.backend_best["jax"].place, view.winner.place) == (("jax", 6), ("jax", 2))
        assert (view.winner.eligible_count, view.winner.guardrail_p95_ms) == (4, 56.25)
        assert view.winner.ratio == pytest.approx(55 / 52)
        assert comparison.recommendations["portable"].startswith(
            "jax: 115.4 items/s in chunks of 2 (p95 52.0 ms), 1.06x"
        )

    def test_a_size_that_only_one_has(self, tmp_path: Path) -> None:
        rows = compared(tmp_path, jax=JAX[:2]).portable_view.rows
        assert rows[2].jax is None
        assert rows[2].deltas is None
        assert (rows[2].correctness.status, rows[2].correctness.detail) == ("missing_scores", "no scores of jax")

    def test_a_row_that_failed_has_no_scores_and_no_deltas(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, pytorch=[PYTORCH[0], bad_row(2), PYTORCH[2]])
        row = comparison.portable_view.rows[1]
        assert row.deltas is not None
        assert row.deltas["throughput_items_sec"] is None
        assert (row.correctness.status, row.correctness.detail) == ("missing_scores", "no scores of pytorch")
        assert comparison.correctness["pass"]  # it says nothing of the scores
        assert comparison.correctness["rows_compared"] == 2

    def test_the_guardrail_holds_between_backends_too(self, tmp_path: Path) -> None:
        """PyTorch's p95 is that of its slow run; JAX is a little slower on average, and steady."""
        steady = good_row(6, 101.0)
        jumpy = good_row(6, 100.0).model_copy(update={"p95_total_e2e_ms": 130.0})
        comparison = compared(tmp_path, [steady], [jumpy])
        winner = comparison.portable_view.winner
        assert winner.backend == "jax"
        assert winner.ratio == pytest.approx(100 / 101)
        assert comparison.recommendations["portable"].endswith(", whose p95 is beyond the guardrail.")
        assert compared(tmp_path, [steady], [jumpy], guardrail_ratio=1.3).portable_view.winner.backend == "pytorch"

    def test_two_that_are_the_same_tie(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, JAX, JAX)
        assert comparison.portable_view.winner.backend == "tie"
        assert comparison.recommendations["portable"] == ("Either: both do 60.0 items/s in chunks of 6 (p95 100.0 ms).")
        assert comparison.recommendations["overall"] == "Either: they are equal in both views."

    def test_equally_fast_is_no_tie_where_one_is_beyond_the_guardrail(self, tmp_path: Path) -> None:
        jumpy = good_row(6, 100.0).model_copy(update={"p95_total_e2e_ms": 253.0})
        for jax, pytorch, winner in ((JAX[2], jumpy, "jax"), (jumpy, JAX[2], "pytorch")):
            comparison = compared(tmp_path, [jax], [pytorch])
            assert comparison.portable_view.winner.backend == winner
            assert comparison.recommendations["portable"].endswith(", whose p95 is beyond the guardrail.")
        assert compared(tmp_path, [JAX[2]], [jumpy], guardrail_ratio=3.0).portable_view.winner.backend == "tie"

    def test_equally_fast_in_smaller_chunks_is_better(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, [good_row(2, 100.0)], [good_row(6, 100.0)], max_abs_diff=1.0)
        assert "guardrail" not in comparison.recommendations["portable"]


class TestCorrectness:
    def test_equal_scores_pass(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path)
        found = comparison.portable_view.rows[0].correctness
        assert (found.status, found.max_abs_diff, found.mean_abs_diff, found.num_compared) == ("ok", 0.0, 0.0, 12)
        assert found.passed
        assert comparison.correctness == {
            "thresholds": {"max_abs_diff": 0.02, "mean_abs_diff": 0.01},
            "rows_compared": 3,
            "rows_passed": 3,
            "pass": True,
        }

    @pytest.mark.parametrize(
        ("scores", "passes"),
        [
            # One of twelve differs: the mean is a twelfth of the largest.
            ([[0.5 + 0.015625, 0.5], *SCORES[1:]], True),
            ([[0.5 + 0.03125, 0.5], *SCORES[1:]], False),  # the largest is too large
            (shifted(0.0078125), True),
            (shifted(0.015625), False),  # all of them together are
        ],
    )
    def test_the_largest_and_the_mean_difference_count(self, tmp_path: Path, scores: Any, passes: bool) -> None:
        comparison = compared(tmp_path, [good_row(6, 100.0, scores)], PYTORCH)
        assert comparison.portable_view.rows[-1].correctness.passed is passes
        assert comparison.correctness["pass"] is passes

    @pytest.mark.parametrize(("difference", "passes"), [(0.25, True), (0.2500001, False)])
    def test_at_the_bound_it_passes_and_over_it_not(self, tmp_path: Path, difference: float, passes: bool) -> None:
        bounds = {"max_abs_diff": 0.25, "mean_abs_diff": 0.25}
        comparison = compared(tmp_path, [good_row(6, 100.0, shifted(difference))], PYTORCH, **bounds)
        assert comparison.correctness["pass"] is passes

    def test_a_row_with_wrong_scores_cannot_win(self, tmp_path: Path) -> None:
        """JAX's fastest is wrong, its second is not: 30 items/s, against PyTorch's 50."""
        comparison = compared(tmp_path, [JAX[0], JAX[1], good_row(6, 100.0, shifted(0.03))])
        view = comparison.portable_view
        assert view.backend_best["jax"].place == ("jax", 2)
        assert view.winner.place == ("pytorch", 6)
        assert view.winner.ratio == pytest.approx(50 / 30)
        assert not comparison.correctness["pass"]
        detail = "max abs diff 0.03 (at most 0.02), mean 0.03 (at most 0.01)"
        assert f"correctness, chunk size 6: {detail}" in comparison.notes
        assert "The correctness gate failed: chunk size 6, best native." in comparison.recommendations["overall"]

    def test_where_all_are_wrong_the_reference_wins_and_the_words_say_why(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, [good_row(6, 100.0, shifted(0.03))])
        assert comparison.portable_view.backend_best["jax"].winner is None
        winner = comparison.portable_view.winner
        assert (winner.backend, winner.ratio, winner.deltas) == ("pytorch", None, None)
        assert (
            "jax cannot be recommended, it fails the correctness gate, max abs diff 0.03"
            in (comparison.recommendations["portable"])
        )

    def test_scores_of_another_shape(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, [good_row(6, 100.0, SCORES[:-1])])
        found = comparison.portable_view.rows[-1].correctness
        assert (found.status, found.passed, found.max_abs_diff) == ("shape_mismatch", False, None)
        assert "got 5 rows of [2] and 6 rows of [2]" in (found.detail or "")
        assert not comparison.correctness["pass"]

    def test_where_nothing_can_be_compared_the_gate_fails(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, [bad_row(1)], [good_row(6, 100.0)])
        assert comparison.correctness["rows_compared"] == 0
        assert not comparison.correctness["pass"]
        assert comparison.portable_view.winner.backend == "pytorch"

    def test_where_nothing_worked_nobody_wins(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path, [bad_row(1)], [bad_row(1)])
        assert comparison.portable_view.winner.backend is comparison.best_native_view.winner.backend is None
        assert comparison.recommendations == {
            "portable": "Neither: no backend has a chunk size that worked in every run.",
            "best_native": "Neither: no backend has a chunk size that worked in every run.",
            "overall": "Neither backend can be recommended.",
        }


class TestBestNativeView:
    def test_each_with_its_own_settings(self, tmp_path: Path) -> None:
        """The confirmed rows decide: JAX 75 items/s in chunks of 6, PyTorch 100 in chunks of 2."""
        inputs = read_inputs(
            write(tmp_path, "jax", JAX),
            write(tmp_path, "pytorch", PYTORCH),
            write(tmp_path, "jax", [JAX[1], good_row(6, 70.0)], "best_native", [JAX[1], good_row(6, 80.0)]),
            write(tmp_path, "pytorch", [good_row(2, 90.0), PYTORCH[2]], "best_native", [good_row(2, 60.0), PYTORCH[2]]),
        )
        comparison = compare(inputs, Bounds())
        view = comparison.best_native_view
        assert view.jax_selected is not None and view.pytorch_selected is not None and view.deltas is not None
        assert (view.jax_selected["client_chunk_size"], view.pytorch_selected["client_chunk_size"]) == (6, 2)
        assert view.correctness.passed
        assert view.winner.backend == "pytorch"
        assert view.winner.ratio == pytest.approx(100 / 75)
        assert view.deltas["throughput_items_sec_pct"] == pytest.approx(-25.0)
        assert comparison.recommendations == {
            "portable": "jax: 60.0 items/s in chunks of 6 (p95 100.0 ms), 1.20x the throughput of pytorch "
            "at 50.0 items/s in chunks of 6 (p95 120.0 ms).",
            "best_native": "pytorch: 100.0 items/s in chunks of 2 (p95 60.0 ms), 1.33x the throughput of jax "
            "at 75.0 items/s in chunks of 6 (p95 80.0 ms).",
            "overall": "pytorch, by the best-native view; the portable view says jax.",
        }
        assert comparison.notes == []

    def test_while_it_is_not_confirmed_the_sweeps_row_counts(self, tmp_path: Path) -> None:
        """Of the sizes to confirm only 2 is there, which is not what is recommended yet."""
        native = write(tmp_path, "jax", [JAX[1], good_row(6, 70.0)], "best_native", [good_row(2, 500.0)])
        inputs = read_inputs(write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH), native, None)
        selected = compare(inputs, Bounds()).best_native_view.jax_selected
        assert selected is not None
        assert (selected["client_chunk_size"], selected["p95_total_e2e_ms"]) == (6, 70.0)

    def test_wrong_scores_cannot_win_here_either(self, tmp_path: Path) -> None:
        inputs = read_inputs(
            write(tmp_path, "jax", JAX),
            write(tmp_path, "pytorch", PYTORCH),
            write(tmp_path, "jax", [good_row(6, 50.0, shifted(0.03))], "best_native"),
            None,
        )
        comparison = compare(inputs, Bounds())
        assert comparison.best_native_view.winner.backend == "pytorch"
        assert comparison.best_native_view.jax_selected is not None
        assert (comparison.correctness["rows_passed"], comparison.correctness["pass"]) == (3, False)

    def test_a_portable_matrix_stands_in_for_one_that_is_left_out(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path)
        assert comparison.best_native_view.winner.backend == "jax"
        assert comparison.recommendations["overall"] == "jax, in both views."
        assert comparison.notes == [
            f"no best-native matrix of {backend} was given: its portable one stands in for it"
            for backend in ("jax", "pytorch")
        ]


class TestInputs:
    def test_they_are_named_with_their_checksums(self, tmp_path: Path) -> None:
        comparison = compared(tmp_path)
        names = {"jax_portable_json", "pytorch_portable_json", "jax_best_native_json", "pytorch_best_native_json"}
        assert comparison.inputs.keys() == comparison.inputs_sha256.keys() == names
        path = tmp_path / "jax_portable.json"
        assert comparison.inputs["jax_portable_json"] == comparison.inputs["jax_best_native_json"] == str(path)
        assert comparison.inputs_sha256["jax_portable_json"] == sha256_of(path)

    def test_another_workload_cannot_be_compared(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH, first_token=11)
        with pytest.raises(ArtifactError, match=r"are of different workloads and cannot be compared: sha256 \w+ \(.*"):
            read_inputs(jax, pytorch, None, None)

    def test_a_best_native_one_of_another_workload_cannot_either(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH)
        native = write(tmp_path, "pytorch", PYTORCH, "best_native", first_token=11)
        with pytest.raises(ArtifactError, match="different workloads"):
            read_inputs(jax, pytorch, None, native)

    def test_without_the_requests_checksum_the_files_counts(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH)
        for path, sha256 in ((jax, "a"), (pytorch, "b")):
            file = read_inputs(jax, pytorch, None, None).files[path.stem].matrix
            ref = file.workload_ref.model_copy(update={"sha256": sha256})
            write_artifact(path, file.model_copy(update={"workload_ref": ref}))
        assert read_inputs(jax, pytorch, None, None)
        matrix = read_inputs(jax, pytorch, None, None).jax_portable.matrix
        ref = matrix.workload_ref.model_copy(update={"request_sha256": None})
        write_artifact(jax, matrix.model_copy(update={"workload_ref": ref}))
        with pytest.raises(ArtifactError, match=r"sha256 a \(.*\) and b "):
            read_inputs(jax, pytorch, None, None)

    def test_the_wrong_backend_is_an_error_and_the_wrong_view_a_note(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH)
        with pytest.raises(ArtifactError, match="expected a matrix of jax, got one of pytorch"):
            read_inputs(pytorch, jax, None, None)
        notes = read_inputs(jax, pytorch, jax, pytorch).notes
        assert "jax_portable.json was measured as portable and is used as best_native" in notes

    def test_another_dtype_or_machine_is_a_note(self, tmp_path: Path) -> None:
        jax = write(tmp_path, "jax", JAX, hardware={"name": "v6e", "device": "tpu", "dtype": "bfloat16"})
        pytorch = write(tmp_path, "pytorch", PYTORCH, hardware={"device": "cuda", "dtype": "float32"})
        notes = read_inputs(jax, pytorch, None, None).notes
        names = ("jax portable (jax_portable.json)", "pytorch portable (pytorch_portable.json)")
        assert notes[2:] == (
            f"dtype differs: bfloat16 for {names[0]}, float32 for {names[1]}",
            f"hardware differs: v6e for {names[0]}, cuda for {names[1]}",
        )

    def test_what_a_server_said_otherwise_than_it_is_called_is_a_note(self, tmp_path: Path) -> None:
        jax = write(tmp_path, "jax", JAX, hardware={"backend": "torch"})
        pytorch = write(tmp_path, "pytorch", PYTORCH, hardware={"backend": "torch"})
        assert "jax portable (jax_portable.json): called jax, but its server said backend = torch" in (
            read_inputs(jax, pytorch, None, None).notes
        )
        matrix = read_artifact(jax, ScoreMatrix)
        said = "declared backend = jax, but the server says backend = torch"
        write_artifact(jax, matrix.model_copy(update={"notes": [said, "JAX portable run"]}))
        about = [note for note in read_inputs(jax, pytorch, None, None).notes if "(jax_portable.json):" in note]
        assert about == [f"jax portable (jax_portable.json): {said}"]

    def test_an_unfinished_sweep_is_a_note(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH)
        matrix = read_inputs(jax, pytorch, None, None).jax_portable.matrix
        write_artifact(jax, matrix.model_copy(update={"complete": False}))
        assert "the sweep of jax portable (jax_portable.json) is not finished" in (
            read_inputs(jax, pytorch, None, None).notes
        )

    def test_a_recommendation_without_its_row_is_an_error(self, tmp_path: Path) -> None:
        jax, pytorch = write(tmp_path, "jax", JAX), write(tmp_path, "pytorch", PYTORCH)
        matrix = read_inputs(jax, pytorch, None, None).jax_portable.matrix
        write_artifact(jax, matrix.model_copy(update={"results": list(JAX[:2])}))
        with pytest.raises(ArtifactError, match="recommends chunk size 6, but has no such row"):
            compare(read_inputs(jax, pytorch, None, None), Bounds())


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    comparison = compared(tmp_path)
    write_artifact(tmp_path / "comparison.json", comparison)
    assert read_artifact(tmp_path / "comparison.json", Comparison) == comparison
    assert '"pass": true' in (tmp_path / "comparison.json").read_text()
