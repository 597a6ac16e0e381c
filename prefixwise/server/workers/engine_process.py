"""The engine process: the scheduler and the device, behind a ZeroMQ socket. It knows no HTTP.

    main thread        the socket: requests in, results out (`EngineServer`)
    control thread     the supervisor's messages; where the supervisor is gone, this process ends, too
    scheduler, device  as in a server of one process

A request of a worker is a `RequestState` of this process. The scheduler's thread only puts a finished one into a queue;
encoding and sending are the main thread's.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import msgspec
import zmq

from prefixwise.contract.errors import BackendError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.request_state import RequestState
from prefixwise.host import peak_memory_bytes
from prefixwise.server.launch import (
    ENGINE_FAILED_STATUS,
    OpenEngine,
    ResolvedConfig,
    close_engine,
    exit_at_once,
    loading_error,
    relax_garbage_collection,
)
from prefixwise.server.routes.info import loaded_versions
from prefixwise.server.usage import HEARTBEAT_SECONDS, HEARTBEATS, Usage
from prefixwise.server.workers.channel import Channel, Failed, Loaded, Stop, WorkerDown
from prefixwise.server.workers.lora_updates import LoraUpdates, Worker
from prefixwise.server.workers.messages import (
    ANSWER,
    CANCEL,
    DESCRIPTION,
    DONE,
    FULL,
    HELLO,
    KNOWN,
    NEWS,
    QUERY,
    REFUSED,
    SUBMIT,
    Answer,
    Description,
    News,
    Outcome,
    Packer,
    Query,
    Refusal,
    Snapshot,
    Submission,
    SubmissionIds,
    Unpacker,
    fault_of,
)

log = logging.getLogger("prefixwise")

BUSY_STATUS = 75  # EX_TEMPFAIL: the device did not end in time
_POLL_MILLISECONDS = round(1000 * HEARTBEAT_SECONDS)  # the watchdog changes the engine's health, too
_NEWS_SECONDS = 0.5  # between two estimates of when a full queue has room
_LINGER_MILLISECONDS = 1000  # for the last messages


def run_engine(
    channel: Channel, endpoint: str, usage: Usage, open_engine: OpenEngine, resolved_config: ResolvedConfig
) -> int:
    """Load the model and serve workers until the supervisor says stop. Returns the exit status."""
    inbox: SimpleQueue[bytes | None] = SimpleQueue()  # workers that are gone; None: stop
    wake = Wake()
    loading = threading.Event()
    loading.set()
    control = threading.Thread(
        target=_control, args=(channel, inbox, wake, loading), name="prefixwise-control", daemon=True
    )
    control.start()
    try:
        engine = open_engine()
        configuration = dict(resolved_config(engine))
        opened = EngineServer(engine, endpoint, configuration, inbox, wake, usage)
    except BaseException as error:
        channel.send(Failed(fault_of(loading_error(error))))
        return 1
    relax_garbage_collection()
    with opened as server:
        loading.clear()
        channel.send(Loaded(configuration, engine.scheduler.options.watchdog_timeout))
        if not server.run():
            return ENGINE_FAILED_STATUS
    return 0 if close_engine(engine) else BUSY_STATUS


def _control(channel: Channel, inbox: SimpleQueue[bytes | None], wake: Wake, loading: threading.Event) -> None:
    """Until the supervisor says stop, or has ended."""
    for message in channel.messages():
        if isinstance(message, WorkerDown):
            inbox.put(message.identity.encode())
            wake.set()
        elif isinstance(message, Stop):
            break
    if loading.is_set():
        exit_at_once(0)  # a model that is loading cannot be stopped
    inbox.put(None)
    wake.set()


class Wake:
    """Ends the main thread's poll, from any thread."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._is_set = False

    def set(self) -> None:
        if not self._is_set:  # one byte is enough
            self._is_set = True
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Before the queues are read: what is put later sets it again."""
        with contextlib.suppress(BlockingIOError):
            self.reader.recv(64)
        self._is_set = False


class EngineServer:
    """Runs the requests of all workers. `run` is the main thread's loop."""

    def __init__(
        self,
        engine: ScoringEngine,
        endpoint: str,
        configuration: dict[str, object],
        inbox: SimpleQueue[bytes | None],
        wake: Wake,
        usage: Usage,
    ) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._configuration = configuration
        self._inbox = inbox
        self._wake = wake
        self._usage = usage
        self._done: SimpleQueue[tuple[Worker, int]] = SimpleQueue()
        self._live: dict[Worker, dict[int, RequestState]] = {}  # of workers that have said hello, and are not gone
        self._loras = LoraUpdates(engine, wake.set)
        self._news = News(self._scheduler.health.state, None, None)
        self._news_time = 0.0
        self._packer = Packer()
        self._submissions, self._queries, self._cancels = Unpacker(Submission), Unpacker(Query), Unpacker(int)
        self._submission_ids, self._versions = Unpacker(SubmissionIds), Unpacker(int)
        self._handlers: Mapping[bytes, Callable[[Worker, Sequence[Any]], None]] = {
            HELLO: self._on_hello,
            SUBMIT: self._on_submit,
            CANCEL: self._on_cancel,
            QUERY: self._on_query,
            FULL: self._on_full,
            KNOWN: self._on_known,
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a worker that is gone is an error, not silence
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),  # results are not held back: admission bounds them
            (zmq.RCVHWM, 0),
            (zmq.LINGER, _LINGER_MILLISECONDS),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            message = f"the engine process cannot make its socket: {error}; TMPDIR must be a folder that nobody cleans"
            raise BackendError(message) from None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(wake.reader, zmq.POLLIN)

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def run(self) -> bool:
        """Serve until the supervisor says stop: True. False: the engine has failed, and all requests have their
        errors."""
        health = self._scheduler.health
        health.when_failed(lambda _: self._wake.set())
        while True:
            self._usage.add(HEARTBEATS, 1)
            events = dict(self._poller.poll(_POLL_MILLISECONDS))
            self._wake.clear()
            if not self._receive_control():
                return True
            if self._socket in events:
                self._receive()
            self._send_done()
            self._send_news()
            for done in self._loras.answers(self._live, self._send_news):
                self._send(done.worker, ANSWER, Answer(done.query, self._snapshot(), fault=done.fault))
            if health.failed.is_set() and not any(self._live.values()):
                return False

    # In

    def _receive_control(self) -> bool:
        """False: stop."""
        while True:
            try:
                worker = self._inbox.get_nowait()
            except Empty:
                return True
            if worker is None:
                return False
            for state in self._live.pop(worker, {}).values():
                state.cancel()

    def _receive(self) -> None:
        while True:
            try:
                worker, kind, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if kind != HELLO and worker not in self._live:  # it is gone
                continue
            try:
                self._handlers[kind](worker, frames)
            except Exception:  # a bug: one message must not end the engine, and nobody may wait for its answer
                log.exception("a message of a worker failed")
                self._refuse(worker, kind, frames)

    def _refuse(self, worker: Worker, kind: bytes, frames: Sequence[Any]) -> None:
        """Answer a message that cannot be read. Where its numbers cannot be, either, all requests of the worker end."""
        if kind == QUERY:  # whoever asks waits for a moment only
            return
        live, ids = self._live.setdefault(worker, {}), None
        with contextlib.suppress(msgspec.MsgspecError, IndexError):
            ids = self._submission_ids.unpack(frames).ids if kind == SUBMIT else None
        for number in tuple(live) if ids is None else ids:
            state = live.pop(number, None)
            if state is not None:
                state.cancel()
        message = "the engine process could not read a request; its log says more"
        self._send(worker, REFUSED, Refusal(ids, fault_of(BackendError(message))))

    def _on_hello(self, worker: Worker, frames: Sequence[Any]) -> None:
        self._live[worker] = {}  # it hears the news from now on
        self._loras.known[worker] = -1
        config, backend = self._engine.config, self._engine.backend
        description = Description(
            config.model_name,
            config.revision,
            backend.config,
            backend.info,
            self._scheduler.options,
            self._scheduler.costs.model,
            self._scheduler.admission.max_tokens,
            self._configuration,
            loaded_versions(),
            self._snapshot(),
        )
        self._send(worker, DESCRIPTION, description)
        self._send(worker, NEWS, self._news)

    def _on_submit(self, worker: Worker, frames: Sequence[Any]) -> None:
        submission = self._submissions.unpack(frames)
        live = self._live[worker]
        try:
            for number, task in zip(submission.ids, submission.tasks, strict=True):
                live[number] = RequestState(task, partial(self._on_change, worker, live, number))
            self._scheduler.submit(*(live[number] for number in submission.ids))
        except Exception as error:
            if not isinstance(error, PrefixwiseError):
                log.exception("a request of a worker failed")
            for number in submission.ids:
                live.pop(number, None)
            self._send(worker, REFUSED, Refusal(submission.ids, fault_of(error)))

    def _on_cancel(self, worker: Worker, frames: Sequence[Any]) -> None:
        state = self._live[worker].get(self._cancels.unpack(frames))
        if state is not None:
            state.cancel()

    def _on_query(self, worker: Worker, frames: Sequence[Any]) -> None:
        query = self._queries.unpack(frames)
        if query.lora is not None:
            self._loras.start(worker, query.id, query.lora)
            return
        was_pinned = query.unpin is not None and self._scheduler.release_pin(query.unpin)
        self._send(worker, ANSWER, Answer(query.id, self._snapshot(), was_pinned))

    def _on_known(self, worker: Worker, frames: Sequence[Any]) -> None:
        self._loras.known[worker] = self._versions.unpack(frames)

    def _on_full(self, worker: Worker, frames: Sequence[Any]) -> None:
        """The worker has refused a request as the queue was full: it counts as if it had come here."""
        fault = self._news.full
        self._scheduler.admission.refusals["queue_full" if fault is None else fault.code] += 1

    def _snapshot(self) -> Snapshot:
        backend, scheduler = self._engine.backend, self._scheduler
        return Snapshot(
            scheduler.stats(),
            tuple(scheduler.pins.listed()),
            dict(backend.memory_stats()),
            backend.num_compilations,
            peak_memory_bytes(),
            self._engine.loras.listed(),
        )

    # Out

    def _on_change(self, worker: Worker, live: Mapping[int, RequestState], number: int) -> None:
        """On the scheduler's thread."""
        if live[number].is_done:
            self._done.put((worker, number))
            self._wake.set()

    def _send_done(self) -> None:
        while True:
            try:
                worker, number = self._done.get_nowait()
            except Empty:
                return
            state = self._live.get(worker, {}).pop(number, None)
            if state is not None:  # else the worker is gone
                self._send(worker, DONE, _outcome(number, state))

    def _send_news(self) -> int:
        """Tell all workers where the state or the LoRA adapters have changed, whether the queue is full and, while it
        is, when to retry. Returns the version of the adapters."""
        health, full, now = self._scheduler.health, self._scheduler.admission.is_full, monotonic()
        loras = self._engine.loras.listed()
        is_known = (health.state, full, loras) == (self._news.state, self._news.full is not None, self._news.loras)
        if is_known and not (full and now - self._news_time > _NEWS_SECONDS):
            return self._news.loras_version
        self._news_time = now
        refusal = self._scheduler.admission.refusal_if_full()
        version = self._news.loras_version + (loras != self._news.loras)
        self._news = News(health.state, health.reason, None if refusal is None else fault_of(refusal), loras, version)
        for worker in list(self._live):
            self._send(worker, NEWS, self._news)
        return version

    def _send(self, worker: Worker, kind: bytes, header: object) -> None:
        try:
            self._socket.send_multipart([worker, *self._packer.pack(kind, header)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The worker has ended, and its requests with it; the supervisor will say so.


def _outcome(number: int, state: RequestState) -> Outcome:
    is_good = state.error is None
    return Outcome(
        number,
        None if state.error is None else fault_of(state.error),
        state.cached_tokens,
        state.started,
        state.prefill_seconds,
        state.extend_seconds,
        state.pinned,
        tuple(state.batches) if state.task.is_timed else (),
        state.label_logits if is_good else None,
        state.logsumexp if is_good else None,
        state.hidden if is_good else None,
        state.top_logits if is_good and state.task.top_k else None,
        state.top_ids if is_good and state.task.top_k else None,
    )
