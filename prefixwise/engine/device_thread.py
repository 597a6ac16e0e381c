"""The thread that owns the device: one thing after the other, and an answer for whoever asked.

Not an executor of the standard library: those refuse work as soon as the interpreter begins to end, while threads of
the program may still be scoring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class DeviceThread:
    """Starts at once, and ends after `stop`."""

    def __init__(self, name: str = "prefixwise-device") -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Is it this thread that asks?"""
        return threading.current_thread() is self._thread

    def submit(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Future[Result]:
        """Run it after all that was given before."""
        answer: Future[Result] = Future()
        self._work.put((answer, lambda: function(*args, **kwargs)))
        return answer

    def stop(self) -> None:
        """After all that was given before; wait for the end."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            answer, function = work
            try:
                answer.set_result(function())
            except BaseException as error:  # it is the caller's
                answer.set_exception(error)
            del work, answer, function  # nothing of it is kept alive while the next is waited for
