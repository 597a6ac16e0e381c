"""From options to a running server: bind, answer 503 while the model loads, serve, drain, exit.

bind        first, so that a port in use fails before minutes are spent on a model
load        on a thread, while `/health` answers not_ready
serve       until a signal, or until the engine fails
drain       requests in flight finish, new work gets 503; a second signal (other than SIGHUP) exits at once
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
import uvloop

from prefixwise.contract.errors import BackendError, PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.host import NO_THREAD, lacks_threads, num_open_files, raise_file_limit
from prefixwise.server.app import make_app
from prefixwise.server.config import ReportSource, ServerOptions, is_loopback
from prefixwise.server.connections import RESERVE, Connections
from prefixwise.server.http_protocol import HttpProtocol
from prefixwise.server.logs import flush_log, log_configuration, set_up_logging
from prefixwise.server.service import Service
from prefixwise.server.usage import Usage

log = logging.getLogger("prefixwise")

OpenEngine = Callable[[], ScoringEngine]
ResolvedConfig = Callable[[ScoringEngine], Mapping[str, object]]

_BACKLOG = 2048
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ENGINE_FAILED_STATUS = 70  # EX_SOFTWARE: a restart may help
ENGINE_SECONDS = 5.0  # for a forward pass that is still running then
_EXIT_SECONDS = 10.0  # beyond the grace period, for a server whose engine has failed
_LAST_REQUEST_SECONDS = 0.2  # for requests that are on their way when the server stops accepting connections
_CLOSE_SECONDS = 2  # for connections that are still open after the drain
_OTHER_FILES = 128  # that the process opens beside its connections: weights, devices, reports
_LEAST_CONNECTIONS = 8  # where fewer files may be open
_LEAST_FILES = 64  # for these connections, those of `RESERVE`, the event loop, the log and a small model
_TICKS_PER_SWEEP = 10  # uvicorn ticks ten times a second


def run_server(
    options: ServerOptions,
    open_engine: OpenEngine,
    resolved_config: ResolvedConfig,
    reports: ReportSource | None = None,
) -> None:
    """Serve until a signal. Raises PrefixwiseError where the port is taken or the model cannot be loaded."""
    set_up_logging(options)
    check_file_limit()
    listener = bind(options)
    log.info("listening on %s", address_of(listener, options.host))
    try:
        _Launch(options, listener, open_engine, resolved_config, reports).run()
    finally:
        flush_log()  # before the error of the command line


def check_file_limit() -> None:
    """Raises BackendError where no server can run: this process may open too few files."""
    allowed = raise_file_limit(_LEAST_FILES)
    if allowed < _LEAST_FILES:
        message = f"a server needs to open at least {_LEAST_FILES} files, and this process may open {allowed}"
        raise BackendError(f"{message}; raise ulimit -n")


def bind(options: ServerOptions, *, port: int | None = None, shares_port: bool = False) -> socket.socket:
    """A socket that listens already: clients that connect now wait until the server answers.

    `port`: instead of the option's. `shares_port`: the kernel spreads connections over all such sockets of a port.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener: socket.socket | None = None
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)  # without IPv6 there is none of its family
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((options.host, options.port if port is None else port))
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot listen on {options.host} port {options.port}: {reason}; choose another --port or --host"
        raise BackendError(message) from None
    listener.setblocking(False)
    return listener


def address_of(listener: socket.socket, host: str) -> str:
    """The URL."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again after its shutdown, which would change the exit status."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    @classmethod
    def of(cls, service: Service, usage: Usage | None = None) -> HttpServer:
        """A server of this process. `usage`: of all processes of the server."""
        options = service.options
        connections = Connections(options, service.metrics, _max_connections(options), usage)
        return cls(_uvicorn_config(service, connections), connections)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SWEEP == 0:
            protocols: list[Any] = list(self.server_state.connections)
            try:
                self._connections.sweep(protocols, asyncio.get_running_loop().time())
            except Exception:  # would end the server
                log.exception("idle connections were not closed")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, then answer what is on its way: a connection that is closed under a request is reset, which
        a proxy shows to its client as 502."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        await asyncio.sleep(_LAST_REQUEST_SECONDS)
        await super().shutdown(sockets)


class _Launch:
    """One run of a server, from the first response to the last."""

    def __init__(
        self,
        options: ServerOptions,
        listener: socket.socket,
        open_engine: OpenEngine,
        resolved_config: ResolvedConfig,
        reports: ReportSource | None,
    ) -> None:
        self._options = options
        self._listener = listener
        self._open_engine = open_engine
        self._resolved_config = resolved_config
        self._service = Service(options, reports)
        self._service.is_local = is_loopback(listener.getsockname()[0])
        self._server = HttpServer.of(self._service)
        self._loading = threading.Thread(target=self._load, name="prefixwise-load", daemon=True)
        self._failure: PrefixwiseError | None = None
        self._has_engine_failed = False
        self._draining: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Return after a drain. Raises the error of a model that cannot be loaded."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())
        self._service.close()
        if self._has_engine_failed:
            log.critical("exiting with status %d: the engine has failed", ENGINE_FAILED_STATUS)
            exit_at_once(ENGINE_FAILED_STATUS)  # the thread of a device that hangs cannot be joined
        if self._failure is not None:
            raise self._failure
        if self._loading.is_alive():
            exit_at_once(0)  # a model that is loading cannot be stopped
        engine = self._service.engine_if_open
        if engine is not None and not close_engine(engine):
            exit_at_once(0)
        log.info("stopped")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it for SIGHUP
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._loading.start()
        await self._server.serve(sockets=[self._listener])

    # On the loading thread

    def _load(self) -> None:
        try:
            engine = self._open_engine()
            configuration = self._resolved_config(engine)
        except BaseException as error:
            self._from_thread(self._on_failure, loading_error(error))
        else:
            relax_garbage_collection()
            self._from_thread(self._on_loaded, engine, configuration)

    def _from_thread(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # On the event loop

    def _on_loaded(self, engine: ScoringEngine, configuration: Mapping[str, object]) -> None:
        self._service.open(engine, {**self._options.describe(), **configuration})
        log_configuration(self._service.configuration, as_json=self._options.log_json)
        log.info("ready on %s", address_of(self._listener, self._options.host))
        engine.scheduler.health.when_failed(lambda _: self._from_thread(self._on_engine_failed))

    def _on_engine_failed(self) -> None:
        """Requests have their errors already: send them, and exit, so that a supervisor starts another server."""
        self._has_engine_failed = True
        seconds = self._options.shutdown_grace + _EXIT_SECONDS
        last = threading.Timer(seconds, exit_at_once, (ENGINE_FAILED_STATUS,))
        last.daemon = True
        last.start()
        if self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    def _on_failure(self, error: PrefixwiseError) -> None:
        self._failure = error
        self._server.should_exit = True

    def _on_signal(self, number: int) -> None:
        if self._draining is not None:
            if number == signal.SIGHUP:
                return  # the shell and the kernel both send it when a terminal is closed
            log.warning("%s again: exiting at once", signal.Signals(number).name)
            exit_at_once(128 + number)
        in_flight = self._service.lifecycle.num_in_flight
        log.info("%s: shutting down, %d requests in flight", signal.Signals(number).name, in_flight)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        await self._service.lifecycle.drain(self._options.shutdown_grace)
        self._server.should_exit = True


def loading_error(error: BaseException) -> PrefixwiseError:
    """What a user is told of a model that cannot be loaded. Logs the traceback of an error that is not ours."""
    if isinstance(error, PrefixwiseError):
        return error
    if lacks_threads(error):
        return BackendError(f"the model cannot be loaded: {NO_THREAD}")
    log.error("loading the model failed", exc_info=error)
    return BackendError(f"the model cannot be loaded: {error!r}")


def close_engine(engine: ScoringEngine) -> bool:
    """Close the engine. False if its device is still busy after some seconds."""
    closing = threading.Thread(target=engine.close, name="prefixwise-close", daemon=True)
    closing.start()
    closing.join(ENGINE_SECONDS)
    if closing.is_alive():
        log.warning("the device is still busy after %g s: exiting without it", ENGINE_SECONDS)
        return False
    return True


def relax_garbage_collection() -> None:
    """Exclude the loaded model from garbage collection, and collect less often: requests leave few reference cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def _max_connections(options: ServerOptions) -> int:
    """The option's, or fewer, so that the limit of open files is never reached: `accept` would fail then."""
    files = num_open_files() + _OTHER_FILES + RESERVE
    allowed = raise_file_limit(options.max_connections + files) - files
    if allowed >= options.max_connections:
        return options.max_connections
    allowed = max(allowed, _LEAST_CONNECTIONS)
    log.warning("at most %d connections instead of %d: raise ulimit -n for more", allowed, options.max_connections)
    return allowed


def _uvicorn_config(service: Service, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service),
        http=partial(HttpProtocol, connections),  # type: ignore[arg-type]  # uvicorn calls it
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=service.options.keep_alive_timeout,  # type: ignore[arg-type]  # seconds; may have a fraction
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )


def exit_at_once(status: int) -> None:
    """Exit without waiting for threads."""
    flush_log()  # `logging.shutdown` waits for the log of the process that has forked this one, too
    os._exit(status)
