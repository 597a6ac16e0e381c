"""SIGTERM and a terminal that is gone, as an exception: so that what a verb has started is stopped on its way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_ALL = (*_SIGNALS, signal.SIGINT)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """In the block they raise SystemExit with the usual status, once. What is ignored, as by nohup, stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.getsignal(each) for each in _SIGNALS}
    watched = [each for each, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, frame: FrameType | None) -> None:
        for each in watched:  # once is enough: the way out is not to be cut short
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in watched:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in watched:
            signal.signal(each, before[each])


@contextmanager
def undisturbed() -> Iterator[None]:
    """What asks us to end waits until the block is left: for the few lines in which something would be lost.

    A mask would do the same, but a child that is started in the block would inherit it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {each: signal.getsignal(each) for each in _ALL}
    watched = [each for each, handler in before.items() if callable(handler) or handler is signal.SIG_DFL]
    for each in watched:
        signal.signal(each, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for each in watched:
            signal.signal(each, before[each])
        for number in came[:1]:
            signal.raise_signal(number)
