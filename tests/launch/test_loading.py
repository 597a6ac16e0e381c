from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import Program
from prefixwise.launch.loading import warm_up
from tests.engine.live import engine_on

TITLES = ("one", "two", "three")


class CompilingBackend(FakeBackend):
    """A fake that has three programs, and writes down what happens to them, and on which threads."""

    def __init__(self, compile_one: Callable[[str], None] = lambda title: None) -> None:
        super().__init__()
        self.done: dict[str, list[str]] = {"lower": [], "compile": [], "prepare": []}
        self.threads: dict[str, set[str]] = {step: set() for step in self.done}
        self._compile_one = compile_one

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        return [Program(title, partial(self._lower, title), partial(self._prepare, title)) for title in TITLES]

    def _lower(self, title: str) -> Callable[[], None]:
        self._write_down("lower", title)
        return partial(self._compile, title)

    def _compile(self, title: str) -> None:
        self._compile_one(title)
        self._write_down("compile", title)

    def _prepare(self, title: str) -> None:
        assert len(self.done["compile"]) == len(TITLES), "the device is busy while programs are compiled"
        self._write_down("prepare", title)

    def _write_down(self, step: str, title: str) -> None:
        self.done[step].append(title)
        self.threads[step].add(threading.current_thread().name.split("_")[0])


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_programs_are_counted_reported_and_prepared_before_anything_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    backend, reported = CompilingBackend(), []

    def on_program(done: int, total: int, title: str) -> None:
        reported.append((done, total, title))
        assert set(TITLES[:done]) <= set(backend.done["compile"])
        assert not backend.forwards

    with caplog.at_level(logging.INFO, "prefixwise"), closing(engine_on(backend)) as engine:
        assert warm_up(engine, on_program) == 3
    assert reported == [(0, 3, "one"), (1, 3, "two"), (2, 3, "three")]
    assert backend.done["prepare"] == [*TITLES], "in one order in all processes"
    assert "warm-up: 3 programs to compile" in caplog.messages
    assert len(backend.forwards) == 5, "serial, packed, both forwards of prefill_extend, and one to measure the rate"


def test_only_compiling_leaves_the_thread_that_owns_the_device() -> None:
    backend = CompilingBackend()
    with closing(engine_on(backend)) as engine:
        warm_up(engine)
    device = {"prefixwise-device"}
    assert backend.threads == {"lower": device, "compile": {"prefixwise-compile"}, "prepare": device}


@pytest.mark.usefixtures("two_cores")
def test_programs_are_compiled_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)

    def compile_one(title: str) -> None:
        if title != "three":
            both.wait()

    with closing(engine_on(CompilingBackend(compile_one))) as engine:
        assert warm_up(engine) == 3


@pytest.mark.usefixtures("two_cores")
def test_a_program_that_cannot_be_compiled_is_named() -> None:
    """The first of them, whichever failed first; nothing is run then."""
    failed = threading.Event()

    def compile_one(title: str) -> None:
        if title == "one":
            assert failed.wait(60)
        else:
            failed.set()
        raise ValueError(f"no registers for {title}")

    backend = CompilingBackend(compile_one)
    with closing(engine_on(backend)) as engine:
        with pytest.raises(BackendError, match=r"^cannot compile the program 'one': no registers for one$"):
            warm_up(engine)
        assert not backend.done["prepare"]
        assert not backend.forwards


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


class PrepareOnlyBackend(CompilingBackend):
    """Its programs have nothing to be compiled apart from running them."""

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        return [Program(title, None, partial(self._write_down, "prepare", title)) for title in TITLES]


def test_programs_that_are_only_run_are_reported_as_they_are() -> None:
    backend, reported = PrepareOnlyBackend(), []

    def on_program(done: int, total: int, title: str) -> None:
        reported.append((done, total, title))
        assert backend.done["prepare"] == [*TITLES[:done]]

    with closing(engine_on(backend)) as engine:
        assert warm_up(engine, on_program) == 3
    assert reported == [(0, 3, "one"), (1, 3, "two"), (2, 3, "three")]
    assert backend.done == {"lower": [], "compile": [], "prepare": [*TITLES]}
