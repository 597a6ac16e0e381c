"""Ranks of one model with fake backends and real connections: what rank 0 runs, all run. (Real ones: tests/hosts.)"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.fake import FakeBackend
from prefixwise.backends.jax import rank_channel
from prefixwise.backends.jax.lockstep import LeaderBackend, follow
from prefixwise.backends.jax.rank_channel import Message, parse_address
from prefixwise.backends.load import load_backend
from prefixwise.contract.errors import BackendError, ModelLoadError, PrefixwiseError, UnavailableError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import PROBE, BackendOptions, Program
from prefixwise.forward.batch import ForwardBatch, RunningForward
from tests.server.test_worker_messages import same

REQUESTS: list[dict[str, Any]] = [
    {"query": list(range(300)), "items": [[1, 2], [3]]},
    {"query": list(range(300)), "items": [[4]] * 5},  # its prefix is cached
    {"query": [5, 6], "items": [[1], [2, 3]], "algorithm": "packed"},
    {"query": list(range(9, 400)), "items": [[7, 8]], "algorithm": "prefill_extend"},  # needs the room of the first
    {"query": [1, 2], "items": [[3]], "embed_override_token_id": 2, "query_embed_overrides": [[4.0] + 7 * [0.0]]},
]


class Ranked(FakeBackend):
    """Refuses one of its forwards, and has two programs."""

    def __init__(self, num_kv_blocks: int = 4, refuses: int | None = None) -> None:
        super().__init__(num_kv_blocks=num_kv_blocks)
        self.ran: list[str] = []
        self._refuses = refuses  # the number of the forward
        self._num_started = 0

    def start(self, batch: ForwardBatch) -> RunningForward:
        self._num_started += 1
        if self._num_started - 1 == self._refuses:
            raise BackendError("no page is free")
        return super().start(batch)

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> list[Program]:
        def lower(name: str) -> Callable[[], None]:
            return lambda: self.ran.append(f"compile {name}")

        return [
            Program("a", lambda: lower("a"), lambda: self.ran.append("run a")),
            Program("b", None, lambda: self.ran.append(f"run b {max_dense_len}")),
        ]


def load(backend: Ranked) -> Ranked:
    return backend


def free_port() -> int:
    """One that nobody uses now, as nobody does the next one; not of those that the system gives to connections."""
    for port in random.Random().sample(range(20_000, 32_000, 2), 100):
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no port is free")


def options(port: int, rank: int) -> BackendOptions:
    return BackendOptions(tp_size=3, nnodes=3, node_rank=rank, dist_init_addr=f"127.0.0.1:{port}")


@contextmanager
def three_ranks(*backends: Ranked) -> Iterator[tuple[LeaderBackend, list[Future[None]]]]:
    """Rank 0, and how the others end."""
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        others = [
            pool.submit(follow, partial(load, each), options(port, rank)) for rank, each in enumerate(backends[1:], 1)
        ]
        leader = LeaderBackend(lambda: backends[0], options(port, 0))
        try:
            yield leader, others
        finally:
            leader.close()


def test_every_rank_runs_what_rank_0_runs() -> None:
    ranks = Ranked(), Ranked(), Ranked()
    with three_ranks(*ranks) as (leader, others):
        engine = ScoringEngine(EngineConfig("m"), Scheduler(leader), None)
        alone = ScoringEngine(EngineConfig("m"), Scheduler(FakeBackend()), None)
        for body in REQUESTS:
            request = parse_score_request({**body, "label_token_ids": [7, 8]})
            assert engine.score(request).scores == alone.score(request).scores
        for program in leader.programs(max_dense_len=64):
            if program.lower is not None:
                program.lower()()
            program.prepare()
        engine.close()
        alone.close()
        assert [other.result(60) for other in others] == [None, None]
    assert len(ranks[0].forwards) > len(REQUESTS)
    for rank in ranks[1:]:
        assert all(map(same, ranks[0].forwards, rank.forwards))
        assert len(rank.forwards) == len(ranks[0].forwards)
        assert rank.ran == ranks[0].ran == ["compile a", "run a", "run b 64"]


def test_a_forward_that_all_ranks_refuse_ends_nothing() -> None:
    ranks = Ranked(refuses=1), Ranked(refuses=1), Ranked(refuses=1)
    with three_ranks(*ranks) as (leader, others):
        before = leader.forward(PROBE)
        with pytest.raises(BackendError, match="no page is free"):
            leader.start(PROBE)
        assert same(leader.forward(PROBE), before)
        leader.close()
        assert [other.result(60) for other in others] == [None, None]


def test_a_rank_that_ends_fails_the_engine_with_its_name() -> None:
    with three_ranks(Ranked(), Ranked(), Ranked(refuses=2)) as (leader, others):
        engine = ScoringEngine(EngineConfig("m"), Scheduler(leader), None)
        request = parse_score_request({**REQUESTS[0], "label_token_ids": [7]})
        failed = threading.Event()
        engine.scheduler.health.when_failed(lambda _: failed.set())
        with pytest.raises((UnavailableError, BackendError)):
            while True:  # the forward that rank 2 refuses, or one after it
                engine.score(request)
        assert failed.wait(60)
        assert "rank 2 (127.0.0.1) has ended, or cannot be reached" in (engine.scheduler.health.reason or "")
        engine.close()
        with pytest.raises(BackendError, match="no page is free"):
            others[1].result(60)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (
            Ranked(num_kv_blocks=5),
            r"rank 2 \(127.0.0.1\) must run the same as rank 0, and has num_kv_blocks 5 instead of 4",
        ),
        (None, r"rank 2 \(127.0.0.1\) has ended, or cannot be reached: no such model"),
    ],
)
def test_a_rank_that_cannot_join_ends_all_of_them_with_its_reason(second: Ranked | None, expected: str) -> None:
    def load_second() -> Ranked:
        if second is None:
            raise ModelLoadError("no such model")
        return second

    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(follow, Ranked, options(port, 1)), pool.submit(follow, load_second, options(port, 2))]
        with pytest.raises(BackendError, match=expected):
            LeaderBackend(Ranked if second else never, options(port, 0))
        for other in others:
            with pytest.raises(PrefixwiseError, match=expected if second else "no such model"):
                other.result(60)


def never() -> Ranked:
    """As jax waits for a rank that has failed."""
    threading.Event().wait()
    raise AssertionError("unreachable")


def test_a_stranger_at_the_port_is_sent_away() -> None:
    port = free_port()
    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(LeaderBackend, Ranked, options(port, 0))
        connection = _connected(port + 1)
        with connection, suppress(ConnectionResetError):  # what it has sent is not read to its end
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(10) == b""
        others = [pool.submit(follow, Ranked, options(port, rank)) for rank in (1, 2)]
        leading.result(60).close()
        assert [other.result(60) for other in others] == [None, None]


def _connected(port: int) -> socket.socket:
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), 60)
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
    raise AssertionError("rank 0 does not listen")


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "CONNECT_SECONDS", 0.2)
    with pytest.raises(BackendError, match=r"rank 1, 2 did not connect to 127.0.0.1 port \d+ within 0.2 s"):
        LeaderBackend(Ranked, options(free_port(), 0))


def test_a_message_keeps_its_arrays() -> None:
    arrays = {"one": np.arange(6, dtype=np.int32).reshape(2, 3), "none": np.zeros((0, 4), np.float32)}
    data = Message("forward", {"numbers": [1]}, arrays).encode()
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        found = rank_channel.receive_message(right)
    assert found.values == {"numbers": [1]}
    assert all(same(arrays[name], found.arrays[name]) for name in arrays)


@pytest.mark.parametrize("address", ["", "host", "host:", ":5000", "host:0", "host:65535", "host:x"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(BackendError, match="dist_init_addr must be like"):
        parse_address(address)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"nnodes": 0}, "nnodes must be a whole number of at least 1, got 0"),
        ({"nnodes": 2, "node_rank": 2}, r"node_rank must be a whole number from 0 to nnodes - 1 \(1\), got 2"),
        ({"node_rank": 1}, r"node_rank must be a whole number from 0 to nnodes - 1 \(0\), got 1"),
        ({"nnodes": 2, "tp_size": 2}, "nnodes > 1 needs dist_init_addr"),
        ({"nnodes": 2, "dist_init_addr": "a:1"}, "needs a device of every node in the model"),
    ],
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        BackendOptions(**wrong)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"backend": "fake"}, "nnodes=2 needs backend jax, got fake"),
        ({"max_loras": 1}, "nnodes=2 has no LoRA adapters"),
    ],
)
def test_what_runs_on_one_host_only_is_refused_before_it_is_loaded(more: dict[str, Any], words: str) -> None:
    checkpoint: Any = None
    with pytest.raises(BackendError, match=words):
        load_backend(
            checkpoint, BackendOptions(nnodes=2, tp_size=2, dist_init_addr="a:1", **{"backend": "jax", **more})
        )
