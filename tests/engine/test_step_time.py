"""Steps bounded in time: what attention weighs, how limits follow the cost model, and how soon work stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import CancelledError, DeadlineExceededError
from prefixwise.engine.calibration import CALIBRATION_SECONDS, probe_costs
from prefixwise.engine.scheduler import Scheduler
from prefixwise.engine.step import Step
from prefixwise.engine.step_filler import MAX_SKIPPED
from prefixwise.engine.step_limits import StepBudget, StepLimits
from prefixwise.forward.batch import KV_BLOCK_SIZE
from prefixwise.plan.cost_model import CostModel, MeasuredCosts, Sample, Work, fit, static_costs
from tests.engine.live import ALGORITHMS, MARK, GatedBackend, Ticket, body_of, has, live_engine, query_of
from tests.engine.step_runner import STEP, StepRunner, prefix_of, state_of, tokens_of

COSTS = CostModel(seconds_per_forward=0.05, seconds_per_token=0.001, seconds_per_pair=1e-6)


def weight_of(step: Step, limits: StepLimits) -> float:
    return limits.weight(step.num_tokens, step.num_pairs)


class TestWeights:
    """A token that attends to 1,000 others takes as long as two that attend to none."""

    def test_items_behind_a_long_prefix_are_fewer_in_a_step(self) -> None:
        runner, prefix = StepRunner(pairs_per_token=1000.0), prefix_of(1000)
        first = state_of(prefix, [10])
        runner.finish(first)
        behind, alone = state_of(prefix, [10] * 500), state_of(0, [10] * 500)
        assert tokens_of(runner.run(alone), alone) == 1010, "each weighs 1.005"
        assert tokens_of(runner.run(behind), behind) == 510, "each weighs 2.005"

    def test_the_blocks_of_a_prefix_are_fewer_the_longer_it_is(self) -> None:
        runner, state = StepRunner(2048, pairs_per_token=1000.0), state_of(40 * KV_BLOCK_SIZE, [10])
        num_blocks = [step.num_tokens // KV_BLOCK_SIZE for step in runner.finish(state)]
        assert num_blocks[:3] == [9, 6, 4]
        assert num_blocks == sorted(num_blocks, reverse=True)

    def test_a_step_has_one_block_however_much_it_weighs(self) -> None:
        runner, state = StepRunner(64, pairs_per_token=10.0), state_of(6 * KV_BLOCK_SIZE, [10])
        steps = runner.finish(state)
        assert [step.num_tokens for step in steps[:6]] == [KV_BLOCK_SIZE] * 6

    @settings(max_examples=60, deadline=None)
    @given(
        prefix_lens=st.lists(st.integers(0, 900), min_size=1, max_size=4),
        item_lens=st.lists(st.integers(1, 60), min_size=1, max_size=12),
        pairs_per_token=st.sampled_from([50.0, 1000.0]),
    )
    def test_no_step_weighs_more_than_its_limit_unless_it_is_one_block_or_one_unit(
        self, prefix_lens: list[int], item_lens: list[int], pairs_per_token: float
    ) -> None:
        runner = StepRunner(pairs_per_token=pairs_per_token)
        states = [state_of(length, item_lens) for length in prefix_lens]
        for step in runner.finish(*states):
            num_parts = sum(part.stop - part.first for forward in step.forwards for part in forward.parts)
            # A unit is counted with the average of its request, so one that is longer may weigh a little more.
            assert weight_of(step, runner.limits) <= 1.1 * STEP or num_parts == 1

    def test_the_least_share_goes_before_a_quarter(self) -> None:
        runner = StepRunner(256, least_share=128)
        states = [state_of(0, [8] * 100) for _ in range(3)]
        step = runner.run(*states)
        assert [tokens_of(step, state) for state in states] == [128, 128, 0]


class TestLimits:
    def budget(self, costs: MeasuredCosts) -> StepBudget:
        backend = FakeBackend(step_seconds=0.25, least_step_tokens=64, joins_prefill=True)
        return StepBudget(StepLimits(backend.info.step_tokens), costs, backend.info)

    def test_they_follow_the_cost_model(self) -> None:
        costs = MeasuredCosts(COSTS)
        budget = self.budget(costs)
        assert budget.limits.num_tokens == 192
        assert budget.limits.pairs_per_token == pytest.approx(1000.0)
        for _ in range(20):
            costs.record(Sample(Work(192, 0), 0.06))  # four times as fast
        budget.follow_costs()
        assert costs.model.seconds(Work(192, 0)) == pytest.approx(0.06, rel=0.01)
        assert 800 <= budget.limits.num_tokens <= 1200

    def test_memory_bounds_them_as_well(self) -> None:
        costs = MeasuredCosts(COSTS.scaled(0.1))
        budget = self.budget(costs)
        assert budget.limits.num_tokens == 2048
        assert budget.shrink(2048)
        assert budget.limits.num_tokens == 1024

    def test_the_scheduler_fills_steps_by_them_and_says_so(self) -> None:
        """Also of a request that is alone: whoever comes waits for the step that runs."""
        backend = GatedBackend(step_seconds=0.25, least_step_tokens=64, joins_prefill=True)
        with live_engine(backend) as engine:
            engine.scheduler.costs.model = COSTS
            engine.scheduler._follow_costs()
            stats = engine.scheduler.stats()
            assert (stats.max_step_tokens, stats.seconds_per_forward, stats.seconds_per_token) == (192, 0.05, 0.001)
            ticket = Ticket(engine, body_of([1], [[2, 3, 4, 5]] * 300, algorithm="prefill_extend"))
            assert backend.next_forward().num_tokens == 1 + 47 * 4, "the query, and items with a little attention"
            assert engine.scheduler.admission.turn_tokens == 48
            backend.open()
            ticket.check()

    def test_nothing_is_measured_where_steps_have_no_bound_in_time_and_none_is_launched_ahead(self) -> None:
        with live_engine(GatedBackend(is_open=True)) as engine:
            Ticket(engine, body_of([1], [[2]] * 50)).check()
            assert engine.scheduler.stats().cost_source == "static"

    def test_steps_that_run_correct_the_figures(self) -> None:
        with live_engine(GatedBackend(is_open=True, step_seconds=0.25)) as engine:
            Ticket(engine, body_of([1], [[2]] * 50)).check()
            stats = engine.scheduler.stats()
        assert stats.cost_source == "measured"
        assert stats.seconds_per_token != static_costs(engine.backend.config, "cpu").seconds_per_token


class TestLongSteps:
    """On accelerators: parts of large requests fill a step up to 1,024, whole small ones up to 1,600."""

    def runner(self, **limits: Any) -> StepRunner:
        return StepRunner(1024, whole_tokens=1600, max_tokens=2048, **limits)

    def test_small_ones_are_added_behind_parts_of_a_large_one(self) -> None:
        runner, large = self.runner(), state_of(0, [10] * 500)
        small = [state_of(0, [10] * 20) for _ in range(4)]
        step = runner.run(large, *small)
        assert [tokens_of(step, state) for state in small] == [200, 200, 200, 200]
        assert tokens_of(step, large) == 400, "its share"
        step = runner.run(large, *(state_of(0, [10] * 20) for _ in range(6)))
        assert (tokens_of(step, large), step.num_tokens) == (400, 1600)

    def test_many_small_ones_fill_it_alone(self) -> None:
        small = [state_of(0, [10] * 20) for _ in range(20)]
        step = self.runner().run(*small)
        assert [tokens_of(step, state) for state in small] == [200] * 8 + [0] * 12

    def test_a_large_one_behind_many_small_ones_is_not_forgotten(self) -> None:
        runner, large = self.runner(), state_of(0, [10] * 500)
        small = [state_of(0, [10] * 20) for _ in range(40)]
        assert tokens_of(runner.run(*small, large), large) == 0
        steps = [runner.run(*(state for state in small if not state.is_launched), large) for _ in range(5)]
        assert any(tokens_of(step, large) for step in steps)

    def test_while_all_are_large_a_step_is_as_long_as_one_of_them(self) -> None:
        runner = self.runner(longest_tokens=1800, pairs_per_token=1e9)
        assert runner.limits.stretched(500) is runner.limits, "small ones come: nothing changes"
        runner.limits = runner.limits.stretched(1200)
        first, second = (state_of(0, [10] * 120) for _ in range(2))
        second.line = first.line
        step = runner.run(first, second)
        assert (tokens_of(step, first), tokens_of(step, second)) == (1200, 0), "no share of 1,500 is left"
        assert runner.limits.stretched(10_000).num_tokens == 1800

    @pytest.mark.parametrize(("num_skipped", "is_served"), [(MAX_SKIPPED - 1, True), (MAX_SKIPPED, False)])
    def test_it_is_full_after_so_many_of_one_line_that_do_not_fit(self, num_skipped: int, is_served: bool) -> None:
        """30 tokens are left for the line, which is more than a share."""
        first, behind = state_of(0, [70]), [*(state_of(0, [40]) for _ in range(num_skipped)), state_of(0, [3])]
        for each in behind:
            each.line = behind[0].line
        assert StepRunner(100).run(first, *behind).requests == [first, *behind[-1:] * is_served]

    def test_requests_of_one_line_that_have_begun_leave_each_other_a_share(self) -> None:
        """The oldest has what is left of the line's turn, and the one that has not begun nothing."""
        states = first, begun, last, _ = [state_of(0, [10] * 300) for _ in range(4)]
        first.started = begun.started = 0.0
        begun.line = last.line = first.line
        step = StepRunner(1000).run(*states)
        assert [tokens_of(step, state) for state in states] == [500, 250, 0, 250]

    def test_no_step_has_more_tokens_than_fit_in_memory(self) -> None:
        """However little they weigh."""
        runner = StepRunner(4000, max_tokens=512, longest_tokens=4000)
        for state in (state_of(0, [10] * 300), state_of(10 * KV_BLOCK_SIZE, [10] * 80)):
            assert max(step.num_tokens for step in runner.finish(state)) <= 512

    def test_a_small_request_is_remembered_for_a_while(self) -> None:
        backend = FakeBackend(step_seconds=0.012, bit_equal=False, joins_prefill=True, step_tokens=16_384)
        costs = MeasuredCosts(CostModel(0.0017, 1.44e-6, 0.386e-9))
        budget = StepBudget(StepLimits(backend.info.step_tokens), costs, backend.info)
        short = budget.limits.num_tokens
        assert short < budget.limits.whole_tokens < budget.limits.most_tokens == 16_384
        budget.count_arrival(18_000, 0.0)
        assert budget.limits_at(0.0).num_tokens == 22_500
        budget.count_arrival(500, 0.1)
        budget.count_arrival(18_000, 0.2)
        for now in (0.2, 1.05, 1.95):
            assert budget.limits_at(now).num_tokens == short
            budget.count_arrival(18_000, now)
        assert budget.limits_at(3.0).num_tokens == 22_500
        assert budget.limits_at(10.0).num_tokens == budget.limits.longest_tokens, "nobody has come lately"

    def test_a_lone_large_request_is_one_forward_on_an_accelerator(self) -> None:
        """And several once a small one has come."""
        backend = GatedBackend(
            step_seconds=0.012, bit_equal=False, joins_prefill=True, step_tokens=16_384, num_kv_blocks=64
        )
        with live_engine(backend) as engine:
            engine.scheduler.costs.model = CostModel(0.0017, 1.44e-6, 0.386e-9)
            engine.scheduler._follow_costs()
            items = [[2] * 20] * 600
            alone = Ticket(engine, body_of([1], items, algorithm="prefill_extend"))
            assert backend.next_forward().num_tokens == 12_001
            backend.open()
            alone.check()
            Ticket(engine, body_of([3], [[4]], algorithm="prefill_extend")).check()
            backend.forwards.clear()
            engine.scheduler.costs.model = CostModel(0.0017, 1.44e-6, 0.386e-9)
            engine.scheduler._follow_costs()
            Ticket(engine, body_of([5], items, algorithm="prefill_extend")).check()
            assert max(batch.num_tokens for batch in backend.forwards) < 8000


@dataclass
class Machine:
    """A device that keeps to the cost model, in time that passes when it computes."""

    seconds_per_forward: float
    seconds_per_token: float
    now: float = 1000.0

    def use(self, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
        monkeypatch.setattr("prefixwise.engine.calibration.monotonic", lambda: self.now)
        monkeypatch.setattr("prefixwise.backends.fake.sleep", self._sleep)
        return FakeBackend(
            step_seconds=0.25,
            seconds_per_forward=self.seconds_per_forward,
            seconds_per_token=self.seconds_per_token,
        )

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


class TestCalibration:
    STATIC = CostModel(0.03, 0.0003, 1e-9)

    @pytest.mark.parametrize("speed", [0.01, 1.0])
    def test_the_figures_are_the_machines(self, monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
        backend = Machine(0.02 * speed, 0.001 * speed).use(monkeypatch)
        found = fit(probe_costs(backend, self.STATIC), self.STATIC)
        assert found.seconds_per_forward == pytest.approx(0.02 * speed, rel=0.1)
        assert found.seconds_per_token == pytest.approx(0.001 * speed, rel=0.05)

    def test_only_the_largest_attention_probe_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Here all take the same time per token, and a small one would hide that pairs cost nothing."""
        samples = probe_costs(Machine(0.0002, 1e-6).use(monkeypatch), self.STATIC)
        per_token = [sample.work.num_pairs / sample.work.num_tokens for sample in samples]
        assert sorted(round(pairs) for pairs in per_token) == [16, 16, 16, 16, 2064]
        assert next(s.work.num_tokens for s in samples if s.work.num_pairs > 1e6) == 2048

    def test_a_slow_machine_runs_few_probes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The one that is always run takes 0.8 s here, and computing the block 1.3 s."""
        machine = Machine(0.16, 0.01)
        samples = probe_costs(machine.use(monkeypatch), self.STATIC)
        assert [sample.work.num_tokens for sample in samples] == [64]
        assert machine.now <= 1000.0 + 1.44 + CALIBRATION_SECONDS

    def test_warm_up_ends_with_calibrated_figures(self) -> None:
        scheduler = Scheduler(FakeBackend(step_seconds=0.25))
        try:
            scheduler.calibrate()
            assert scheduler.stats().cost_source == "calibrated"
        finally:
            scheduler.close()

    def test_a_full_cache_makes_room_for_the_probes_block_if_it_can(self) -> None:
        """Here the only block is pinned; of a full cache of idle ones, see `tests/backends/jax/test_warmup.py`."""
        backend = FakeBackend(step_seconds=0.25, num_kv_blocks=1)
        scheduler = Scheduler(backend)
        try:
            assert scheduler.cache.acquire([None], "a pin") is not None
            scheduler.calibrate()
            assert scheduler.stats().cost_source == "calibrated"
            assert not any(batch.cache_segments for batch in backend.forwards)
            assert scheduler.cache.num_used == 1
        finally:
            scheduler.close()


class TestWorkStops:
    """Within a step: however much is left of a request, the device computes no more of it than is in flight."""

    @pytest.mark.parametrize("is_async", [False, True])
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    @pytest.mark.parametrize("way", ["client gone", "deadline", "shutdown"])
    def test_of_a_request_that_is_alone(
        self, monkeypatch: pytest.MonkeyPatch, way: str, algorithm: str, is_async: bool
    ) -> None:
        late = [0.0]
        for module in ("request_state", "live_requests", "scheduler"):
            monkeypatch.setattr(f"prefixwise.engine.{module}.monotonic", lambda: monotonic() + late[0])
        backend = GatedBackend(step_tokens=64, joins_prefill=True, async_scheduling=is_async)
        with live_engine(backend) as engine:
            body = body_of(query_of(9), [[MARK, 4]] * 2000, algorithm=algorithm)
            ticket = Ticket(engine, body, deadline=monotonic() + 1000)
            for _ in range(2 if is_async else 1):
                backend.next_forward()
            num_before = sum(map(has(MARK), backend.forwards))
            stop: dict[str, Callable[[], None]] = {
                "client gone": ticket.state.cancel,
                "deadline": lambda: late.__setitem__(0, 2000.0),
                "shutdown": ticket.state.cancel,  # as the server does it for requests that outlive the drain
            }
            stop[way]()
            backend.open()
            if way == "shutdown":
                engine.close()
            with pytest.raises(DeadlineExceededError if way == "deadline" else CancelledError):
                ticket.result()
            assert sum(map(has(MARK), backend.forwards)) == num_before
            assert num_before == (2 if is_async else 1)
