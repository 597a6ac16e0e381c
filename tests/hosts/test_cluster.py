"""`prefixwise cluster serve` over three hosts, and clients on a fourth, while cables are pulled and a host dies.

However the network is, every request ends with its scores, 503 or 504; afterwards all are scored again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from prefixwise import Scorer
from tests.cluster.ray_cluster import score_body
from tests.hosts.network import Host, hosts
from tests.hosts.ray_hosts import HTTP_PORT, OK, Clients, living, ray_environment, start_ray, start_serving, wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CUT_SECONDS = 10.0
ENVIRONMENT = ray_environment(step_seconds=0.03)
# A front on every host. A replica on each of the two that have room for both.
SCALE = ("--replicas", "2", "--cpus-per-replica", "2", "--fronts", "3", "--request-timeout", "20")


class Serving(NamedTuple):
    """The hosts of the cluster, and the clients'."""

    members: list[Host]
    client: Host

    @property
    def url(self) -> str:
        """Of the head, whose cable stays: a load balancer would avoid the others."""
        return f"http://{self.members[0].address}:{HTTP_PORT}"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with hosts(4) as made:
        members, client = made[:3], made[3]
        address = start_ray(members, ENVIRONMENT, cpus=(0, 4, 4))
        server = start_serving(members[0], address, ENVIRONMENT, *SCALE)
        running = Serving(members, client)
        wait_for_replicas(running, 2)
        yield running
        assert server.end() == 0


def wait_for_replicas(serving: Serving, number: int) -> None:
    """So many answer."""
    with Clients(serving.client, [serving.url]) as clients:
        wait_until(
            lambda: len({each["replica"] for each in clients.answers[-60:] if each["status"] == OK}) == number,
            f"{number} replicas answer",
        )


def check(clients: Clients) -> None:
    """Every request has ended in one of three ways, and scores are those of one process."""
    others = [each for each in clients.answers if each["status"] not in (OK, 503, 504)]
    assert others == []
    assert all("error" in each["answer"] for each in clients.answers if each["status"] != OK)
    with Scorer(backend="fake") as scorer:
        for each in clients.answers:
            if each["status"] == OK:
                body = score_body(each["query"], each["seed"])
                assert each["answer"]["scores"] == scorer.score(**body).scores


@pytest.mark.parametrize("number", [1, 2])
def test_a_cable_that_is_out_for_ten_seconds(serving: Serving, number: int) -> None:
    host = serving.members[number]
    with Clients(serving.client, [serving.url]) as clients:
        clients.wait_for_scores(20)
        host.cut()
        time.sleep(CUT_SECONDS)
        host.join()
        clients.wait_for_scores(40)
    check(clients)
    assert {each["status"] for each in clients.answers[-20:]} == {OK}
    wait_for_replicas(serving, 2)


def test_delay_and_loss_on_every_cable(serving: Serving) -> None:
    """100 ms and 1 % of the frames that each host sends."""
    with Clients(serving.client, [serving.url]) as clients:
        clients.wait_for_scores(20)
        for host in serving.members:
            host.impair(delay=0.1, loss=0.01)
        before = len(clients.answers)
        clients.wait_for_scores(60)
        slow = clients.answers[before + 4 :]  # those in flight were sent before
        for host in serving.members:
            host.repair()
        clients.wait_for_scores(20)
    check(clients)
    assert all(each["seconds"] > 0.1 for each in slow[:40]), "the delay was there"
    wait_for_replicas(serving, 2)


def test_a_host_that_dies(serving: Serving) -> None:
    """With a replica, a front and a proxy. Nobody is told: Ray notices it by and by."""
    head, _, victim = serving.members
    with Clients(serving.client, [serving.url]) as clients:
        clients.wait_for_scores(20)
        victim.die()
        clients.wait_for_scores(20)
        wait_until(lambda: victim.address not in living(head, ENVIRONMENT), "Ray takes the host to be dead", pause=2.0)
        clients.wait_for_scores(60)
    check(clients)
    assert {each["status"] for each in clients.answers[-20:]} == {OK}
    wait_for_replicas(serving, 2)  # the other host has room for both
