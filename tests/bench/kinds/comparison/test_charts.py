from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefixwise.bench.kinds.chunk_size_charts import SizePoint, size_ticks, unbroken
from prefixwise.bench.kinds.comparison.charts import (
    around_median,
    furthest_row,
    guardrail,
    item_chart,
    latency_charts,
    p95_chart,
    size_chart,
    size_points,
    throughput_chart,
)
from prefixwise.bench.kinds.comparison.inputs import ReportInputs, ReportPaths, read_report_inputs
from prefixwise.bench.kinds.comparison.model import Comparison
from prefixwise.bench.render.svg import Scale
from tests.bench.matrix_samples import bad_row, good_row, shifted
from tests.bench.report_samples import SIZES, agreeing_rows, sample_inputs, write_comparison


@pytest.fixture
def inputs(tmp_path: Path) -> ReportInputs:
    return sample_inputs(tmp_path)


@pytest.fixture
def comparison(inputs: ReportInputs) -> Comparison:
    return inputs.comparison


def test_points_tell_what_worked(comparison: Comparison) -> None:
    assert size_points(comparison.portable_view.rows, "jax", "throughput_items_sec") == [
        SizePoint(1, 50.0, True, ""),
        SizePoint(2, 200.0, False, "1 x timeout"),
        SizePoint(6, 300.0, True, ""),
    ]
    assert size_points(comparison.portable_view.rows, "pytorch", "p95_total_e2e_ms")[2] == SizePoint(
        6, None, False, "2 x oom"
    )


def test_no_line_crosses_a_size_that_failed() -> None:
    points = [SizePoint(size, value, True, "") for size, value in ((1, 1.0), (2, None), (4, 2.0), (8, 3.0))]
    assert [[point.size for point in run] for run in unbroken(points)] == [[1], [4, 8]]
    assert unbroken([SizePoint(1, None, False, "")]) == []


def test_the_guardrail_is_of_the_rows_that_may_win(comparison: Comparison) -> None:
    # JAX: only chunk size 1 worked always and has scores to compare, p95 120 ms. PyTorch: 40 ms in chunks of 2.
    assert guardrail(comparison, "jax") == 150.0
    assert guardrail(comparison, "pytorch") == 50.0


def test_the_guardrail_lies_where_its_value_is(comparison: Comparison) -> None:
    svg = p95_chart(comparison).svg
    # From 0.7 x 20 ms at the bottom (260) to 1.4 x 150 ms at the top (56).
    scale = Scale(14.0, 210.0, 260.0, 56.0, log=True)
    assert f'class="level jax" d="M54 {scale(150.0):.1f}H406"' in svg
    assert f'class="level pytorch" d="M54 {scale(50.0):.1f}H406"' in svg


def test_throughput_is_drawn_from_zero(comparison: Comparison) -> None:
    svg = throughput_chart(comparison).svg
    # 300 items/s of at most 315 (5 % above it), over 204 units of height: 260 - 300 / 315 * 204.
    assert 'cx="394" cy="65.7"' in svg
    assert "JAX, chunk size 6: 300.0 items/s" in svg
    assert svg.count('class="mark jax"') == 3  # two points that are filled, and the legend
    assert svg.count('class="mark jax hollow"') == 1


def test_a_size_that_failed_is_marked_and_told(comparison: Comparison) -> None:
    chart = throughput_chart(comparison)
    assert "PyTorch, chunk size 6: failed 2 x oom" in chart.svg
    assert 'class="cross failed pytorch"' in chart.svg
    assert chart.caption.endswith("Crosses: no run worked. Hollow: some runs failed.")


def test_a_description_says_what_one_sees(comparison: Comparison) -> None:
    assert "JAX: highest at chunk size 6, 300.0 items/s. PyTorch: highest at chunk size 2, 150.0" in (
        throughput_chart(comparison).svg
    )
    assert "PyTorch: lowest at chunk size 2, 40.0 ms; guardrail 50.0 ms." in p95_chart(comparison).svg


def test_one_chunk_size_is_one_point_in_the_middle(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, [good_row(4, 60.0)], [good_row(4, 120.0)])
    svg = throughput_chart(read_report_inputs(ReportPaths(path)).comparison).svg
    assert 'cx="230"' in svg  # between 66 and 394
    assert "<polyline" not in svg


def test_a_time_of_zero_is_at_the_foot(tmp_path: Path) -> None:
    path = write_comparison(tmp_path, [good_row(4, 0.0)], [good_row(4, 0.0)])
    assert 'cx="230" cy="' in p95_chart(read_report_inputs(ReportPaths(path)).comparison).svg


def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    rows = [bad_row(size) for size in SIZES]
    inputs = read_report_inputs(ReportPaths(write_comparison(tmp_path, rows, rows)))
    for chart in (throughput_chart(inputs.comparison), p95_chart(inputs.comparison)):
        assert "no chunk size worked" in chart.svg
    assert latency_charts(inputs) == ()
    assert item_chart(inputs) is None
    assert size_chart(inputs.comparison) is None


def test_names_of_sizes_that_are_too_near_are_left_out() -> None:
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 500, 512)
    ticks = size_ticks(sizes, Scale(1, 512, 66, 394, log=True))
    assert [label for _, label in ticks] == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "500"]


def test_single_runs_lie_on_one_axis_and_around_their_median(inputs: ReportInputs) -> None:
    absolute, spread = latency_charts(inputs)
    # JAX's best: two runs of 20 ms in chunks of 6. PyTorch's: two of 40 ms in chunks of 2.
    assert "JAX: 2 runs from 20.0 ms to 20.0 ms, median 20.0 ms, p95 20.0 ms." in absolute.svg
    assert "chunks of 6" in absolute.svg
    # 20 lies 1.2 (6 % of the range) from the left end, of 22.4 in all: 108 + 1.2 / 22.4 * 298.
    assert absolute.svg.count('cx="124"') == 2
    assert "PyTorch, run 2: 0.00 percent" in spread.svg


def test_around_median_is_in_percent() -> None:
    assert around_median({"jax": [90.0, 100.0, 120.0]})["jax"] == pytest.approx([-10.0, 0.0, 20.0])


def test_differences_are_of_the_row_that_differs_most(inputs: ReportInputs) -> None:
    pair = furthest_row(inputs)
    assert pair is not None
    assert pair.where == "chunk size 2"
    assert pair.item_differences() == pytest.approx([0.004] * 6)


def test_a_dot_lies_where_its_difference_is(tmp_path: Path) -> None:
    scores = [list(row) for row in shifted(0.0)]
    scores[5][1] += 0.001
    jax = [good_row(size, 100.0, scores) for size in SIZES]
    chart = item_chart(read_report_inputs(ReportPaths(write_comparison(tmp_path, jax, agreeing_rows(100.0)))))
    assert chart is not None
    path = re.search(r'class="dots difference" d="([^"]*)"', chart.svg)
    assert path is not None
    places = path[1].split("M")[1:]
    # Five are equal and lie on the strip below; 0.001 is the lowest power of ten there is, at the foot of the scale.
    assert [place.split()[1] for place in places] == ["255h0"] * 5 + ["236h0"]
    assert "the largest difference is 0.0010, the mean 1.7e-04; 5 are equal." in chart.caption
    assert "largest at most 0.02" in chart.svg
    assert "mean at most 0.01" in chart.svg


def test_differences_by_size_have_a_mark_for_the_largest_and_the_mean(comparison: Comparison) -> None:
    chart = size_chart(comparison)
    assert chart is not None
    # Sizes 1 and 2 were compared, at the two ends. From 0.001 (236) to 0.1 (56): 0.001 is at the foot,
    # 0.004 is log10(4) = 0.602 of the two decades of 90 units above it.
    assert 'class="mark largest" cx="74" cy="236"' in chart.svg
    assert 'class="mark largest" cx="394" cy="181.8"' in chart.svg
    assert "chunk size 2: mean 0.0040" in chart.svg
    assert "2 chunk sizes: the largest difference is 0.0040, at chunk size 2." in chart.svg
