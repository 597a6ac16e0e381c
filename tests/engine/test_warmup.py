from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import pytest

from itemwise.backends.base import Program
from itemwise.backends.fake import FakeBackend
from itemwise.contract.errors import BackendError
from itemwise.engine.warmup import warm_up
from tests.engine.live import engine_on


class CompilingBackend(FakeBackend):
    """A fake that has two programs, and writes down when they are prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[str] = []
        self.threads: set[str] = set()

    def programs(self, *, max_dense_row_len: int) -> Sequence[Program]:
        return [Program(title, partial(self._prepare, title)) for title in ("one", "two")]

    def _prepare(self, title: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.prepared.append(title)


def test_programs_are_counted_told_and_prepared_before_anything_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    backend, told = CompilingBackend(), []

    def on_program(done: int, total: int, title: str) -> None:
        told.append((done, total, title, len(backend.prepared), len(backend.forwards)))

    with caplog.at_level(logging.INFO, "itemwise"), closing(engine_on(backend)) as engine:
        assert warm_up(engine, on_program) == 2
    assert told == [(0, 2, "one", 0, 0), (1, 2, "two", 1, 0)]
    assert "warm-up: 2 programs to compile" in caplog.messages
    assert len(backend.forwards) == 4, "serial, packed, and both forwards of prefill_extend"


def test_programs_are_prepared_by_the_thread_that_owns_the_device() -> None:
    backend = CompilingBackend()
    with closing(engine_on(backend)) as engine:
        warm_up(engine)
    assert backend.threads == {"itemwise-device"}


@pytest.mark.parametrize("delimiter", [None, 0, 1])
def test_any_delimiter_will_do(delimiter: int | None) -> None:
    backend = FakeBackend()
    with closing(engine_on(backend, delimiter=delimiter)) as engine:
        assert warm_up(engine) == 0
    assert backend.forwards, "a backend without programs is warmed by scoring"


def test_a_closed_engine_is_not_warmed() -> None:
    engine = engine_on(FakeBackend())
    engine.close()
    with pytest.raises(BackendError, match="closed"):
        warm_up(engine)
