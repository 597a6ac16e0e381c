"""Fronts and replicas over simulated time: arrivals, steps, reports of replicas to fronts, failures."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random

from benchmarks.cluster_simulation.device import Device
from benchmarks.cluster_simulation.policies import Policy
from benchmarks.cluster_simulation.replica import Replica
from benchmarks.cluster_simulation.traffic import QueryBlocks, Request, Traffic, make_requests, route_key
from prefixwise.cluster.routing import ReplicaLoad, desired_replicas, estimate_tokens

SAY_SECONDS = 0.5  # between what a replica says of itself; it arrives at the fronts with the next one


Estimate = Callable[[Mapping[str, int], Mapping[str, int]], dict[str, int]]


def _greater(sent: Mapping[str, int], said: Mapping[str, int]) -> dict[str, int]:
    return {name: max(sent.get(name, 0), tokens) for name, tokens in said.items()}


def _own(sent: Mapping[str, int], said: Mapping[str, int]) -> dict[str, int]:
    return {name: sent.get(name, 0) for name in said}


# How a front makes one figure of what it sent and what replicas said: the product's way, and what it is held against.
ESTIMATES: dict[str, Estimate] = {"prefixwise": estimate_tokens, "greater": _greater, "own": _own}


@dataclass(frozen=True)
class Loss:
    """A replica dies, and another one, empty and with another name, takes its place."""

    at: float
    back_after: float = 30.0  # an H200's model was loaded in 20.5 s and warm 8.1 s later


@dataclass(frozen=True)
class Scaling:
    """Replicas by what waits. Serve's delays, rounded: it adds after `up_after` seconds of wanting more."""

    most: int
    target_queued_tokens: int = 100_000
    up_after: float = 10.0
    start_seconds: float = 30.0


@dataclass(frozen=True)
class Setup:
    """A cluster."""

    replicas: int = 8
    fronts: int = 2
    estimate: str = "prefixwise"  # one of ESTIMATES
    device: Device = field(default_factory=Device)
    loss: Loss | None = None
    scaling: Scaling | None = None


class Cluster:
    """Run it once; then `requests`, `replicas` and `sizes` report what happened."""

    def __init__(self, setup: Setup, traffic: Traffic, policy: Policy, seed: int = 0) -> None:
        self.setup = setup
        self.now = 0.0
        self.requests = make_requests(traffic, setup.fronts, seed)
        self.replicas: dict[str, Replica] = {}
        self.sizes: list[tuple[float, int]] = []  # of the autoscaled cluster: when, how many
        self._traffic = traffic
        self._policy = policy
        self._blocks = QueryBlocks(traffic.query_tokens)
        self._sent: list[dict[str, int]] = [{} for _ in range(setup.fronts)]  # tokens by front and replica
        self._said: dict[str, int] = {}  # tokens by replica, as fronts have heard
        self._saying: dict[str, int] = {}  # the same, on its way
        self._busy: set[str] = set()
        self._num_answered = 0
        self._estimate = ESTIMATES[setup.estimate]
        self._random = Random(seed)
        self._names = (f"replica-{number}" for number in count())
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wants_more_since: float | None = None
        self._starting = 0

    def run(self) -> Cluster:
        for _ in range(self.setup.replicas):
            self._add()
        for request in self.requests:
            self._at(request.arrived, partial(self._send, request))
        self._at(SAY_SECONDS, self._say)
        if self.setup.loss is not None:
            self._at(self.setup.loss.at, self._lose_one)
        while self._num_answered < len(self.requests):
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    # Requests

    def _send(self, request: Request) -> None:
        sent = self._sent[request.front]
        name = self._policy(route_key(request.query), self._loads(sent))
        request.attempts += 1
        sent[name] = sent.get(name, 0) + self._traffic.request_tokens
        self.replicas[name].take(request)
        self._step(name)

    def _loads(self, sent: Mapping[str, int]) -> dict[str, ReplicaLoad]:
        """As `prefixwise.cluster.router` has them."""
        names = self._random.sample(list(self.replicas), len(self.replicas))
        tokens = self._estimate(sent, {name: self._said.get(name, 0) for name in names})
        return {name: ReplicaLoad(tokens[name], self.setup.device.step_tokens) for name in names}

    def _step(self, name: str) -> None:
        replica = self.replicas.get(name)
        if replica is None or name in self._busy:
            return
        seconds = replica.begin_step()
        if seconds is not None:
            self._busy.add(name)
            self._at(self.now + seconds, partial(self._end_step, name))

    def _end_step(self, name: str) -> None:
        self._busy.discard(name)
        replica = self.replicas.get(name)
        if replica is None:  # it died meanwhile
            return
        for request in replica.end_step():
            request.done = self.now
            self._num_answered += 1
            self._sent[request.front][name] -= self._traffic.request_tokens
        self._step(name)

    def _say(self) -> None:
        """What was said before arrives, and replicas speak again."""
        self._said = self._saying
        self._saying = {name: replica.queued_tokens for name, replica in self.replicas.items()}
        if self.setup.scaling is not None:
            self._scale(self.setup.scaling)
        self._at(self.now + SAY_SECONDS, self._say)

    # Replicas

    def _add(self) -> None:
        name = next(self._names)
        self.replicas[name] = Replica(name, self.setup.device, self._traffic, self._blocks)
        self.sizes.append((self.now, len(self.replicas)))

    def _lose_one(self) -> None:
        """The first. What it had is sent again at once, by the fronts that had sent it."""
        assert self.setup.loss is not None
        replica = self.replicas.pop(next(iter(self.replicas)))
        for sent in self._sent:
            sent.pop(replica.name, None)
        for request in replica.lose():
            self._send(request)
        self._at(self.now + self.setup.loss.back_after, self._add)

    def _scale(self, scaling: Scaling) -> None:
        """Up only: what a burst asks for."""
        wanted = min(scaling.most, desired_replicas(sum(self._saying.values()), scaling.target_queued_tokens))
        missing = wanted - len(self.replicas) - self._starting
        if missing <= 0:
            self._wants_more_since = None
            return
        if self._wants_more_since is None:
            self._wants_more_since = self.now
        if self.now - self._wants_more_since >= scaling.up_after:
            for _ in range(missing):
                self._starting += 1
                self._at(self.now + scaling.start_seconds, self._arrive)

    def _arrive(self) -> None:
        self._starting -= 1
        self._add()
