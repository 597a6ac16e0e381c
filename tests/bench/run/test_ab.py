"""Contestants on real servers: run in turns, timed by round, and one that fails or is wrong is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from prefixwise.bench.client import Answer, ScoreClient
from prefixwise.bench.kinds.ab import AbRun
from prefixwise.bench.kinds.score_matrix import CorrectnessThresholds
from prefixwise.bench.run.ab import (
    AbMeasurement,
    AbPlan,
    ComparisonError,
    RunningVariant,
    ServerSetup,
    Variant,
    compare_variants,
    round_orders,
    variants_of,
)
from prefixwise.bench.run.ab import ComparedSetting as Comparison
from tests.bench.load_samples import small_requests
from tests.bench.wrong_server import wrong_server
from tests.server.real_requests import server_stats
from tests.server.server_process import ServerProcess, server_process

THRESHOLDS = CorrectnessThresholds(max_abs_diff=0.02, mean_abs_diff=0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process() as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def variant_run(stack: ExitStack, name: str, url: str, algorithm: str = "auto") -> RunningVariant:
    return RunningVariant(Variant(name, (), {"algorithm": algorithm}), stack.enter_context(ScoreClient(url)), {})


def timed(name: str, rounds: list[list[float]], failure: str | None = None) -> RunningVariant:
    """One that has run: seconds by round."""
    runs = [AbRun(round_index=i, place=0, seconds=seconds) for i, row in enumerate(rounds) for seconds in row]
    return RunningVariant(Variant(name), ScoreClient("http://unused"), {}, runs, [[[0.5, 0.5]]], failure)


def test_runs_are_interleaved_in_rounds(server: ServerProcess, stack: ExitStack) -> None:
    both = [variant_run(stack, name, server.url, name) for name in ("packed", "serial")]
    reported: list[str] = []
    AbMeasurement(both, small_requests(), AbPlan("algorithm", rounds=4, runs_per_round=2, seed=1)).run(reported.append)
    for each in both:
        assert [run.round_index for run in each.runs] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert sorted(run.place for run in each.runs) == [0] * 4 + [1] * 4
    assert all(first.place != other.place for first, other in zip(both[0].runs, both[1].runs, strict=True))
    orders = {0: "packed, serial", 1: "serial, packed"}
    assert reported == [
        "warm-up",
        *(f"round {index + 1}, {orders[both[0].runs[2 * index].place]}" for index in range(4)),
    ]


@pytest.mark.parametrize(("cached", "num_shared", "hits"), [(True, 8, 7 * 300), (False, 1, 0)])
def test_cached_runs_share_a_query_and_cold_ones_do_not(
    server: ServerProcess, stack: ExitStack, cached: bool, num_shared: int, hits: int
) -> None:
    """One request that all score, two of the warm-up, five rounds."""
    own = variant_run(stack, "own", server.url, "prefill_extend")
    before = server_stats(server)["prefix_hit_tokens"]
    maker = small_requests(seed=7 + cached, query_tokens=300)
    AbMeasurement([own], maker, AbPlan("mask", rounds=5, runs_per_round=1, warmup_runs=2, cached=cached)).run(
        lambda title: None
    )
    assert server_stats(server)["prefix_hit_tokens"] - before == hits
    assert len(own.scores) == num_shared
    assert len(own.runs) == 5


def test_a_wrong_answer_is_seen_and_a_failure_too(server: ServerProcess, stack: ExitStack) -> None:
    drifting = stack.enter_context(wrong_server(server.url, "drift"))
    failing = stack.enter_context(wrong_server(server.url, "oom"))
    urls = {"good": server.url, "wrong": drifting, "failing": failing}
    all_three = [variant_run(stack, name, url) for name, url in urls.items()]
    AbMeasurement(all_three, small_requests(), AbPlan("mask", rounds=2, runs_per_round=1)).run(lambda title: None)
    good, wrong, failed = compare_variants(all_three, 2, THRESHOLDS)
    assert (good.status, good.scores_agree) == ("ok", True)
    assert good.scores_vs_first is not None and good.scores_vs_first.max_abs_diff == 0.0
    assert (wrong.status, wrong.scores_agree) == ("ok", False)
    assert wrong.scores_vs_first is not None
    assert wrong.scores_vs_first.max_abs_diff == pytest.approx(0.03)
    assert wrong.scores_vs_first.num_compared == 4 * 2 * 2  # runs, items, labels
    assert wrong.speed_vs_first is not None
    assert (failed.status, failed.median_ms, failed.speed_vs_first, failed.runs) == ("failed", None, None, [])
    assert failed.failure is not None and "CUDA out of memory" in failed.failure


def test_one_that_fails_later_is_left_out_and_the_other_goes_on(server: ServerProcess, stack: ExitStack) -> None:
    mortal = stack.enter_context(server_process())
    both = [variant_run(stack, "immortal", server.url), variant_run(stack, "mortal", mortal.url)]

    def kill_in_time(title: str) -> None:
        if title.startswith("round 2"):
            mortal.process.kill()
            mortal.process.wait()

    AbMeasurement(both, small_requests(), AbPlan("mask", rounds=3, runs_per_round=1)).run(kill_in_time)
    assert [len(each.runs) for each in both] == [3, 1]
    immortal, dead = compare_variants(both, 2, THRESHOLDS)
    assert immortal.failure is None
    assert (dead.status, dead.median_ms, dead.speed_vs_first) == ("failed", None, None)
    assert dead.failure is not None and dead.failure.startswith("http_error")


def test_figures_by_hand() -> None:
    """Rounds of (1, 3) and (4, 4) seconds against 1 s each: medians 2 and 4, so half and a quarter of the speed.

    Time, items/s and ratio are all by the geometric mean of 2 and 4; the median and the p95 of all runs stay apart.
    """
    first, other = timed("first", [[1.0, 1.0], [1.0, 1.0]]), timed("other", [[1.0, 3.0], [4.0, 4.0]])
    metrics = compare_variants([first, other], 10, THRESHOLDS)
    assert (metrics[0].time_ms, metrics[0].median_ms, metrics[0].items_per_sec) == (1000.0, 1000.0, 10.0)
    assert metrics[0].speed_vs_first is not None and metrics[0].speed_vs_first.ratio == 1.0
    assert metrics[1].time_ms == pytest.approx(8**0.5 * 1000)
    assert metrics[1].median_ms == 3500.0
    assert metrics[1].p95_ms == pytest.approx(4000.0)
    assert metrics[1].items_per_sec == pytest.approx(10 / 8**0.5)
    speed = metrics[1].speed_vs_first
    assert speed is not None and speed.low is not None and speed.high is not None
    assert speed.ratio == pytest.approx(8**-0.5)
    assert speed.low < 0.25 and speed.high > 0.5


def test_the_columns_of_a_row_say_the_same(server: ServerProcess, stack: ExitStack) -> None:
    both = [variant_run(stack, name, server.url, name) for name in ("packed", "serial")]
    measurement = AbMeasurement(both, small_requests(), AbPlan("algorithm", rounds=5))
    measurement.run(lambda title: None)
    first, other = measurement.result().variants
    assert len(first.runs) == 5 * 3
    assert first.items_per_sec and other.items_per_sec and first.time_ms and other.time_ms and other.speed_vs_first
    assert other.speed_vs_first.ratio == pytest.approx(first.time_ms / other.time_ms, rel=1e-9)
    assert other.speed_vs_first.ratio == pytest.approx(other.items_per_sec / first.items_per_sec, rel=1e-9)


def test_an_interrupt_leaves_the_rounds_that_all_have_run(server: ServerProcess, stack: ExitStack) -> None:
    """It comes in the third round, when one of two has run."""
    both = [variant_run(stack, name, server.url, name) for name in ("packed", "serial")]
    measurement = AbMeasurement(both, small_requests(), AbPlan("algorithm", rounds=9, runs_per_round=2))

    def interrupt_in_time(title: str) -> None:
        if title.startswith("round 3"):
            which = 0 if title.endswith(", packed") else 1  # who runs last
            both[which].client.close()
            both[which].client.score = interrupted  # type: ignore[method-assign]

    def interrupted(request: object) -> Answer:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measurement.run(interrupt_in_time)
    assert measurement.finished_rounds == 2
    result = measurement.result()
    assert (result.rounds, result.cut_short) == (2, True)
    assert result.notes[0] == "cut short: 2 of 9 rounds were finished"
    assert [[run.round_index for run in each.runs] for each in result.variants] == [[0, 0, 1, 1]] * 2


def test_servers_have_the_clients_key_and_leave_room_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    assert ServerSetup([]).environment() == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    assert ServerSetup([], api_key="secret").environment() == {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "PREFIXWISE_API_KEY": "secret",
    }


def test_without_a_baseline_there_are_no_ratios() -> None:
    first, other = timed("first", [[1.0]], failure="http_error: gone"), timed("other", [[2.0]])
    metrics = compare_variants([first, other], 10, THRESHOLDS)
    assert [each.median_ms for each in metrics] == [None, 2000.0]
    assert [each.speed_vs_first for each in metrics] == [None, None]


def test_masks_have_a_server_each() -> None:
    assert variants_of("mask", None, algorithm="packed") == [
        Variant("dense", ("--multi-item-mask-impl", "dense"), {"algorithm": "packed"}),
        Variant("segment", ("--multi-item-mask-impl", "segment"), {"algorithm": "packed"}),
    ]


def test_the_mask_given_is_the_baseline_of_masks() -> None:
    assert [variant.name for variant in variants_of("mask", None, mask="segment")] == ["segment", "dense"]
    named = variants_of("mask", ["segment", "dense"], mask="segment")
    assert [variant.name for variant in named] == ["segment", "dense"]


def test_a_mask_that_is_not_the_first_variant_is_refused() -> None:
    with pytest.raises(ComparisonError, match="--mask is the baseline of masks: expected dense, the first variant"):
        variants_of("mask", ["dense", "segment"], mask="segment")


def test_algorithms_share_a_server() -> None:
    found = variants_of("algorithm", None, mask="dense")
    assert [variant.request_fields for variant in found] == [
        {"algorithm": "packed"},
        {"algorithm": "prefill_extend"},
        {"algorithm": "serial"},
    ]
    assert {variant.server_flags for variant in found} == {("--multi-item-mask-impl", "dense")}


def test_backends_and_chunk_sizes_have_a_server_each() -> None:
    flags = [variant.server_flags for variant in variants_of("backend", ["torch", "jax"])]
    assert flags == [
        ("--multi-item-mask-impl", "auto", "--backend", "torch"),
        ("--multi-item-mask-impl", "auto", "--backend", "jax"),
    ]
    sizes = variants_of("chunk-size", ["16", "0"], algorithm="prefill_extend")
    assert [variant.server_flags[-2:] for variant in sizes] == [
        ("--multi-item-scoring-chunk-size", "16"),
        ("--multi-item-scoring-chunk-size", "0"),
    ]
    assert sizes[0].request_fields == {"algorithm": "prefill_extend"}


@pytest.mark.parametrize(
    ("compare", "names"),
    [
        ("mask", ["dense"]),
        ("mask", ["dense", "dense"]),
        ("backend", ["jax", "pytorch"]),
        ("chunk-size", ["8", "-1"]),
        ("chunk-size", ["8", ""]),
    ],
)
def test_what_cannot_be_compared_is_refused(compare: Comparison, names: Sequence[str]) -> None:
    with pytest.raises(ComparisonError, match="--variants must be two or more"):
        variants_of(compare, names)


def test_in_three_rounds_each_of_three_has_every_place_once() -> None:
    orders = round_orders(3, 6, seed=5)
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    for block in (orders[:3], orders[3:]):
        assert Counter((who, place) for order in block for place, who in enumerate(order)) == Counter(
            (who, place) for who in range(3) for place in range(3)
        )


def test_the_seed_decides_the_order() -> None:
    assert round_orders(3, 30, seed=1) == round_orders(3, 30, seed=1)
    assert round_orders(3, 30, seed=1) != round_orders(3, 30, seed=2)
    assert len(round_orders(3, 5, seed=1)) == 5
