"""An HTTP worker: the server of one process, whose engine's scheduler and device are in another one.

It checks, tokenizes and plans requests and renders their results. It answers 503 while the engine process loads, and
while another one takes the place of one that has ended.

opened    it could serve with this engine process, and tells the supervisor
taken     it serves, as all workers are opened, or one takes too long. Every request looks into shared memory first
          (`SERVING`), so the workers begin together
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import time
from typing import Any, cast

import uvloop
import zmq
import zmq.asyncio

from prefixwise.contract.errors import BackendError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.prepare import EngineConfig
from prefixwise.engine.scheduler import Scheduler
from prefixwise.prompts.tokenizer import TextTokenizer
from prefixwise.server.config import ReportSource, ServerOptions, is_loopback
from prefixwise.server.launch import HttpServer, relax_garbage_collection
from prefixwise.server.service import Service
from prefixwise.server.usage import (
    ENGINE_RESTARTS,
    HEARTBEAT_SECONDS,
    HEARTBEATS,
    SERVING,
    WORKER_RESTARTS,
    SharedUsage,
    Silence,
    Usage,
)
from prefixwise.server.workers.channel import Channel, Drained, EngineDown, EngineUp, Exit, Failed, Message, Ready, Stop
from prefixwise.server.workers.messages import Description, fault_of
from prefixwise.server.workers.remote_scheduler import RemoteScheduler

log = logging.getLogger("prefixwise")

OpenFrontend = Callable[[], tuple[EngineConfig, TextTokenizer | None]]  # what prepares requests; no weights

PEER_SECONDS = 1.0  # for another worker to send its metrics
OPEN_SECONDS = 30.0  # for a worker to load its tokenizer: nobody waits longer for it


@dataclass(frozen=True)
class ServerParts:
    """What all workers of one server share."""

    options: ServerOptions
    folder: Path  # of the sockets; only this user may enter it
    usage: SharedUsage
    num_workers: int
    open_frontend: OpenFrontend
    reports: ReportSource | None
    created: float = field(default_factory=time)
    open_seconds: float = field(default_factory=lambda: OPEN_SECONDS)

    @property
    def engine_usage(self) -> Usage:
        """The rows of the supervisor and of the engine process come after those of the workers."""
        return self.usage.of(self.num_workers + 1)

    def metrics_endpoint(self, worker: int) -> str:
        """Where the worker gives its metrics to the others."""
        return f"ipc://{self.folder}/metrics-{worker}"

    def counts_file(self, worker: int) -> Path:
        """Where the counts of a worker are that has ended."""
        return self.folder / f"counts-{worker}"


def run_worker(channel: Channel, number: int, listener: socket.socket, parts: ServerParts) -> int:
    """Serve HTTP until the supervisor says stop, or has ended. Returns the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(HttpWorker(channel, number, listener, parts).serve())


@dataclass(frozen=True)
class OpenedEngine:
    """An engine process with which a worker can serve."""

    generation: int
    scheduler: RemoteScheduler
    engine: ScoringEngine
    description: Description


class HttpWorker:
    """One worker, on its event loop."""

    def __init__(self, channel: Channel, number: int, listener: socket.socket, parts: ServerParts) -> None:
        self._usage = usage = parts.usage.of(number)
        self._channel = channel
        self._number = number
        self._listener = listener
        self._parts = parts
        self._service = Service(parts.options, parts.reports, usage)
        self._service.created = parts.created
        self._service.is_local = is_loopback(listener.getsockname()[0])
        self._service.other_metrics = self._ask_others
        self._service.metrics.keep_counts(parts.counts_file(number))
        self._service.metrics.watch_restarts(
            lambda: {"engine": parts.usage.total(ENGINE_RESTARTS), "worker": parts.usage.total(WORKER_RESTARTS)}
        )
        self._server = HttpServer.of(self._service, usage)
        self._app: Any = self._server.config.app
        self._server.config.app = self._answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._async_context = zmq.asyncio.Context.shadow(self._context)
        self._scheduler: RemoteScheduler | None = None
        self._frontend: tuple[EngineConfig, TextTokenizer | None] | None = None
        self._opening: asyncio.Task[None] | None = None
        self._opened: OpenedEngine | None = None  # not taken yet
        self._silence = Silence(parts.engine_usage)
        self._may_accept = asyncio.Event()
        if not parts.usage.total(SERVING):
            self._may_accept.set()  # and say why nothing is scored
        self._draining: asyncio.Task[None] | None = None
        self._may_exit = asyncio.Event()
        self._status = 0

    async def serve(self) -> int:
        """Until the drain."""
        loop = asyncio.get_running_loop()
        self._channel.socket.setblocking(False)
        loop.add_reader(self._channel.socket, self._on_readable)
        tasks = [loop.create_task(self._give_metrics()), loop.create_task(self._count_heartbeats())]
        try:
            with contextlib.suppress(TimeoutError):  # while the others serve, connections wait until this one can, too
                await asyncio.wait_for(self._may_accept.wait(), self._parts.open_seconds)
            if not self._server.should_exit:
                await self._server.serve(sockets=[self._listener])
        finally:
            loop.remove_reader(self._channel.socket)
            self._service.close()
            self._close_scheduler()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self._context.term()
        return self._status

    async def _count_heartbeats(self) -> None:
        """Show that this worker lives, and look whether the engine process does."""
        while True:
            self._usage.add(HEARTBEATS, 1)
            self._silence.look()
            if self._scheduler is not None:
                self._scheduler.hear(is_silent=self._silence.is_long)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        self._take_if_serving()
        await self._app(scope, receive, send)

    # The supervisor's messages

    def _on_readable(self) -> None:
        messages = self._channel.receive()
        if messages is None:  # the supervisor has ended, and the engine process does, too
            asyncio.get_running_loop().remove_reader(self._channel.socket)
            messages = [EngineDown("the supervisor has ended", is_last=True), Stop(), Exit()]
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, EngineUp):
            self._close_scheduler()
            identity = f"{self._number}-{os.getpid()}"
            self._scheduler = RemoteScheduler(self._context, message.endpoint, identity)
            self._silence = Silence(self._parts.engine_usage)
            self._opening = loop.create_task(self._open(self._scheduler, message.generation))
        elif isinstance(message, EngineDown):
            self._opened = None
            if self._scheduler is not None:
                self._scheduler.engine_ended(message.reason, is_last=message.is_last)
            if not message.is_last:
                self._service.health.restart(message.reason)
            self._may_accept.set()
        elif isinstance(message, Stop) and self._draining is None:
            self._draining = loop.create_task(self._drain())
            self._may_accept.set()
        elif isinstance(message, Exit):
            self._may_exit.set()

    async def _drain(self) -> None:
        await self._service.lifecycle.drain(self._parts.options.shutdown_grace)
        self._channel.send(Drained())
        await self._may_exit.wait()
        self._server.should_exit = True

    # The engine

    async def _open(self, scheduler: RemoteScheduler, generation: int) -> None:
        """Connect to an engine process that is ready, and load what prepares requests."""
        loop = asyncio.get_running_loop()
        try:
            description = await scheduler.connect()
            if self._frontend is None:
                loader = ThreadPoolExecutor(1, "prefixwise-load")  # the end of the loop waits for its own one
                self._frontend = await loop.run_in_executor(loader, self._load_frontend, description)
                relax_garbage_collection()
            if scheduler is not self._scheduler:  # there is another engine already
                return
            config, tokenizer = self._frontend
            # It has what an engine uses of a scheduler once the model is loaded.
            engine = ScoringEngine(config, cast(Scheduler, scheduler), tokenizer)
            self._opened = OpenedEngine(generation, scheduler, engine, description)
            self._channel.send(Ready(generation))
            self._take_if_serving()  # as all others do
            self._may_accept.set()
        except asyncio.CancelledError:  # the engine process has ended meanwhile
            return
        except PrefixwiseError as error:
            self._fail(error)
        except Exception as error:
            log.exception("a worker cannot use the engine")
            self._fail(BackendError(f"an HTTP worker cannot start: {error!r}"))

    def _take_if_serving(self) -> None:
        """Take work from now on, if the supervisor says that all workers do."""
        opened, service = self._opened, self._service
        if opened is None or self._parts.usage.total(SERVING) != opened.generation:
            return
        self._opened = None
        service.engine_versions = opened.description.versions
        service.peak_host_bytes = lambda: opened.scheduler.snapshot.peak_host_bytes
        service.open(opened.engine, {**service.options.describe(), **opened.description.configuration})

    def _load_frontend(self, description: Description) -> tuple[EngineConfig, TextTokenizer | None]:
        """Raises BackendError if this is not the model of the engine process, as after an update of a hub's."""
        config, tokenizer = self._parts.open_frontend()
        ours, theirs = (config.model_name, config.revision), (description.model_name, description.revision)
        if ours != theirs:
            raise BackendError(f"the engine process has loaded the model and revision {theirs}, an HTTP worker {ours}")
        return config, tokenizer

    def _fail(self, error: PrefixwiseError) -> None:
        self._channel.send(Failed(fault_of(error)))
        self._status = 1
        self._server.should_exit = True
        self._may_accept.set()

    def _close_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = self._opened = None

    # Metrics

    async def _give_metrics(self) -> None:
        """Answer the workers that ask for this one's."""
        replies = self._async_context.socket(zmq.REP)
        endpoint = self._parts.metrics_endpoint(self._number)
        try:
            Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)  # of a worker that was killed
            replies.bind(endpoint)
            while True:
                await replies.recv()
                await replies.send(self._service.metrics.snapshot())
        except (OSError, zmq.ZMQError) as error:
            log.error("HTTP worker %d cannot give its metrics: %s", self._number, error)
        finally:
            replies.close(linger=0)  # in any case: the end of the context waits for it

    async def _ask_others(self) -> Sequence[bytes]:
        """The metrics of all other workers; of those that do not answer in time, the counts that were shown last."""
        others = [worker for worker in range(self._parts.num_workers) if worker != self._number]
        found = await asyncio.gather(*(self._ask(worker) for worker in others))
        return [each for each in found if each is not None]

    async def _ask(self, worker: int) -> bytes | None:
        asking = self._async_context.socket(zmq.REQ)
        try:
            asking.connect(self._parts.metrics_endpoint(worker))
            await asking.send(b"")
            return await asyncio.wait_for(asking.recv(), PEER_SECONDS)
        except TimeoutError:
            log.warning("HTTP worker %d did not give its metrics within %g s", worker, PEER_SECONDS)
            file = self._parts.counts_file(worker)
            return file.read_bytes() if file.exists() else None
        finally:
            asking.close(linger=0)
