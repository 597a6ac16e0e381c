"""`Service`: the state that all handlers share. The engine arrives when it is warm; until then the phase is starting.

`Lifecycle` is the server's phase and the requests in flight. `ServedNames` are the names of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from enum import StrEnum
from typing import TypeVar

from prefixwise.contract.cancellation import cancellable
from prefixwise.contract.errors import ModelNotFoundError, UnavailableError, quote
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.health import EngineHealth, EngineState
from prefixwise.engine.loras import LoadedLora
from prefixwise.engine.reranker import Reranker
from prefixwise.host import give_back_free_memory, peak_memory_bytes
from prefixwise.server.body_memory import BodyMemory, BodyShare
from prefixwise.server.config import ReportSource, ServerOptions
from prefixwise.server.context import RequestContext
from prefixwise.server.logs import dropped_lines
from prefixwise.server.metrics import Metrics
from prefixwise.server.tracing import open_tracing
from prefixwise.server.usage import IN_FLIGHT, Usage

POOL_THREADS = 2  # so that one long request does not block the next
LARGE_POOL_THREADS = 2
LARGE_BODY_BYTES = 2**20  # of a request and its response: what it has freed is given back to the host
TRIM_SECONDS = 5.0  # after the first such request, for all until then
_ABORT_SECONDS = 5.0  # for answering the requests that the grace period has cut off
_LOADING_RETRY_SECONDS, _STOPPING_RETRY_SECONDS = 5, 1  # for clients; another server may be ready already
_ANY_NAME = "default"  # in a request: the served model

Result = TypeVar("Result")

log = logging.getLogger("prefixwise")


class Phase(StrEnum):
    """The phases of a server, in their order."""

    STARTING = "starting"  # the model is loading or warming up
    READY = "ready"
    DRAINING = "draining"  # after a signal: requests in flight finish, new ones get 503
    STOPPED = "stopped"


class Lifecycle:
    """The phase of one server, and its requests in flight. Runs on the event loop; `launch.py` changes the phase."""

    def __init__(self, usage: Usage | None = None) -> None:
        self.phase = Phase.STARTING
        self._usage = usage or Usage()
        self._in_flight: dict[RequestContext, asyncio.Task[object]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_stopping(self) -> bool:
        return self.phase in (Phase.DRAINING, Phase.STOPPED)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def check_ready(self) -> None:
        """Raises UnavailableError unless the server takes work."""
        if self.phase is Phase.READY:
            return
        if self.phase is Phase.STARTING:
            message = "the model is still loading or warming up, so nothing can be scored yet; try again soon"
            raise UnavailableError(message, code="not_ready", retry_after=_LOADING_RETRY_SECONDS)
        raise shutting_down()

    def enter(self, context: RequestContext) -> None:
        """A request has arrived, in the current task."""
        task = asyncio.current_task()
        assert task is not None, "a request is answered in a task"
        self._in_flight[context] = task
        self._usage.add(IN_FLIGHT, 1)
        self._idle.clear()

    def leave(self, context: RequestContext) -> None:
        """The request is answered, or its client has disconnected."""
        del self._in_flight[context]
        self._usage.add(IN_FLIGHT, -1)
        if not self._in_flight:
            self._idle.set()

    def become_ready(self) -> None:
        """The engine is warm. Does nothing if the server is already stopping."""
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    async def drain(self, grace_seconds: float) -> None:
        """Take no more work, let requests in flight finish, and cancel the rest after `grace_seconds`."""
        self.phase = Phase.DRAINING
        for context in self._in_flight:
            context.end_connection()
        if not await self._becomes_idle(grace_seconds):
            for context, task in list(self._in_flight.items()):
                context.is_aborted = True
                task.cancel()
            await self._becomes_idle(_ABORT_SECONDS)
        self.phase = Phase.STOPPED

    async def _becomes_idle(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


def shutting_down() -> UnavailableError:
    """The error of a request that arrives, or is still running, when the server stops."""
    message = "the server is shutting down; send the request to another one, or again later"
    return UnavailableError(message, code="shutting_down", retry_after=_STOPPING_RETRY_SECONDS)


class ServedNames:
    """`/v1/models` lists the `public` names, and the first one stands in responses. Requests may use `others` too."""

    def __init__(self, public: Iterable[str], others: Iterable[str] = (), engine: ScoringEngine | None = None) -> None:
        self.public = tuple(dict.fromkeys(public))
        self._own = tuple(dict.fromkeys((*self.public, *others)))
        self._engine = engine

    @property
    def loras(self) -> tuple[LoadedLora, ...]:
        """The LoRA adapters that are loaded now."""
        return () if self._engine is None else self._engine.loras.listed()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name that a request may use."""
        return (*self._own, *(lora.name for lora in self.loras))

    @property
    def _has_loras(self) -> bool:
        return self._engine is not None and self._engine.backend.info.max_loras > 0

    def answer_to(self, sent: str | None) -> str:
        """The name for the response: the one that was sent, or the first. Raises model_not_found."""
        if sent in self.all and sent is not None:
            return sent
        if sent is None or sent == _ANY_NAME:
            return self.public[0]
        served = ", ".join(map(quote, (*self.public, *(lora.name for lora in self.loras))))
        message = f'model must be one of {served} or "{_ANY_NAME}", got {quote(sent)}'
        raise ModelNotFoundError(message, code="model_not_found", param="model")

    def answer_to_any(self, sent: str | None, *, strict: bool) -> str:
        """As `answer_to`, for clients that always send some model's name: unless `strict`, an unknown name means the
        served model. With LoRA adapters no unknown name does: it may be that of an adapter that is not loaded."""
        return self.answer_to(sent if strict or self._has_loras or sent in self.all else None)


class Service:
    """One process's options, engine, metrics and thread pool. `usage`: of all processes of the server."""

    def __init__(self, options: ServerOptions, reports: ReportSource | None = None, usage: Usage | None = None) -> None:
        usage = usage or Usage()
        self.options = options
        self.reports = reports
        self.lifecycle = Lifecycle(usage)
        self.metrics = Metrics()
        self.metrics.watch_log(dropped_lines)
        self.other_metrics: Callable[[], Awaitable[Sequence[bytes]]] | None = None  # of the server's other processes
        self.tracing = open_tracing(options)
        self.body_memory = BodyMemory(options.max_body_memory, usage)
        self.metrics.watch_bodies(lambda: self.body_memory.taken)
        self.engine_versions: Mapping[str, str] = {}  # of packages, where the engine is in another process
        self.peak_host_bytes: Callable[[], int] = peak_memory_bytes  # of the engine's process
        self.is_local = False  # only this machine can connect; `launch.py` knows
        self.names = ServedNames(options.served_model_names)
        self.configuration: Mapping[str, object] = options.describe()  # `open` replaces it by the resolved one
        self.created = time.time()
        self.health = EngineHealth()  # the engine's, once it is open
        self._engine: ScoringEngine | None = None
        self._reranker: Reranker | None = None
        self._logged: set[str] = set()
        self._is_trim_due = False
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="prefixwise-http")
        self._large_pool = ThreadPoolExecutor(LARGE_POOL_THREADS, thread_name_prefix="prefixwise-large")

    def open(self, engine: ScoringEngine, configuration: Mapping[str, object] | None = None) -> None:
        """The engine is warm: take work from now on. Again, where another engine takes its place."""
        config = engine.config
        public = self.options.served_model_names or (config.model_name,)
        self.names = ServedNames(public, (*config.served_names, config.model_name), engine)
        if configuration is not None:
            self.configuration = {name: value for name, value in configuration.items() if name != "api_key"}
        self._engine, self._reranker = engine, Reranker(engine)
        self.health = engine.scheduler.health
        self.metrics.watch(engine)
        self.lifecycle.become_ready()

    def check_ready(self) -> None:
        """Raises UnavailableError unless the server takes work and its engine scores."""
        self.health.check()
        self.lifecycle.check_ready()

    @property
    def status(self) -> str:
        """The phase of the server or, if its engine does not score, the engine's state."""
        state = self.health.state
        return self.lifecycle.phase.value if state is EngineState.OK else state.value

    @property
    def engine(self) -> ScoringEngine:
        """Only for handlers that need the engine: the router answers 503 for them before it is open."""
        assert self._engine is not None, "readiness is checked before a handler is called"
        return self._engine

    @property
    def reranker(self) -> Reranker:
        """The same engine, for documents."""
        assert self._reranker is not None, "readiness is checked before a handler is called"
        return self._reranker

    @property
    def engine_if_open(self) -> ScoringEngine | None:
        return self._engine

    def log_once(self, warning: str) -> None:
        """Log a warning that many responses repeat, the first time only. It must not hold what a client has sent."""
        if warning not in self._logged:
            self._logged.add(warning)
            log.warning("%s", warning)

    async def in_pool(self, work: Callable[[], Result], *, is_large: bool = False) -> Result:
        """Run long work on a thread, so that the event loop can answer other requests meanwhile.

        If the request is cancelled, as at its deadline, work that has not begun is dropped, and work that has begun
        ends at its next `check_cancelled`. Work on large bodies has threads of its own, so that small requests do not
        wait for it; their number bounds its memory.
        """
        is_cancelled = threading.Event()

        def run() -> Result:
            with cancellable(is_cancelled.is_set):
                return work()

        pool = self._large_pool if is_large else self._pool
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, run)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def ask_engine(self, work: Callable[[], Result]) -> Result:
        """Run work that asks the engine about itself: on a thread where the engine is in another process, and may take
        its time."""
        if self.other_metrics is None:
            return work()
        return await asyncio.to_thread(work)

    def end_share(self, share: BodyShare) -> None:
        """A request is over: its memory is free, and soon the host's again if it was large. On the event loop."""
        is_large = share.bytes >= LARGE_BODY_BYTES
        share.give_back()
        if is_large and not self._is_trim_due:
            self._is_trim_due = True
            asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        self._is_trim_due = False
        with contextlib.suppress(RuntimeError):  # the server is closed
            self._pool.submit(give_back_free_memory)

    def close(self) -> None:
        """Stop the threads. The engine stays open: its owner closes it."""
        for pool in (self._pool, self._large_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self.tracing is not None:
            self.tracing.close()
