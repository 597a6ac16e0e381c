"""Messages between HTTP workers and the engine process: what goes in comes out, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from prefixwise.backends.fake import FakeBackend
from prefixwise.contract.errors import (
    BackendError,
    CancelledError,
    InvalidValueError,
    ModelLoadError,
    PrefixwiseError,
    QueueFullError,
    RequestError,
    UnavailableError,
)
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.health import EngineState
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.request_state import RequestState, ScoringTask
from prefixwise.engine.scheduler import Scheduler
from prefixwise.server.metrics import Metrics
from prefixwise.server.usage import (
    BODY_BYTES,
    CONNECTIONS,
    HEARTBEATS,
    SILENT_SECONDS,
    SharedUsage,
    Silence,
    Usage,
    address_field,
)
from prefixwise.server.workers.channel import Channel, EngineDown, EngineUp, Message, Stop
from prefixwise.server.workers.engine_process import EngineServer, Wake
from prefixwise.server.workers.messages import (
    DONE,
    NEWS,
    SUBMIT,
    News,
    Outcome,
    Packer,
    Submission,
    Unpacker,
    error_of,
    fault_of,
)
from prefixwise.server.workers.remote_scheduler import RemoteScheduler
from tests.engine.live import GatedBackend, live_engine

BODY: dict[str, Any] = {"query": list(range(300)), "items": [[1, 2], [3]], "label_token_ids": [7, 8]}


def task_of(**more: Any) -> ScoringTask:
    backend = FakeBackend()
    scheduler = Scheduler(backend)
    try:
        engine = ScoringEngine(EngineConfig("m"), scheduler, None)
        return engine.state_of(engine.prepare(parse_score_request({**BODY, **more})), deadline=12.5, priority=3).task
    finally:
        scheduler.close()


def same(one: Any, other: Any) -> bool:
    """Equal, arrays included, and of the same types."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if hasattr(one, "__dataclass_fields__"):
        names = one.__dataclass_fields__
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "more",
    [
        {"algorithm": "prefill_extend"},
        {"algorithm": "packed"},
        {"algorithm": "serial", "return_debug": True},
        {"label_token_ids": [[1, 2, 3], [4]], "label_scoring": "sequence"},
        {"return_pooled_hidden_states": True},
        {"query": [5, 9], "embed_override_token_id": 9, "query_embed_overrides": [[0.5] * 8]},
    ],
    ids=lambda more: " ".join(map(str, more)),
)
def test_a_task_arrives_as_it_was(more: dict[str, Any]) -> None:
    task = task_of(**more)
    kind, *frames = Packer().pack(SUBMIT, Submission((1, 2), (task, task)))
    found = Unpacker(Submission).unpack(frames)
    assert (kind, found.ids) == (SUBMIT, (1, 2))
    assert all(same(each, task) for each in found.tasks)


def test_an_array_is_sent_once() -> None:
    task = task_of(algorithm="prefill_extend")
    assert task.plan is not None and task.plan.segments.prefix_ids is task.prefix_ids
    _, _, once = Packer().pack(SUBMIT, Submission((1,), (task,)))
    _, _, twice = Packer().pack(SUBMIT, Submission((1, 2), (task, task)))
    assert len(once) == len(twice) < 2 * task.prefix_ids.nbytes


def test_arrays_of_any_shape_stay_apart() -> None:
    """Of sizes that are no multiple of the alignment, empty, and not contiguous."""
    logits = np.arange(15, dtype=np.float32).reshape(5, 3)[:, ::2]
    sent = Outcome(7, None, 0, None, 0.0, 0.0, None, (), logits, np.zeros(0, np.float32), np.ones((3, 1), np.float32))
    found = Unpacker(Outcome).unpack(Packer().pack(DONE, sent)[1:])
    for name in ("label_logits", "logsumexp", "hidden"):
        assert same(getattr(sent, name), getattr(found, name)), name


def test_a_message_of_another_shape_is_refused() -> None:
    """A wrong type, arrays beyond the frame, and arrays of objects, whose bytes would be addresses."""
    unpack = Unpacker(Submission).unpack
    with pytest.raises(msgspec.ValidationError):
        unpack([msgspec.msgpack.encode([[1], ["not a task"]])])
    header = Packer().pack(SUBMIT, Submission((1,), (task_of(),)))[1]
    with pytest.raises((msgspec.ValidationError, ValueError, KeyError)):
        unpack([header, b"\0" * 8])
    with pytest.raises((msgspec.ValidationError, ValueError, KeyError)):
        unpack([header.replace(b"<i4", b"|O8"), b"\0" * 8192])
    with pytest.raises(TypeError, match="a message has scalars, dataclasses and arrays, got object"):
        Packer().pack(SUBMIT, object())


@pytest.mark.parametrize(
    "error",
    [
        InvalidValueError("a", code="b", param="c", item_index=4),
        QueueFullError("full", retry_after=7, code="queue_too_long"),
        UnavailableError("gone", code="engine_failed", retry_after=30),
        ModelLoadError("no such folder"),
        CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: PrefixwiseError) -> None:
    found = error_of(fault_of(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
    if isinstance(error, RequestError) and isinstance(found, RequestError):
        assert found.to_body() == error.to_body()


def test_the_text_of_a_strange_error_stays_in_its_process() -> None:
    found = error_of(fault_of(RuntimeError("secret of the device")))
    assert type(found) is BackendError
    assert "secret" not in str(found)


def test_a_channel_gives_whole_messages_and_its_end() -> None:
    ours, theirs = Channel.pair()
    sent: list[Message] = [EngineUp(3, "ipc://x"), EngineDown("gone\nfor good", is_last=True), Stop()]
    for message in sent:
        ours.send(message)
    assert theirs.receive() == sent
    ours.socket.send(b'{"type":"St')
    assert theirs.receive() == []
    ours.socket.send(b'op"}\n')
    assert theirs.receive() == [Stop()]
    ours.close()
    assert theirs.receive() is None
    theirs.send(Stop())  # nobody hears it
    theirs.close()


def test_a_channel_that_is_full_is_closed_and_no_message_is_sent_in_part() -> None:
    ours, theirs = Channel.pair()
    ours.socket.setblocking(False)
    theirs.socket.settimeout(20)  # until a test that waits for what does not come gives up
    large = EngineDown("x" * 100_000, is_last=False)
    for _ in range(100):
        ours.send(large)
    found = list(theirs.messages())  # until its end
    assert 0 < len(found) < 100
    assert found == [large] * len(found)
    ours.send(Stop())
    assert (ours.receive(), theirs.receive()) == (None, None)
    ours.close()
    theirs.close()


class TestUnreadable:
    """A message that the engine process cannot read, from a worker that waits for its answer."""

    @pytest.fixture
    def endpoint(self, tmp_path: Path) -> Iterator[str]:
        """Of an engine whose forwards do not end."""
        backend, wake, inbox = GatedBackend(), Wake(), SimpleQueue[bytes | None]()
        with live_engine(backend) as engine:
            endpoint = f"ipc://{tmp_path}/engine"
            with EngineServer(engine, endpoint, {}, inbox, wake, Usage()) as server, ThreadPoolExecutor(1) as threads:
                threads.submit(server.run)
                yield endpoint
                inbox.put(None)
                wake.set()
        wake.reader.close()
        wake._writer.close()

    @staticmethod
    def errors(endpoint: str, frames: list[bytes], num_done: int) -> list[BaseException | None]:
        """Those of two requests, once so many are done; this message comes instead of the second."""

        async def run() -> list[BaseException | None]:
            context: zmq.Context[Any] = zmq.Context()
            scheduler = RemoteScheduler(context, endpoint, "0-1")
            done = asyncio.Semaphore(0)
            try:
                await scheduler.connect()
                task = replace(task_of(), deadline=None)
                states = [RequestState(task, done.release) for _ in range(2)]
                scheduler.submit(states[0])
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(scheduler._packer, "pack", lambda kind, header: [kind, *frames])
                    scheduler.submit(states[1])
                for _ in range(num_done):
                    await asyncio.wait_for(done.acquire(), 20)
                return [state.error if state.is_done else None for state in states]
            finally:
                scheduler.close()
                context.term()

        return asyncio.run(run())

    def test_a_request_whose_number_can_be_read_gets_an_error_at_once(self, endpoint: str) -> None:
        first, second = self.errors(endpoint, [msgspec.msgpack.encode([[1], ["not a task"]])], 1)
        assert first is None
        assert isinstance(second, BackendError)
        assert "could not read a request" in str(second)

    @pytest.mark.parametrize("frames", [[b"\xc1"], [], [msgspec.msgpack.encode("x")]], ids=("damaged", "none", "other"))
    def test_else_all_requests_of_its_worker_do(self, endpoint: str, frames: list[bytes]) -> None:
        assert [type(error) for error in self.errors(endpoint, frames, 2)] == [BackendError] * 2


def test_counts_outlive_the_process_that_is_killed(tmp_path: Path) -> None:
    """What was shown is never lost; what is so at the moment, as memory, ends with the process."""
    file = tmp_path / "counts"

    def next_process() -> Metrics:
        metrics = Metrics()
        metrics.watch_bodies(lambda: 5)
        metrics.keep_counts(file)
        metrics.count_request("/v1/score", 200, 0.3)
        return metrics

    for number in (1, 2, 3):
        metrics = next_process()
        shown = metrics.render() if number == 2 else Metrics().render([metrics.snapshot()])
        assert b'prefixwise:requests_total{route="/v1/score",status="200"} %d.0' % number in shown
        assert b'prefixwise:request_seconds_count{route="/v1/score"} %d.0' % number in shown
        assert b"prefixwise:body_bytes 5.0" in shown
    kept = Metrics().render([file.read_bytes()])
    assert b'prefixwise:requests_total{route="/v1/score",status="200"} 3.0' in kept
    assert b"prefixwise:body_bytes 0.0" in kept


def test_what_processes_use_adds_up() -> None:
    shared = SharedUsage(2)
    one, other = shared.of(0), shared.of(1)
    one.add(BODY_BYTES, 5)
    other.add(BODY_BYTES, 7)
    other.add(CONNECTIONS, 1)
    other.add(address_field(b"10.0.0.1"), 1)
    assert (one.own(BODY_BYTES), one.total(BODY_BYTES), one.of_others(BODY_BYTES)) == (5, 12, 7)
    assert one.of_others(address_field(b"10.0.0.1")) == 1
    shared.clear(1)
    assert (one.total(BODY_BYTES), one.total(CONNECTIONS)) == (5, 0)


class TestSilence:
    def test_a_process_without_beats_falls_silent_until_the_next_one(self, pass_time: Callable[[float], None]) -> None:
        process = Usage()
        silence = Silence(process)
        for _ in range(int(2 * SILENT_SECONDS)):
            pass_time(0.75)
            silence.look()
        assert silence.is_long and silence.seconds == 1.5 * SILENT_SECONDS
        process.add(HEARTBEATS, 1)
        silence.look()
        assert not silence.is_long

    def test_a_long_time_between_two_looks_was_one_of_the_looker_too(self, pass_time: Callable[[float], None]) -> None:
        silence = Silence(Usage())
        for _ in range(int(SILENT_SECONDS)):
            pass_time(1000.0)
            silence.look()
        assert not silence.is_long

    @pytest.mark.parametrize(
        ("timeout", "seconds", "is_fatal"),
        [(300.0, 299, False), (300.0, 301, True), (0.0, 10_000, False), (0.5, 19, False), (0.5, 21, True)],
    )
    def test_it_is_fatal_after_the_timeout(
        self, pass_time: Callable[[float], None], timeout: float, seconds: int, is_fatal: bool
    ) -> None:
        silence = Silence(Usage())
        for _ in range(seconds):
            pass_time(1.0)
            silence.look()
        assert silence.is_fatal(timeout) is is_fatal


def test_a_stall_that_the_engine_reports_outlives_that_of_its_silence(tmp_path: Path) -> None:
    async def run() -> None:
        context: zmq.Context[Any] = zmq.Context()
        scheduler = RemoteScheduler(context, f"ipc://{tmp_path}/engine", "0-1")

        def tell(state: EngineState, reason: str | None) -> None:
            scheduler._on_news(Packer().pack(NEWS, News(state, reason, None))[1:])

        try:
            scheduler.hear(is_silent=True)
            assert scheduler.health.error().code == "engine_stalled"
            assert scheduler.health.reason == "the engine process does not answer"
            tell(EngineState.STALLED, "a long step")
            scheduler.hear(is_silent=False)
            assert scheduler.health.reason == "a long step"
            tell(EngineState.OK, None)
            assert scheduler.health.state is EngineState.OK
            scheduler.hear(is_silent=True)
            scheduler.hear(is_silent=False)
            assert scheduler.health.state is EngineState.OK
        finally:
            scheduler.close()
            context.term()

    asyncio.run(run())
