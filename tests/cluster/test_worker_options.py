from __future__ import annotations

import pytest

from prefixwise.cluster.batch_job import WorkerOptions, parse_count, parse_resources
from prefixwise.contract.errors import BatchError


@pytest.mark.parametrize(("text", "count"), [(None, (None, None)), ("4", (4, 4)), ("1:8", (1, 8))])
def test_a_number_or_a_range_of_workers(text: str | None, count: tuple[int | None, int | None]) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "3:2", "1:", ":2", "1:x", "1.5"])
def test_other_counts_are_refused(text: str) -> None:
    with pytest.raises(BatchError, match="workers must be a number like 4"):
        parse_count(text)


def test_resources_have_names_and_amounts() -> None:
    assert parse_resources(["TPU=4", "disk=0.5"]) == {"TPU": 4.0, "disk": 0.5}
    for text in ("TPU", "=4", "TPU=x", "TPU=0", "TPU=-1", "TPU=inf", "TPU=nan"):
        with pytest.raises(BatchError, match="must be like TPU=4"):
            parse_resources([text])


def test_as_many_workers_as_fit_and_no_more_than_parts() -> None:
    cluster = [{"CPU": 16.0, "GPU": 3.0, "memory": 1e9}]
    assert WorkerOptions("auto").pool(cluster, 100) == (1, 16)
    assert WorkerOptions("auto").pool(cluster, 5) == (1, 5)
    assert WorkerOptions("auto", num_gpus=1.0).pool(cluster, 100) == (1, 3)
    assert WorkerOptions("auto", num_cpus=8.0, num_gpus=1.0).pool(cluster, 100) == (1, 2)
    assert WorkerOptions("auto", num_cpus=0).pool(cluster, 100) == (1, 1)


def test_the_range_that_was_asked_for_holds() -> None:
    assert WorkerOptions("auto", 2, 40).pool([{"CPU": 16.0}], 100) == (2, 40)  # the cluster may grow
    assert WorkerOptions("auto", 8, 8).pool([{"CPU": 16.0}], 3) == (3, 3)


def test_a_worker_that_fits_nowhere_is_said() -> None:
    with pytest.raises(BatchError, match="a worker needs 1 GPU, and no node has that: they have 16 CPU"):
        WorkerOptions("auto", num_gpus=1.0).pool([{"CPU": 16.0, "node:10.0.0.1": 1.0}, {"node:10.0.0.2": 1.0}], 1)


def test_a_worker_is_on_one_node() -> None:
    nodes = [{"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 1.0}]
    assert WorkerOptions("auto", num_cpus=2.0).pool(nodes, 100) == (1, 2)
    with pytest.raises(BatchError, match="a worker needs 4 CPU, and no node has that: they have 1 CPU; 3 CPU"):
        WorkerOptions("auto", num_cpus=4.0).pool(nodes, 100)
