"""`Service`: what all routes share. The engine comes into it when it is warm; before that only its absence is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.reranker import Reranker
from prefixwise.server.config import ServerOptions
from prefixwise.server.lifecycle import Lifecycle
from prefixwise.server.metrics import Metrics
from prefixwise.server.names import ServedNames
from prefixwise.server.reports import ReportSource

POOL_THREADS = 2  # one large request must not make all others of its kind wait

Result = TypeVar("Result")

log = logging.getLogger("prefixwise")


class Service:
    """One server's options, engine, figures and helpers."""

    def __init__(self, options: ServerOptions, reports: ReportSource | None = None) -> None:
        self.options = options
        self.reports = reports
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        self.names = ServedNames(options.served_model_names)
        self.configuration: Mapping[str, object] = options.describe()  # with every `auto` settled, once that is known
        self.created = time.time()
        self._engine: ScoringEngine | None = None
        self._reranker: Reranker | None = None
        self._logged: set[str] = set()
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="prefixwise-http")

    def open(self, engine: ScoringEngine, configuration: Mapping[str, object] | None = None) -> None:
        """The engine is warm: from now on work is taken."""
        config = engine.config
        public = self.options.served_model_names or (config.model_name,)
        self.names = ServedNames(public, (*config.served_names, config.model_name))
        if configuration is not None:
            self.configuration = {name: value for name, value in configuration.items() if name != "api_key"}
        self._engine, self._reranker = engine, Reranker(engine)
        self.metrics.watch(engine)
        self.lifecycle.become_ready()

    @property
    def engine(self) -> ScoringEngine:
        """Only for routes that need it, which are not asked before it is there."""
        assert self._engine is not None, "readiness is checked before a route is called"
        return self._engine

    @property
    def reranker(self) -> Reranker:
        """The same engine, for documents."""
        assert self._reranker is not None, "readiness is checked before a route is called"
        return self._reranker

    @property
    def engine_if_open(self) -> ScoringEngine | None:
        return self._engine

    def log_once(self, warning: str) -> None:
        """For whoever runs the server, where every answer says the same."""
        if warning not in self._logged:
            self._logged.add(warning)
            log.warning("%s", warning)

    async def in_pool(self, work: Callable[[], Result]) -> Result:
        """Run something long beside the event loop, so that others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Let the helper threads go. The engine is closed by whoever opened it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
