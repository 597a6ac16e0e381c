"""`RemoteScheduler`: the scheduler as an HTTP worker sees it. Requests go to the engine process, results come back.

It lives on the worker's event loop, which owns the ZeroMQ socket: a request is sent without a switch of threads, and
its result wakes the loop. Where the engine process ends, every request that is not done gets an error at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

import zmq

from prefixwise.contract.errors import QueueFullError, UnavailableError
from prefixwise.engine.health import RESTART_SECONDS, EngineHealth, EngineState
from prefixwise.engine.loras import LoadedLora, LoraTable, lora_not_found
from prefixwise.engine.prefix_cache import PinnedPrefix
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.stats import EngineStats
from prefixwise.forward.backend import BackendInfo
from prefixwise.models.config import ModelConfig
from prefixwise.plan.cost_model import MeasuredCosts
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
    Fault,
    LoraUpdate,
    News,
    Outcome,
    Packer,
    Query,
    Refusal,
    Snapshot,
    Submission,
    Unpacker,
    error_of,
)

log = logging.getLogger("prefixwise")

LORA_SECONDS = 300.0  # for the engine to load an adapter
QUERY_SECONDS = 2.0  # for the engine to answer a question about itself; metrics are then those of the last answer


class RemoteScheduler:
    """One engine process, from its first message to its end. `connect` returns when the engine has described itself."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, identity: str) -> None:
        self.health = EngineHealth()
        self.admission = RemoteAdmission(partial(self._send, FULL, None))
        self.pins = RemotePins(self)
        self.loras = RemoteLoras(self)
        self._loop = asyncio.get_running_loop()
        self._ids = count()
        self._live: dict[int, RequestState] = {}
        self._stall: str | None = None  # as the engine has told
        self._is_silent = False
        self._queries: dict[int, Future[Answer]] = {}
        self._described: asyncio.Future[Description] = self._loop.create_future()
        self._packer = Packer()
        self._outcomes, self._refusals = Unpacker(Outcome), Unpacker(Refusal)
        self._answers, self._news = Unpacker(Answer), Unpacker(News)
        self._descriptions = Unpacker(Description)
        self._handlers: Mapping[bytes, Callable[[Sequence[Any]], None]] = {
            DONE: self._on_done,
            REFUSED: self._on_refused,
            ANSWER: self._on_answer,
            NEWS: self._on_news,
            DESCRIPTION: self._on_description,
        }
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # admission bounds what waits
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._receive)

    async def connect(self) -> Description:
        """What the engine says of itself. Cancelled, if the engine process ends before."""
        self._send(HELLO, None)
        self.description = description = await self._described
        self.snapshot = description.snapshot
        self.options = description.scheduler
        self.costs = MeasuredCosts(description.costs)
        self.backend = RemoteBackend(self)
        self.admission.max_tokens = description.max_queued_tokens
        return description

    # As `Scheduler` has them. `submit` belongs to the event loop, the others to any other thread.

    def submit(self, *requests: RequestState) -> None:
        """All of them or none. A refusal of the engine's ends them later (`RequestState.is_refused`).

        Raises UnavailableError while the engine cannot score.
        """
        self.health.check()
        ids = tuple(next(self._ids) for _ in requests)
        self._live.update(zip(ids, requests, strict=True))
        for number, request in zip(ids, requests, strict=True):
            request.on_cancel = partial(self._cancel, number)
        self._send(SUBMIT, Submission(ids, tuple(request.task for request in requests)))

    def stats(self) -> EngineStats:
        """A snapshot; the last one, if the engine process does not answer."""
        return self._latest().stats

    def release_pin(self, prefix_id: str) -> bool:
        """Unpin a prefix. False if no pinned prefix has this id. Raises UnavailableError if the engine is gone."""
        return self._ask(unpin=prefix_id).was_pinned

    def close(self) -> None:
        """The engine process is the supervisor's: this closes the connection to it."""
        self._described.cancel()
        self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()

    # For the worker

    def engine_ended(self, reason: str, *, is_last: bool) -> None:
        """The engine process is gone: end all its requests, and refuse new ones."""
        if is_last:
            self.health.fail(reason)
        else:
            self.health.restart(reason)
        live, self._live = self._live, {}
        for state in live.values():
            state.finish(self.health.error())
        for query in self._queries.values():
            query.set_exception(self.health.error())
        self._queries.clear()
        self._described.cancel()

    def hear(self, *, is_silent: bool) -> None:
        """Whether the engine process lives: one that is frozen cannot say that it is stalled. Its requests wait for it,
        as for a device."""
        if is_silent != self._is_silent:
            self._is_silent = is_silent
            self._judge()

    def _judge(self) -> None:
        if self._stall is not None:
            self.health.stall(self._stall)
        elif self._is_silent:
            self.health.stall("the engine process does not answer")
        else:
            self.health.end_stall()

    # Queries

    def _latest(self) -> Snapshot:
        with contextlib.suppress(UnavailableError):
            self._ask()
        return self.snapshot

    def _ask(self, *, unpin: str | None = None, lora: LoraUpdate | None = None) -> Answer:
        """Wait for the engine's answer, on any thread but the event loop's."""
        self.health.check()
        number, answer = next(self._ids), Future[Answer]()
        seconds = QUERY_SECONDS if lora is None else LORA_SECONDS
        self._loop.call_soon_threadsafe(self._send_query, Query(number, unpin, lora), answer)
        try:
            return answer.result(seconds)
        except TimeoutError:
            message = f"the engine must answer within {seconds:g} seconds, and it has not; try again later"
            raise UnavailableError(message, code="engine_stalled", retry_after=RESTART_SECONDS) from None
        finally:
            self._loop.call_soon_threadsafe(self._queries.pop, number, None)

    def _send_query(self, query: Query, answer: Future[Answer]) -> None:
        if self.health.state is EngineState.OK:
            self._queries[query.id] = answer
            self._send(QUERY, query)
        else:
            answer.set_exception(self.health.error())

    # The socket, on the event loop

    def _send(self, kind: bytes, header: object) -> None:
        if self._socket.closed:
            return
        self._socket.send_multipart(self._packer.pack(kind, header), zmq.DONTWAIT)
        if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # sending has taken the wake-up of a message
            self._loop.call_soon(self._receive)

    def _cancel(self, number: int) -> None:
        if number in self._live:
            self._send(CANCEL, number)

    def _receive(self) -> None:
        while not self._socket.closed:
            try:
                kind, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            try:
                self._handlers[kind](frames)
            except Exception:  # a bug: the messages behind it must be read, too
                log.exception("a message of the engine process failed")

    def _on_done(self, frames: Sequence[Any]) -> None:
        outcome = self._outcomes.unpack(frames)
        state = self._live.pop(outcome.id, None)
        if state is None:
            return
        if outcome.label_logits is not None:
            state.label_logits = outcome.label_logits
        state.logsumexp, state.hidden = outcome.logsumexp, outcome.hidden
        if outcome.top_logits is not None and outcome.top_ids is not None:
            state.top_logits, state.top_ids = outcome.top_logits, outcome.top_ids
        state.cached_tokens, state.started, state.pinned = outcome.cached_tokens, outcome.started, outcome.pinned
        state.prefill_seconds, state.extend_seconds = outcome.prefill_seconds, outcome.extend_seconds
        state.batches = list(outcome.batches)
        state.finish(None if outcome.fault is None else error_of(outcome.fault))

    def _on_refused(self, frames: Sequence[Any]) -> None:
        refusal = self._refusals.unpack(frames)
        for number in tuple(self._live) if refusal.ids is None else refusal.ids:
            state = self._live.pop(number, None)
            if state is not None:
                state.is_refused = True
                state.finish(error_of(refusal.fault))

    def _on_answer(self, frames: Sequence[Any]) -> None:
        answer = self._answers.unpack(frames)
        self.snapshot = answer.snapshot
        waiting = self._queries.pop(answer.id, None)
        if waiting is not None:
            waiting.set_result(answer)

    def _on_news(self, frames: Sequence[Any]) -> None:
        news = self._news.unpack(frames)
        self.admission.full = news.full
        self.loras.loaded = news.loras
        self._send(KNOWN, news.loras_version)
        # A failed engine's requests get their errors, and its process ends: `engine_ended` says what follows.
        if news.state in (EngineState.OK, EngineState.STALLED):
            is_stalled = news.state is EngineState.STALLED
            self._stall = (news.reason or "the engine is stalled") if is_stalled else None
            self._judge()

    def _on_description(self, frames: Sequence[Any]) -> None:
        if not self._described.done():
            description = self._descriptions.unpack(frames)
            self.loras.loaded = description.snapshot.loras
            self._described.set_result(description)


class RemoteAdmission:
    """What a worker knows of the engine's queue: whether it was full when it last changed."""

    def __init__(self, count_refusal: Callable[[], None]) -> None:
        self.max_tokens = 0
        self.full: Fault | None = None
        self._count_refusal = count_refusal

    def check(self) -> None:
        """Raises QueueFullError if no request would be queued, so that the server need not read a body."""
        if self.full is not None:
            error = error_of(self.full)
            assert isinstance(error, QueueFullError)
            self._count_refusal()
            raise error


class RemoteLoras(LoraTable):
    """The LoRA adapters of the engine process, as it has last told."""

    def __init__(self, scheduler: RemoteScheduler) -> None:
        self.loaded: tuple[LoadedLora, ...] = ()
        self._scheduler = scheduler

    def listed(self) -> tuple[LoadedLora, ...]:
        return self.loaded

    def load(self, name: str, path: str, *, in_place: bool = False) -> LoadedLora:
        self._update(LoraUpdate(name, path, in_place))
        found = self.find(name)
        if found is None:  # unloaded again by somebody else
            raise lora_not_found(name)
        return found

    def unload(self, name: str) -> None:
        self._update(LoraUpdate(name))

    def _update(self, update: LoraUpdate) -> None:
        fault = self._scheduler._ask(lora=update).fault
        if fault is not None:
            raise error_of(fault)


class RemotePins:
    """The pinned prefixes of the engine process."""

    def __init__(self, scheduler: RemoteScheduler) -> None:
        self._scheduler = scheduler

    def listed(self) -> list[PinnedPrefix]:
        """Raises UnavailableError if the engine is gone."""
        return list(self._scheduler._ask().snapshot.pins)


class RemoteBackend:
    """The facts about the backend of the engine process."""

    def __init__(self, scheduler: RemoteScheduler) -> None:
        self.config: ModelConfig = scheduler.description.model
        self.info: BackendInfo = scheduler.description.backend
        self._scheduler = scheduler

    @property
    def num_compilations(self) -> int:
        """When the engine last answered, as `stats` asks it to."""
        return self._scheduler.snapshot.num_compilations

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes on the devices when the engine last answered."""
        return self._scheduler.snapshot.device_memory
