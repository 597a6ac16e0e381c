from __future__ import annotations

import pytest

from prefixwise.bench.render.svg import (
    Frame,
    Scale,
    dots,
    legend,
    level,
    linear_ticks,
    log_ticks,
    marker,
    nothing,
    picture,
    place,
    polyline,
    text,
    tick_label,
    x_axis,
    y_axis,
)

FRAME = Frame(width=200, height=100, left=20, right=180, top=10, bottom=80)


def test_a_linear_scale_lies_between_its_ends() -> None:
    scale = Scale(0, 10, 100, 300)
    assert [scale(0), scale(2.5), scale(10)] == [100, 150, 300]


def test_a_scale_may_run_upwards() -> None:
    scale = Scale(0, 200, 80, 10)  # as on a screen, where y grows downwards
    assert [scale(0), scale(100), scale(200)] == [80, 45, 10]


def test_doubling_is_one_step_on_a_log_scale() -> None:
    scale = Scale(1, 16, 0, 100, log=True)
    assert [scale(size) for size in (1, 2, 4, 8, 16)] == [0, 25, 50, 75, 100]


def test_a_log_scale_has_no_zero() -> None:
    assert Scale(1, 16, 80, 10, log=True)(0) == 80


@pytest.mark.parametrize("log", [False, True])
def test_a_scale_of_one_value_puts_it_in_the_middle(log: bool) -> None:
    assert Scale(32, 32, 100, 300, log=log)(32) == 200


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1289, [0, 500, 1000]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (-1.2, 1.4, [-1, 0, 1]),
        (297, 503, [300, 350, 400, 450, 500]),
        (7, 7, [7]),
    ],
)
def test_linear_ticks_are_round_numbers_in_the_range(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (300, 1500, [500, 1000]),
        (1e-7, 0.1, [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1]),
        (1, 1e11, [1, 100, 1e4, 1e6, 1e8, 1e10]),
    ],
)
def test_log_ticks_thin_out_over_many_decades(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == ticks


@pytest.mark.parametrize(
    ("value", "label"),
    [(0, "0"), (0.25, "0.25"), (2, "2"), (1500, "1,500"), (20_000, "20k"), (1e-5, "1e-05"), (-1, "-1")],
)
def test_tick_labels_are_short(value: float, label: str) -> None:
    assert tick_label(value) == label


def test_places_are_rounded_to_a_tenth() -> None:
    assert [place(1 / 3), place(2.0), place(0.04)] == ["0.3", "2", "0"]


def test_the_x_axis_marks_its_ticks_below_the_data() -> None:
    drawn = x_axis(FRAME, Scale(0, 10, 20, 180), [(0, "none"), (5, "half")], "a & b")
    assert 'd="M20 80H180"' in drawn
    assert 'd="M100 80v4"' in drawn  # 5 is in the middle of 20 and 180
    assert '<text class="tick" x="100" y="98" text-anchor="middle">half</text>' in drawn
    assert "a &amp; b" in drawn


def test_the_y_axis_has_a_line_across_for_each_tick() -> None:
    drawn = y_axis(FRAME, Scale(0, 10, 80, 10), [(0, "0"), (10, "10")], "items")
    assert 'd="M20 80H180"' in drawn
    assert 'd="M20 10H180"' in drawn
    assert '<text class="tick" x="13" y="14.5" text-anchor="end">10</text>' in drawn


def test_a_level_has_its_name_above_or_below() -> None:
    scale = Scale(0, 10, 80, 10)
    above, below = (level(FRAME, scale, 10, "limit", "jax", below=each) for each in (False, True))
    assert 'd="M20 10H180"' in above
    assert 'y="5"' in above
    assert 'y="24"' in below


def test_a_line_joins_its_points() -> None:
    assert polyline([(0, 1), (2.55, 3)], "jax") == '<polyline class="line jax" points="0,1 2.5,3"/>'


@pytest.mark.parametrize("points", [[], [(1.0, 2.0)]])
def test_there_is_no_line_through_fewer_than_two_points(points: list[tuple[float, float]]) -> None:
    assert polyline(points, "jax") == ""


def test_markers_differ_in_shape_and_lie_around_their_point() -> None:
    assert '<circle class="mark jax" cx="10" cy="20" r="4.5">' in marker("circle", (10, 20), "jax")
    assert 'x="5.5" y="15.5" width="9" height="9"' in marker("square", (10, 20), "pytorch")
    assert 'd="M5.5 15.5l9.0 9.0M5.5 24.5l9.0 -9.0"' in marker("cross", (10, 20), "failed")


def test_words_are_escaped() -> None:
    assert "<title>5 &lt; 6 &amp; &quot;7&quot;</title>" in marker("circle", (0, 0), "jax", '5 < 6 & "7"')
    assert ">&lt;script&gt;<" in text("0", 0, "<script>", "start")
    made = picture(FRAME, 'a"b', "<t>", "<d>", "")
    assert 'id="a&quot;b-title">&lt;t&gt;</title>' in made
    assert "&lt;d&gt;</desc>" in made


def test_dots_are_one_path() -> None:
    assert dots([(1, 2), (3, 4)], "difference") == '<path class="dots difference" d="M1 2h0M3 4h0"/>'
    assert dots([], "difference") == ""


def test_the_legend_names_its_shapes_from_left_to_right() -> None:
    drawn = legend([("circle", "jax", "JAX"), ("square", "pytorch", "PyTorch")])
    assert 'cx="10"' in drawn
    assert 'x="20" y="18.5" text-anchor="start">JAX<' in drawn
    assert 'x="69.6" y="18.5" text-anchor="start">PyTorch<' in drawn  # 10 + 28 + 3 letters of 7.2, and 10


def test_a_picture_names_its_text_alternatives() -> None:
    made = picture(FRAME, "p95", "Title", "Words", nothing(FRAME, "no data"))
    assert 'viewBox="0 0 200 100" role="img" aria-labelledby="p95-title p95-desc"' in made
    assert '<title id="p95-title">Title</title><desc id="p95-desc">Words</desc>' in made
    assert 'x="100" y="45" text-anchor="middle">no data<' in made
