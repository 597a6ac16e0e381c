"""LoRA adapters that workers load and unload in the engine process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

from prefixwise.contract.errors import PrefixwiseError
from prefixwise.engine.engine import ScoringEngine
from prefixwise.server.workers.messages import Fault, LoraUpdate, fault_of

log = logging.getLogger("prefixwise")

Worker = bytes  # the identity of its socket


class _Done(NamedTuple):
    """An update that is done, and who asked for it."""

    worker: Worker
    query: int
    fault: Fault | None


class LoraUpdates:
    """Updates run on threads of their own: files are read, and the device is waited for. Whoever asked for one is
    answered once all workers know of it: then the next request may go to any of them.

    All methods belong to the main thread of the engine process.
    """

    def __init__(self, engine: ScoringEngine, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._waiting: list[tuple[_Done, int]] = []  # with the version of the adapters that workers must know
        self.known: dict[Worker, int] = {}  # the version that each worker knows

    def start(self, worker: Worker, query: int, update: LoraUpdate) -> None:
        run = partial(self._run, worker, query, update)
        threading.Thread(target=run, name="prefixwise-lora", daemon=True).start()

    def _run(self, worker: Worker, query: int, update: LoraUpdate) -> None:
        fault = None
        try:
            if update.path is None:
                self._engine.loras.unload(update.name)
            else:
                self._engine.load_lora(update.name, update.path, in_place=update.in_place)
        except Exception as error:
            if not isinstance(error, PrefixwiseError):
                log.exception("a LoRA adapter could not be loaded")
            fault = fault_of(error)
        self._done.put(_Done(worker, query, fault))
        self._wake()

    def answers(self, workers: Collection[Worker], send_news: Callable[[], int]) -> Iterator[_Done]:
        """Those that can be answered. `send_news` tells all workers of the adapters, and returns their version."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        if done:
            version = send_news()
            self._waiting += [(each, version) for each in done]
        for each, version in list(self._waiting):
            if each.fault is not None or all(self.known.get(worker, -1) >= version for worker in workers):
                self._waiting.remove((each, version))
                yield each
