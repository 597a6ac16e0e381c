"""`python -m benchmarks.auto`: its verdict, and that it measures what `auto` runs."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks.auto import ACCELERATOR_GEOMETRIES, CPU_GEOMETRIES, Geometry, Row, lower_quartile, measure, render
from prefixwise.backends.fake import FakeBackend
from tests.engine.live import engine_on

SECONDS = {"prefill_extend": 0.104, "packed": 0.1}


@pytest.mark.parametrize(("chosen", "is_good"), [("prefill_extend", True), ("packed", True), ("serial", False)])
def test_auto_may_take_five_percent_longer_than_the_best(chosen: str, is_good: bool) -> None:
    row = Row(Geometry(3, 5, 3), chosen, {**SECONDS, "serial": 0.106})
    assert row.is_good is is_good
    assert ("above 1.05" in render(row)) is not is_good


def test_a_row_shows_every_algorithm_that_was_worth_measuring() -> None:
    line = render(Row(Geometry(100, 12, 5, is_again=True), "prefill_extend", SECONDS))
    assert line.split() == ["100+12x5", "again", "104.0", "ms", "100.0", "ms", "-", "prefill_extend", "1.040"]


@pytest.mark.parametrize("is_again", [False, True])
def test_the_runs_of_auto_count_for_what_it_chose(is_again: bool) -> None:
    backend = FakeBackend(vocab_size=200_000, joins_prefill=True)
    engine = engine_on(backend)
    try:
        ticks = count()  # every run takes one, so all algorithms are worth measuring
        row = measure(engine, Geometry(130, 4, 3, is_again=is_again), 3, lambda: float(next(ticks)), count())
    finally:
        engine.close()
    assert row.chosen == "prefill_extend"
    assert row.seconds == {"prefill_extend": 1.0, "packed": 1.0, "serial": 1.0}
    num_cached = sum(bool(batch.cache_segments) for batch in backend.forwards)
    assert num_cached == (1 if is_again else 1 + 2 * 3), "a new query every time, or one that comes again"


def test_no_geometry_finds_the_queries_of_another_cached() -> None:
    backend, ticks, seeds = FakeBackend(vocab_size=200_000, joins_prefill=True), count(), count()
    engine = engine_on(backend)
    try:
        for items in (4, 2):
            measure(engine, Geometry(130, items, 3), 3, lambda: float(next(ticks)), seeds)
    finally:
        engine.close()
    assert sum(bool(batch.cache_segments) for batch in backend.forwards) == 2 * (1 + 2 * 3)


def test_runs_that_other_programs_disturb_do_not_count() -> None:
    assert lower_quartile([0.1, 0.9, 0.11, 0.8, 0.12, 0.7, 0.13]) == 0.11


def test_there_are_ten_geometries_for_every_kind_of_device() -> None:
    for geometries in (CPU_GEOMETRIES, ACCELERATOR_GEOMETRIES):
        assert len({geometry.title for geometry in geometries}) == 10
