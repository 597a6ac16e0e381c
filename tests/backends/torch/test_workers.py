from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from prefixwise.backends.torch.workers import Workers


@pytest.fixture(params=[(None, False), (1, False), (3, False), (3, True)])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    num_threads, splits_operations = request.param
    made = Workers(num_threads, splits_operations=splits_operations)
    yield made
    made.close()


def test_every_task_runs_once(workers: Workers) -> None:
    done: list[int] = []
    workers.drive(lambda: workers.run(done.append, range(100)))
    assert sorted(done) == list(range(100))


def test_the_result_and_the_exception_reach_the_caller(workers: Workers) -> None:
    assert workers.drive(lambda: 7) == 7

    def fail(task: int) -> None:
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 0"):
        workers.drive(lambda: workers.run(fail, range(3)))
    assert workers.drive(lambda: 8) == 8, "the next pass runs as if nothing had been"


def test_nothing_records_gradients(workers: Workers) -> None:
    modes: list[bool] = []
    workers.drive(lambda: workers.run(lambda _: modes.append(torch.is_inference_mode_enabled()), range(4)))
    assert modes == [True] * 4


def test_operations_inside_use_one_thread_and_the_callers_setting_stays() -> None:
    before, workers, seen = torch.get_num_threads(), Workers(2), []
    workers.drive(lambda: workers.run(lambda _: seen.append(torch.get_num_threads()), range(8)))
    workers.close()
    assert set(seen) == {1}
    assert torch.get_num_threads() == before


def test_where_operations_are_split_one_thread_runs_the_tiles_and_all_other_tasks_have_theirs() -> None:
    before, workers, seen = torch.get_num_threads(), Workers(3, splits_operations=True), []

    def look(_: int) -> None:
        time.sleep(0.01)
        seen.append((threading.current_thread().name, torch.get_num_threads()))

    workers.drive(lambda: workers.run(look, range(8)))
    assert workers.num_threads == 1
    ((name, num_threads),) = set(seen)
    assert (name.startswith("prefixwise-forward"), num_threads) == (True, 2)
    seen.clear()
    workers.run(look, range(8))
    workers.close()
    assert len({name for name, _ in seen}) > 1
    assert {number for _, number in seen} == {1}
    assert torch.get_num_threads() == before


def test_threads_that_come_later_find_the_processs_setting() -> None:
    """PyTorch's number of threads is the process's too: a second scorer made on another thread must not get one."""
    before, workers, seen = torch.get_num_threads(), Workers(2), []
    torch.set_num_threads(3)
    try:
        workers.drive(lambda: workers.run(lambda _: time.sleep(0.01), range(8)))
        later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
        workers.close()
    assert seen == [3]


def test_ctrl_c_ends_the_pass_after_a_tile() -> None:
    workers, done = Workers(2), []

    def task(number: int) -> None:
        if number == 10:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        workers.drive(lambda: workers.run(task, range(2000)))
    workers.close()
    assert len(done) < 2000
