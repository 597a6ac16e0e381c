"""Parallel work on a CPU: a few threads that each run whole tiles, every operation inside one thread.

PyTorch itself splits each operation between threads, with a barrier after each. That makes a row's bits depend on the
number of threads, and when another process takes a core, every barrier waits for the scheduler: one layer was seen to
take thirty times longer. Here threads take whole tiles, and only the end of a phase is a barrier, so bits do not depend
on the number of cores.

On ARM that does not work: GEMMs of one shape wait for each other, and each takes all cores (`gemms_take_all_cores`).
There one thread runs the forward, and PyTorch splits the operations between its GEMMs into halves. Not into more parts:
silu and gelu have other bits at the end of a part that does not fill the processor's vectors.
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

_SETTING_THREADS = threading.Lock()  # PyTorch has one number for the process


class Workers:
    """`num_threads` threads for the tiles of a forward pass and one that drives it; None: the caller's thread.

    With `splits_operations` the driving thread runs all tiles, one after the other, each operation on at most two;
    what is not part of a forward, such as loading, still has as many threads for its tasks.
    """

    def __init__(self, num_threads: int | None, *, splits_operations: bool = False) -> None:
        self.num_threads = 1 if splits_operations else num_threads or 1  # that share the tiles of a forward
        self._num_tasks = num_threads or 1  # of other work, at a time
        self._is_abandoned = threading.Event()  # the caller of the running pass has gone
        self._driving: threading.Thread | None = None
        self._tiles: ThreadPoolExecutor | None = None
        self._driver: ThreadPoolExecutor | None = None
        if num_threads is not None:
            of_driver = min(num_threads, 2) if splits_operations else 1
            self._tiles = ThreadPoolExecutor(num_threads, "prefixwise-tile", _use_threads, (1,))
            self._driver = ThreadPoolExecutor(1, "prefixwise-forward", _use_threads, (of_driver,))

    def drive(self, function: Callable[[], Result]) -> Result:
        """Run a whole forward pass on the driving thread, and wait for it. Ctrl-C ends it after a tile."""
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
        self._is_abandoned.clear()  # on the driving thread the previous pass is over
        return _inferring(function)

    def run(self, function: Callable[[Task], None], tasks: Sequence[Task]) -> None:
        """Call the function for every task. Returns when all are done; raises the first exception of a task.

        Each thread takes the next task when it has finished one: a hand-over costs as much as a small task.
        """
        if self._tiles is None or len(tasks) == 1:
            for task in tasks:
                function(task)
            return
        waiting = deque(tasks)
        drives = threading.current_thread() is self._driving  # it takes tasks too
        num_others = min(self.num_threads if drives else self._num_tasks, len(tasks)) - int(drives)
        others = [self._tiles.submit(_inferring, lambda: self._work(function, waiting)) for _ in range(num_others)]
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
            waiting.clear()  # the remaining tasks are not needed any more
            raise

    def close(self) -> None:
        for pool in (self._tiles, self._driver):
            if pool is not None:
                pool.shutdown()


def _wait_for_all(futures: Sequence[Future[None]]) -> None:
    """Wait until none is running; then raise the exception of the first that failed."""
    wait(futures)
    for future in futures:
        future.result()


def _use_threads(number: int) -> None:
    """Set the threads of PyTorch's operations for the calling thread alone, which is new."""
    with _SETTING_THREADS:
        of_process = torch.get_num_threads()  # read first: a thread takes the process's number on first use
        torch.set_num_threads(number)
        # Later threads of the process would start with it as well: restore theirs from a thread that ends at once.
        restore = threading.Thread(target=torch.set_num_threads, args=(of_process,))
        restore.start()
        restore.join()


def _inferring(function: Callable[[], Result]) -> Result:
    with torch.inference_mode():  # set per thread
        return function()
