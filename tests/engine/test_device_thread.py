"""The thread that owns the device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefixwise.engine.device_thread import DeviceThread
from tests.engine.live import SECONDS


@contextmanager
def device_thread() -> Iterator[DeviceThread]:
    device = DeviceThread()
    try:
        yield device
    finally:
        device.stop()


def test_all_runs_in_order_on_one_thread_of_its_own() -> None:
    ran: list[tuple[int, str]] = []
    with device_thread() as device:
        for number in range(100):
            device.submit(lambda number: ran.append((number, threading.current_thread().name)), number)
    assert ran == [(number, "prefixwise-device") for number in range(100)]


def test_arguments_go_in_and_the_answer_comes_back() -> None:
    with device_thread() as device:
        assert device.submit(divmod, 17, 5).result(SECONDS) == (3, 2)
        assert device.submit(int, "ff", base=16).result(SECONDS) == 255


def test_it_knows_itself() -> None:
    with device_thread() as device:
        assert not device.is_current
        assert device.submit(lambda: device.is_current).result(SECONDS)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_fails_is_the_callers_and_the_next_runs(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind("no")

    with device_thread() as device:
        failing, next_one = device.submit(fail), device.submit(abs, -3)
        assert isinstance(failing.exception(SECONDS), kind)
        assert next_one.result(SECONDS) == 3


def test_it_ends_after_all_that_was_given_before() -> None:
    before = set(threading.enumerate())
    device, begin = DeviceThread(), threading.Event()
    ran: list[int] = []
    device.submit(begin.wait, SECONDS)
    for number in range(5):
        device.submit(ran.append, number)
    begin.set()
    device.stop()
    assert ran == [0, 1, 2, 3, 4]
    assert set(threading.enumerate()) <= before


def test_nothing_of_it_is_kept_while_it_waits_for_the_next() -> None:
    """An answer may hold much memory."""

    class Large:
        pass

    with device_thread() as device:
        gone = weakref.ref(device.submit(Large).result(SECONDS))
        device.submit(int).result(SECONDS)
        gc.collect()
        assert gone() is None
