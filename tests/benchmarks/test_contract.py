"""`python -m benchmarks.contract`: its steps are a server's."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from benchmarks.contract import calibrate
from prefixwise.backends.fake import FakeBackend
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.batch import ForwardBatch, RunningForward
from prefixwise.plan.cost_model import Work

COMPILE_SECONDS, FORWARD_SECONDS, TOKEN_SECONDS = 3.0, 1e-3, 1e-5


class CompilingBackend(FakeBackend):
    """It compiles a program for every number of tokens, in time that passes when it works."""

    def __init__(self) -> None:
        super().__init__(step_seconds=0.25)
        self.now = 1000.0
        self.sizes: set[int] = set()

    @property
    def num_compilations(self) -> int:
        return len(self.sizes)

    def start(self, batch: ForwardBatch) -> RunningForward:
        compile_seconds = 0.0 if batch.num_tokens in self.sizes else COMPILE_SECONDS
        self.sizes.add(batch.num_tokens)
        self.now += compile_seconds + FORWARD_SECONDS + TOKEN_SECONDS * batch.num_tokens
        return super().start(batch)


def test_no_figure_has_the_time_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CompilingBackend()
    monkeypatch.setattr("prefixwise.engine.calibration.monotonic", lambda: backend.now)
    scheduler = Scheduler(backend)
    try:
        calibrate(scheduler)
        found = astuple(scheduler.costs.model)
        assert {64, 256, 1024, 2048} <= backend.sizes
        assert 2 * FORWARD_SECONDS < scheduler.costs.model.seconds(Work(256, 0)) < 5 * FORWARD_SECONDS
        scheduler.calibrate()
        assert astuple(scheduler.costs.model) == pytest.approx(found), "there was nothing left to compile"
    finally:
        scheduler.close()
