"""The supervisor: `serve --http-workers N`. It binds the port and forks the engine process and the workers.

    supervisor         signals, deaths, restarts; no threads but the log's, no model, no HTTP
    ├── engine process scheduler and device
    └── N workers      HTTP, JSON, checks, tokenization, planning, rendering

Children obey their channel alone, and ignore signals: a terminal or an init system signals all processes of a group.
Where the supervisor ends, the channels close, and the children end, too. An engine process or a worker that dies is
forked again; after MAX_DEATHS of one in DEATH_SECONDS the server gives up. One that is frozen shows no heartbeat in
shared memory (`server/usage.py`), and is killed; so is a worker that does not become ready.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import NoReturn

from prefixwise.contract.errors import BackendError, PrefixwiseError
from prefixwise.server.config import ReportSource, ServerOptions
from prefixwise.server.launch import (
    ENGINE_FAILED_STATUS,
    ENGINE_SECONDS,
    SIGNALS,
    OpenEngine,
    ResolvedConfig,
    address_of,
    check_file_limit,
    exit_at_once,
)
from prefixwise.server.logs import flush_log, log_configuration, set_up_logging
from prefixwise.server.usage import ENGINE_RESTARTS, IN_FLIGHT, SERVING, WORKER_RESTARTS, SharedUsage, Usage
from prefixwise.server.workers.channel import (
    Channel,
    Drained,
    EngineDown,
    EngineUp,
    Exit,
    Failed,
    Loaded,
    Message,
    Ready,
    Stop,
    WorkerDown,
)
from prefixwise.server.workers.children import Child, Deaths, fork
from prefixwise.server.workers.engine_process import run_engine
from prefixwise.server.workers.messages import error_of
from prefixwise.server.workers.sockets import bind_workers, keep_socket_folder, make_socket_folder
from prefixwise.server.workers.worker_process import OpenFrontend, ServerParts, run_worker

log = logging.getLogger("prefixwise")

_POLL_SECONDS = 0.5  # between two looks at time limits
_KEEP_SECONDS = 3600.0  # between two looks at the folder of the sockets; what cleans TMPDIR takes files of days
_EXIT_SECONDS = 12.0  # beyond the grace period, for all children to end


def run_workers(
    options: ServerOptions,
    open_engine: OpenEngine,
    resolved_config: ResolvedConfig,
    reports: ReportSource | None = None,
    *,
    open_frontend: OpenFrontend,
) -> None:
    """Serve with `options.http_workers` processes until a signal. Raises PrefixwiseError where the port is taken, the
    model cannot be loaded or a process cannot be started."""
    set_up_logging(options)
    check_file_limit()
    num_workers = options.http_workers or 1
    listeners = bind_workers(options, num_workers)
    log.info("listening on %s", address_of(listeners[0], options.host))
    folder = make_socket_folder()
    try:
        parts = ServerParts(options, folder, SharedUsage(num_workers + 2), num_workers, open_frontend, reports)
        Supervisor(parts, listeners, open_engine, resolved_config).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        flush_log()  # before the error of the command line


class Supervisor:
    """One run of a server with workers."""

    def __init__(
        self,
        parts: ServerParts,
        listeners: list[socket.socket],
        open_engine: OpenEngine,
        resolved_config: ResolvedConfig,
    ) -> None:
        self._parts = parts
        self._options = parts.options
        self._usage = parts.usage.of(parts.num_workers)
        self._listeners = listeners
        self._open_engine = open_engine
        self._resolved_config = resolved_config
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, Child] = {}  # by process id
        self._deaths: dict[int | None, Deaths] = {}  # by the worker's number; None: of the engine process
        self._generation = 0  # of engine processes
        self._engine_end: str | None = None  # how the last one before has ended
        self._has_loaded = False  # an engine process
        self._watchdog_timeout = 0.0  # seconds, as the engine process has told; 0: no child is killed
        self._was_ready = False  # the server
        self._keep_at = 0.0  # the next look at the folder of the sockets
        self._serve_by: float | None = None  # when the workers that are ready do not wait for the others any more
        self._is_draining = False
        self._is_clean = True  # the engine process has ended by itself
        self._exit_by: float | None = None  # when children that must end are killed
        self._failure: PrefixwiseError | None = None
        self._gives_up: str | None = None

    def run(self) -> None:
        """Return after a drain. Raises the error of a model that cannot be loaded."""
        with self._signals() as wakeup:
            self._selector.register(wakeup, selectors.EVENT_READ)
            gc.collect()
            gc.freeze()  # what children inherit stays shared
            self._start_all()
            while self._children:
                self._iterate(wakeup)
        if self._failure is not None:
            raise self._failure
        if self._gives_up is not None:
            log.critical("exiting with status %d: %s", ENGINE_FAILED_STATUS, self._gives_up)
            self._exit(ENGINE_FAILED_STATUS)
        if self._is_clean:
            log.info("stopped")

    def _iterate(self, wakeup: socket.socket) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is wakeup:
                for number in wakeup.recv(64):
                    if number in SIGNALS:
                        self._on_signal(number)
            else:
                self._on_readable(key.data)
        self._reap()
        for child in self._children.values():
            child.watch(self._watchdog_timeout)
        if monotonic() > self._keep_at:
            self._keep_folder()
        if self._serve_by is not None and monotonic() > self._serve_by:
            seconds = self._parts.open_seconds
            log.warning("an HTTP worker is not ready after %g s: the others serve without it", seconds)
            self._serve()
        if self._exit_by is not None and monotonic() > self._exit_by:
            self._exit_by = None
            for child in self._children.values():
                log.warning("%s does not end: killed", child.name)
                child.kill()

    def _keep_folder(self) -> None:
        self._keep_at = monotonic() + _KEEP_SECONDS
        try:
            keep_socket_folder(self._parts.folder)
        except BackendError as error:  # processes that are connected go on
            log.error("no process can take the place of one that ends: %s", error)

    # Signals

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """A socket that has a byte for every signal. SIGHUP stays ignored if it is, as under nohup."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        caught = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, lambda *_: None) for number in (*caught, signal.SIGCHLD)}
        earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            reader.close()
            writer.close()

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._is_draining:
            if number == signal.SIGHUP:
                return  # the shell and the kernel both send it when a terminal is closed
            log.warning("%s again: exiting at once", name)
            self._exit(128 + number)
        log.info("%s: shutting down, %d requests in flight", name, self._parts.usage.total(IN_FLIGHT))
        self._drain()

    def _exit(self, status: int) -> NoReturn:
        for child in self._children.values():
            child.kill()
        shutil.rmtree(self._parts.folder, ignore_errors=True)
        exit_at_once(status)
        raise AssertionError("the process has ended")

    # Shutdown: workers finish their requests, then the engine process ends

    def _drain(self) -> None:
        self._serve_by = None
        self._is_draining = True
        self._exit_by = monotonic() + self._options.shutdown_grace + _EXIT_SECONDS
        for worker in self._workers():
            worker.channel.send(Stop())
        if not self._workers():
            self._stop_engine()

    def _exit_if_drained(self) -> None:
        """Workers end together: until then every one of them refuses what comes to its socket."""
        if all(worker.is_drained for worker in self._workers()):
            for listener in self._listeners:
                listener.close()  # no client waits for nobody while the engine process ends
            self._tell_workers(Exit())

    def _stop_engine(self) -> None:
        engine = self._engine()
        if engine is not None:
            exit_by = monotonic() + ENGINE_SECONDS + _EXIT_SECONDS
            self._exit_by = exit_by if self._exit_by is None else min(self._exit_by, exit_by)  # one limit for all
            engine.channel.send(Stop())

    # Messages

    def _on_readable(self, child: Child) -> None:
        messages = child.channel.receive()
        if messages is None:  # it has ended and is reaped in a moment, or has not listened for long
            self._selector.unregister(child.channel.socket)
            child.kill()
            return
        for message in messages:
            self._on_message(child, message)

    def _on_message(self, child: Child, message: Message) -> None:
        if isinstance(message, Loaded):
            child.become_ready(self._usage_of(child))
            self._watchdog_timeout = message.watchdog_timeout
            if not self._has_loaded:
                self._has_loaded = True
                shown = {**self._options.describe(), **message.configuration}
                log_configuration(shown, as_json=self._options.log_json)
            for worker in self._workers():
                worker.open(self._engine_up())
        elif isinstance(message, Ready) and message.generation == self._generation:
            self._on_ready(child)
        elif isinstance(message, Failed):
            child.fault = message.fault
        elif isinstance(message, Drained):
            child.is_drained = True
            self._exit_if_drained()

    def _on_ready(self, worker: Child) -> None:
        worker.become_ready(self._usage_of(worker))
        if self._is_draining:
            return
        if all(each.is_ready for each in self._children.values()):
            self._serve()
            log.info("ready on %s", address_of(self._listeners[0], self._options.host))
        elif not self._usage.own(SERVING) and self._serve_by is None:
            self._serve_by = monotonic() + self._parts.open_seconds

    def _serve(self) -> None:
        """All workers that are ready take requests from now on, and each of the others once it is."""
        self._was_ready, self._serve_by = True, None
        self._usage.set(SERVING, self._generation)

    def _engine_up(self) -> EngineUp:
        return EngineUp(self._generation, self._endpoint())

    def _endpoint(self) -> str:
        return f"ipc://{self._parts.folder}/engine-{self._generation}"

    # Children

    def _usage_of(self, child: Child) -> Usage:
        return self._parts.engine_usage if child.number is None else self._parts.usage.of(child.number)

    def _workers(self) -> list[Child]:
        return [child for child in self._children.values() if child.number is not None]

    def _engine(self) -> Child | None:
        return next((child for child in self._children.values() if child.number is None), None)

    def _start_all(self) -> None:
        try:
            self._start_engine()
            for number in range(self._parts.num_workers):
                self._start_worker(number)
        except BackendError:
            for child in self._children.values():
                child.kill()
            raise

    def _start_engine(self) -> None:
        self._generation += 1
        endpoint = self._endpoint()
        self._fork(
            "the engine process",
            None,
            lambda channel: run_engine(
                channel, endpoint, self._parts.engine_usage, self._open_engine, self._resolved_config
            ),
        )

    def _start_worker(self, number: int) -> None:
        listener = self._listeners[number]
        worker = self._fork(
            f"HTTP worker {number}", number, lambda channel: run_worker(channel, number, listener, self._parts)
        )
        engine = self._engine()
        if engine is not None and engine.is_ready:
            worker.open(self._engine_up())
        elif self._engine_end is not None:
            worker.channel.send(EngineDown(self._engine_end, is_last=False))

    def _fork(self, name: str, number: int | None, main: Callable[[Channel], int]) -> Child:
        child = fork(name, number, partial(self._run_child, number, main, os.getpid()))
        self._children[child.pid] = child
        self._selector.register(child.channel.socket, selectors.EVENT_READ, child)
        return child

    def _run_child(self, number: int | None, main: Callable[[Channel], int], supervisor: int, channel: Channel) -> int:
        """In the child. It lets go of its siblings, and of the supervisor's log, whose thread is not here."""
        self._selector.close()
        for sibling in self._children.values():
            sibling.channel.close()
        own = None if number is None else self._listeners[number]
        for listener in self._listeners:
            if listener is not own:
                listener.close()
        logging.getLogger().handlers.clear()
        set_up_logging(self._options)
        status = main(channel)
        if os.getppid() != supervisor:  # it was killed, and has left this behind
            shutil.rmtree(self._parts.folder, ignore_errors=True)
        return status

    # Deaths

    def _reap(self) -> None:
        """Of all processes: the first one of a container inherits those that a dead child has started."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self._children:
                self._on_end(self._children[pid], os.waitstatus_to_exitcode(status))

    def _on_end(self, child: Child, status: int) -> None:
        if child.channel.socket in self._selector.get_map():
            self._selector.unregister(child.channel.socket)
            for message in child.channel.receive() or ():  # its last ones
                self._on_message(child, message)
        child.channel.close()
        del self._children[child.pid]
        if child.number is None:
            self._on_engine_end(child, status)
        else:
            self._on_worker_end(child, child.number, status)

    def _on_engine_end(self, child: Child, status: int) -> None:
        reason = child.describe_end(status)
        self._serve_by = None
        self._usage.set(SERVING, 0)
        if self._is_draining:
            self._is_clean = status == 0
            self._tell_workers(EngineDown(reason, is_last=True))
            return
        self._engine_end = reason
        is_last = self._is_last_death(child, reason)
        self._tell_workers(EngineDown(reason, is_last=is_last))
        if is_last:
            self._drain()
            return
        for worker in self._workers():
            worker.lose_engine()
        self._usage.add(ENGINE_RESTARTS, 1)
        self._start_again(self._start_engine)

    def _on_worker_end(self, child: Child, number: int, status: int) -> None:
        self._parts.usage.clear(number)
        if self._is_draining:
            self._exit_if_drained()
            if not self._workers():
                self._stop_engine()
            return
        engine = self._engine()
        if engine is not None:
            engine.channel.send(WorkerDown(child.identity))
        if self._is_last_death(child, child.describe_end(status)):
            self._drain()
        else:
            self._usage.add(WORKER_RESTARTS, 1)
            self._start_again(partial(self._start_worker, number))

    def _start_again(self, start: Callable[[], None]) -> None:
        try:
            keep_socket_folder(self._parts.folder)
            start()
        except BackendError as error:  # the other processes finish what they have
            self._gives_up = str(error)
            self._drain()

    def _is_last_death(self, child: Child, reason: str) -> bool:
        """Whether the server gives up. What cannot be loaded at its start ends it at once, as that of one process."""
        if child.fault is not None and not self._was_ready:
            self._failure = error_of(child.fault)
            return True
        if child.fault is not None:
            reason = f"{reason}: {child.fault.message}"
        too_many = self._deaths.setdefault(child.number, Deaths()).count(monotonic(), was_ready=child.was_ready)
        if too_many is None:
            log.error("%s: starting it again", reason)
            return False
        self._gives_up = f"{reason}, {too_many}"
        return True

    def _tell_workers(self, message: Message) -> None:
        for worker in self._workers():
            worker.channel.send(message)
