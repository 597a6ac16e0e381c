"""Parallel work on a CPU: a few threads that each run whole blocks, every operation inside one thread.

PyTorch's own way splits each operation between threads, with a barrier after each. That makes a row's bits depend on
the number of threads, and when another process takes a core, every barrier waits for the scheduler: one layer was seen
to take thirty times longer. Here the blocks are handed to threads and only the end of a phase is waited for, so bits
do not depend on the number of cores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")

_SETTING_THREADS = threading.Lock()  # PyTorch keeps one number for the process


class Workers:
    """`num_threads` threads for the blocks of a forward pass and one that drives it; None: all on the caller's."""

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads or 1
        self._is_abandoned = threading.Event()  # nobody waits for the pass that is running
        self._driving: threading.Thread | None = None
        self._blocks: ThreadPoolExecutor | None = None
        self._driver: ThreadPoolExecutor | None = None
        if num_threads is not None:
            self._blocks = ThreadPoolExecutor(num_threads, "prefixwise-block", initializer=_use_one_thread)
            self._driver = ThreadPoolExecutor(1, "prefixwise-forward", initializer=_use_one_thread)

    def drive(self, function: Callable[[], Result]) -> Result:
        """Run a whole forward pass, itself on one thread too, and wait for it. Ctrl-C ends it after a block."""
        if self._driver is None:
            return _inferring(function)
        future = self._driver.submit(self._start, function)
        try:
            return future.result()
        except BaseException:
            self._is_abandoned.set()
            raise

    def _start(self, function: Callable[[], Result]) -> Result:
        self._driving = threading.current_thread()
        self._is_abandoned.clear()  # here, on the driving thread, the pass before this one is over
        return _inferring(function)

    def run(self, function: Callable[[Task], None], tasks: Sequence[Task]) -> None:
        """Call the function for every task. Returns when all are done; an exception of any is raised here.

        Each thread takes the next task when it is done with one: a hand-over costs as much as a small task.
        """
        if self._blocks is None or len(tasks) == 1:
            for task in tasks:
                function(task)
            return
        waiting = deque(tasks)
        drives = threading.current_thread() is self._driving  # it takes its share; others would split operations
        num_others = min(self.num_threads, len(tasks)) - int(drives)
        others = [self._blocks.submit(_inferring, lambda: self._work(function, waiting)) for _ in range(num_others)]
        try:
            if drives:
                self._work(function, waiting)
        finally:
            _wait_for_all(others)

    def _work(self, function: Callable[[Task], None], waiting: deque[Task]) -> None:
        try:
            while waiting:
                if self._is_abandoned.is_set():
                    raise CancelledError("the caller of this forward pass has gone")
                try:
                    task = waiting.popleft()
                except IndexError:  # another thread has taken the last one
                    return
                function(task)
        except BaseException:
            waiting.clear()  # what is left is not needed any more
            raise

    def close(self) -> None:
        for pool in (self._blocks, self._driver):
            if pool is not None:
                pool.shutdown()


def _wait_for_all(futures: Sequence[Future[None]]) -> None:
    """Until none is running, whatever became of them; then raises what the first one that failed has raised."""
    wait(futures)
    for future in futures:
        future.result()


def _use_one_thread() -> None:
    """For the calling thread alone, which is new."""
    with _SETTING_THREADS:
        of_process = torch.get_num_threads()  # asked first: a thread takes the process's number on first use
        torch.set_num_threads(1)
        # That is also what threads to come would begin with, anybody's: put back from a thread that ends at once.
        put_back = threading.Thread(target=torch.set_num_threads, args=(of_process,))
        put_back.start()
        put_back.join()


def _inferring(function: Callable[[], Result]) -> Result:
    with torch.inference_mode():  # a thread's own setting
        return function()
