"""The cost model, on numbers that can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import FakeBackend
from prefixwise.forward.backend import STEP_SECONDS, BackendInfo, DeviceKind
from prefixwise.models.config import ExpertsConfig
from prefixwise.plan.cost_model import (
    FASTER_WEIGHT,
    MAX_CHANGE,
    MAX_FIXED_SHARE,
    SLOWER_WEIGHT,
    STATIC_FIGURES,
    CostModel,
    MeasuredCosts,
    Sample,
    SegmentSums,
    Work,
    cached_extend_work,
    extend_work,
    fit,
    packed_work,
    static_costs,
    tokens_of_step,
)

# One layer, D = H = 8, one head, F = 16: q, k, v and o are 64 weights each, the MLP is 3 * 128.
CONFIG = FakeBackend().config
WEIGHTS = 4 * 64 + 3 * 128
COSTS = CostModel(seconds_per_forward=0.05, seconds_per_token=0.001, seconds_per_pair=1e-6)


def segments(*lens: int) -> SegmentSums:
    return SegmentSums.of(np.array(lens, np.int64))


def info(**facts: object) -> BackendInfo:
    base = BackendInfo("fake", "cpu", "cpu", "float32", True, 1, joins_prefill=True, least_step_tokens=256)
    return replace(base, **facts)  # type: ignore[arg-type]


class TestFigures:
    def test_seconds_have_a_part_per_forward_one_per_token_and_one_per_pair(self) -> None:
        assert COSTS.seconds(Work(num_tokens=10, num_pairs=7000, num_forwards=2)) == pytest.approx(0.1 + 0.01 + 0.007)

    @pytest.mark.parametrize("kind", get_args(DeviceKind))
    def test_static_figures_are_bytes_and_operations_over_the_rates_of_the_kind_of_device(
        self, kind: DeviceKind
    ) -> None:
        costs, figures = static_costs(CONFIG, kind), STATIC_FIGURES[kind]
        assert costs.seconds_per_forward == figures.launch_seconds + 2 * WEIGHTS / figures.bytes_per_second
        assert costs.seconds_per_token == pytest.approx(2 * WEIGHTS / figures.flops_per_second)
        assert costs.seconds_per_pair == pytest.approx(4 * 8 / figures.flops_per_second)

    def test_a_forward_reads_all_experts_and_a_token_uses_its_own(self) -> None:
        sparse = replace(CONFIG, experts=ExpertsConfig(num_experts=10, experts_per_token=2, norms_weights=True))
        costs, figures = static_costs(sparse, "gpu"), STATIC_FIGURES["gpu"]
        read = 2 * (4 * 64 + 10 * 3 * 128) / figures.bytes_per_second
        assert costs.seconds_per_forward == pytest.approx(figures.launch_seconds + read, rel=1e-12)
        assert costs.seconds_per_token == pytest.approx(2 * (4 * 64 + 2 * 3 * 128) / figures.flops_per_second)

    def test_on_a_cpu_a_forward_costs_the_same_for_every_model(self) -> None:
        assert static_costs(replace(CONFIG, num_layers=1000), "cpu").seconds_per_forward == 0.03


class TestTokensOfStep:
    def test_without_a_bound_in_time_a_step_has_its_most_tokens(self) -> None:
        assert tokens_of_step(COSTS, info(step_tokens=10_000)) == 10_000

    @pytest.mark.parametrize(
        ("seconds", "num_tokens"),
        [(0.1, 256), (0.31, 256), (0.6, 512), (0.9, 768), (100.0, 2048)],
    )
    def test_as_many_as_its_time_allows_in_whole_multiples_but_never_fewer_than_the_least(
        self, seconds: float, num_tokens: int
    ) -> None:
        assert tokens_of_step(COSTS, info(step_seconds=seconds)) == num_tokens

    def test_a_prefill_of_its_own_takes_its_part_of_the_time(self) -> None:
        assert tokens_of_step(COSTS, info(step_seconds=0.6, least_step_tokens=1, joins_prefill=False)) == 500

    def test_where_there_are_buckets_a_full_step_is_one(self) -> None:
        assert tokens_of_step(COSTS, info(step_seconds=0.6, token_buckets=(256, 400, 640))) == 400

    def test_a_small_token_budget_goes_before_the_least(self) -> None:
        assert tokens_of_step(COSTS, info(step_seconds=0.6, step_tokens=100)) == 100


class TestStepsOfLargeModels:
    """On accelerators the fixed cost of a forward is a small part of a step, however long that takes."""

    def tokens(self, costs: CostModel, kind: DeviceKind = "gpu", **facts: object) -> int:
        facts = {"least_step_tokens": 1, "step_tokens": 16_384, "step_seconds": STEP_SECONDS[kind], **facts}
        return tokens_of_step(costs, info(device_kind=kind, **facts))

    def test_the_least_tokens_with_that_share_where_the_time_allows_fewer(self) -> None:
        costs = CostModel(seconds_per_forward=0.007, seconds_per_token=2e-5, seconds_per_pair=1e-9)
        num_tokens = self.tokens(costs)
        assert costs.seconds_per_forward <= MAX_FIXED_SHARE * costs.seconds(Work(num_tokens, 0))
        assert costs.seconds_per_forward > MAX_FIXED_SHARE * costs.seconds(Work(num_tokens - 1, 0))

    def test_on_a_cpu_the_time_decides(self) -> None:
        assert self.tokens(CostModel(0.24, 0.001, 1e-9), "cpu", least_step_tokens=256) == 256

    def test_the_most_tokens_of_a_step_stay_its_bound(self) -> None:
        """About a mixture of experts: reading them takes as long as 3,000 tokens."""
        assert self.tokens(CostModel(0.0228, 7.55e-6, 2e-9)) == 16_384

    def test_where_there_are_buckets_it_is_one(self) -> None:
        buckets = (256, 1024, 1280, 1536, 1792, 2048)
        assert self.tokens(CostModel(0.0074, 2.31e-5, 2e-9), token_buckets=buckets) == 1792

    def test_the_time_decides_for_a_small_model(self) -> None:
        """Qwen3-0.6B on an H200."""
        assert self.tokens(CostModel(0.0017, 1.44e-6, 3.86e-10)) == 7152


class TestFit:
    @settings(max_examples=100, deadline=None)
    @given(
        forward=st.floats(0.3, 3.0),
        token=st.floats(0.3, 3.0),
        pair=st.floats(0.3, 10.0),
        speed=st.sampled_from([0.01, 1.0, 100.0]),
    )
    def test_it_finds_the_figures_of_a_machine_that_keeps_to_the_model(
        self, forward: float, token: float, pair: float, speed: float
    ) -> None:
        machine = CostModel(speed * 0.05 * forward, speed * 0.001 * token, speed * 1e-6 * pair)
        works = [Work(64, 1000), Work(256, 4000), Work(128, 270_000), Work(1024, 16_000)]
        found = fit([Sample(work, machine.seconds(work)) for work in works], COSTS)
        for work in works:
            assert found.seconds(work) == pytest.approx(machine.seconds(work), rel=0.05)
        assert found.seconds_per_token == pytest.approx(machine.seconds_per_token, rel=0.1)

    def test_one_probe_gives_the_speed_and_the_static_proportions_the_rest(self) -> None:
        found = fit([Sample(Work(64, 0), 7 * COSTS.seconds(Work(64, 0)))], COSTS)
        assert found.seconds(Work(64, 0)) == pytest.approx(7 * COSTS.seconds(Work(64, 0)), rel=0.01)
        assert found.pairs_per_token == pytest.approx(COSTS.pairs_per_token, rel=0.01)

    def test_noise_makes_no_figure_negative(self) -> None:
        found = fit([Sample(Work(64, 0), 1.0), Sample(Work(256, 0), 0.5), Sample(Work(64, 10**6), 0.1)], COSTS)
        assert min(vars(found).values()) > 0


class TestMeasuredCosts:
    WORK = Work(num_tokens=950, num_pairs=0)  # a second, of which a twentieth is the forward's

    def measured(self, *seconds: float, calibrated: bool) -> float:
        """How many times slower tokens are after such steps."""
        costs = MeasuredCosts(COSTS)
        if calibrated:
            costs.calibrate([Sample(self.WORK, 1.0)])
        for each in seconds:
            costs.record(Sample(self.WORK, each))
        return costs.model.seconds_per_token / COSTS.seconds_per_token

    def test_a_slower_step_moves_calibrated_figures_a_little_and_a_faster_one_much(self) -> None:
        assert self.measured(2.0, calibrated=True) == pytest.approx(2 ** (0.95 * SLOWER_WEIGHT), rel=0.01)
        assert self.measured(0.5, calibrated=True) == pytest.approx(0.5 ** (0.95 * FASTER_WEIGHT), rel=0.01)

    def test_a_step_that_waited_for_a_compiler_counts_as_a_slow_one(self) -> None:
        assert self.measured(1e6, calibrated=True) == pytest.approx(self.measured(MAX_CHANGE, calibrated=True))

    def test_the_first_step_moves_static_figures_at_once(self) -> None:
        assert self.measured(3.0, calibrated=False) == pytest.approx(3**0.95)
        assert self.measured(*[3.0] * 5, calibrated=False) == pytest.approx(3.0, rel=0.05)

    def test_tokens_and_pairs_are_corrected_by_their_shares_of_a_step(self) -> None:
        """A machine whose attention is 5 times slower than thought, and steps of two kinds in turns."""
        machine = CostModel(COSTS.seconds_per_forward, COSTS.seconds_per_token, 5 * COSTS.seconds_per_pair)
        costs = MeasuredCosts(COSTS)
        costs.calibrate([Sample(Work(256, 0), COSTS.seconds(Work(256, 0)))])
        for _ in range(200):
            for work in (Work(1000, 10_000), Work(1000, 2_000_000)):
                costs.record(Sample(work, machine.seconds(work)))
        assert costs.model.seconds_per_token == pytest.approx(machine.seconds_per_token, rel=0.05)
        assert costs.model.seconds_per_pair == pytest.approx(machine.seconds_per_pair, rel=0.05)

    def test_a_forward_that_is_mostly_its_fixed_cost_says_nothing_of_tokens(self) -> None:
        costs = MeasuredCosts(COSTS)
        costs.record(Sample(Work(0, 0), 10.0))
        assert costs.model == COSTS

    def test_it_says_where_the_figures_come_from(self) -> None:
        costs = MeasuredCosts(COSTS)
        assert costs.source == "static"
        costs.record(Sample(self.WORK, 1.0))
        assert costs.source == "measured"
        costs.calibrate([Sample(self.WORK, 1.0)])
        assert costs.source == "calibrated"


class TestWork:
    def test_packed_computes_the_prefix_once_per_sequence(self) -> None:
        work = packed_work(100, segments(10, 20), num_sequences=2, step_tokens=115, multiple=1)
        own_pairs = 10 * 10 // 2 + 20 * 20 // 2
        assert work == Work(230, 2 * 100 * 100 // 2 + 100 * 30 + own_pairs, num_forwards=2)

    def test_extend_computes_the_prefix_once(self) -> None:
        work = extend_work(100, segments(10, 20), step_tokens=20, multiple=1)
        assert work == Work(130, 100 * 100 // 2 + 100 * 30 + 50 + 200, num_forwards=5 + 2)

    def test_behind_a_cached_prefix_only_the_items_are_computed(self) -> None:
        work = cached_extend_work(100, segments(10, 20), step_tokens=20, multiple=16)
        assert work == Work(32, 100 * 30 + 50 + 200, num_forwards=2)

    def test_extend_without_a_prefix_has_no_prefill(self) -> None:
        assert extend_work(0, segments(10, 20), step_tokens=30, multiple=1).num_forwards == 1

    def test_a_prefix_that_is_joined_with_its_items_has_no_forward_of_its_own(self) -> None:
        separate = extend_work(100, segments(10, 20), step_tokens=1000, multiple=256)
        joined = extend_work(100, segments(10, 20), step_tokens=1000, multiple=256, joins=True)
        assert joined.num_pairs == separate.num_pairs
        assert (separate.num_forwards, joined.num_forwards) == (2, 1)
        assert (separate.num_tokens, joined.num_tokens) == (2 * 256, 256), "and is padded together with them"
        assert extend_work(100, segments(10, 20), step_tokens=65, multiple=1, joins=True).num_forwards == 2
        assert extend_work(0, segments(10, 20), step_tokens=30, multiple=1, joins=True).num_forwards == 1

    def test_padding_counts(self) -> None:
        assert packed_work(100, segments(10), 1, 1000, multiple=256).num_tokens == 256
        assert extend_work(100, segments(10), 1000, multiple=256).num_tokens == 2 * 256
