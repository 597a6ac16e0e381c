"""One model over several hosts: rank 0 schedules, and every rank runs the same forwards in the same order.

    rank 0    engine -> LeaderBackend.start(batch) -> its own JaxBackend.start
                             | the batch, by TCP (`rank_channel.py`)
    rank n    follow() ----> JaxBackend.start        the collectives of the programs join the devices of all ranks

The programs of a forward contain collectives, so all ranks must start the same ones. KV blocks have numbers; a rank's
own page of a block may be any. Blocks are released in the order of the forwards. A forward that a rank refuses before
it starts a program (no page is free) is refused by all. Any other failure ends the model on all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from prefixwise.backends.jax.rank_channel import (
    Connection,
    Message,
    RankLostError,
    accept_ranks,
    connect_to_leader,
    send_all,
)
from prefixwise.contract.errors import BackendError, PrefixwiseError
from prefixwise.forward.backend import STEP_SECONDS, Backend, BackendOptions, Program
from prefixwise.forward.batch import (
    EmbedOverrides,
    ForwardBatch,
    ForwardOutput,
    KVBlock,
    Layout,
    Prefix,
    RunningForward,
)

log = logging.getLogger("prefixwise")

_REASON_SECONDS = 5.0  # for the connection's reason, which is clearer than that of a collective
_MAX_COMPILERS = 16
_POLL_SECONDS = 0.2
_OWN_FACTS = ("device", "compilation_cache_dir")  # of a rank, which may differ


Load = Callable[[], Backend]  # a rank's own part of the model


@dataclass(frozen=True, eq=False)
class RankBlock(KVBlock):
    """A KV block on all ranks."""

    number: int
    inner: KVBlock  # rank 0's own
    release_later: Callable[[RankBlock], None]
    _released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """With the next forward, on all ranks alike."""
        if not self._released.is_set():
            self._released.set()
            self.release_later(self)

    def __del__(self) -> None:
        self.release()


class LeaderBackend(Backend):
    """Rank 0: its own backend, and a message to all other ranks before everything that it starts."""

    def __init__(self, load: Load, options: BackendOptions) -> None:
        self._lost: str | None = None
        self._has_lost = threading.Event()
        self._on_lost: list[Callable[[str], None]] = []
        self._lock = threading.Lock()  # messages are sent in the order in which rank 0 itself starts
        self._numbers = count()
        self._released: SimpleQueue[RankBlock] = SimpleQueue()
        self._ranks = accept_ranks(options.dist_init_addr or "", options.nnodes, self._lose)
        try:
            self._inner = inner = _load_watched(load, self._ranks)
            for rank in self._ranks:
                _check_facts(rank.title, rank.receive().values, facts_of(inner))
            send_all(self._ranks, Message("begin"))
        except PrefixwiseError as error:
            for rank in self._ranks:
                rank.fail(str(error))
            raise
        log.info("all %d ranks have loaded the model", options.nnodes)
        self.config = inner.config
        self.info = replace(inner.info, step_seconds=STEP_SECONDS[inner.info.device_kind])  # only rank 0 fills steps

    def when_lost(self, callback: Callable[[str], None]) -> None:
        self._on_lost.append(callback)
        if self._lost is not None:
            callback(self._lost)

    def _lose(self, reason: str) -> None:
        """The first reason stays. Any thread may call it."""
        if self._has_lost.is_set():
            return
        self._lost = f"{reason}; a model over several hosts needs all of them"
        self._has_lost.set()
        for callback in list(self._on_lost):
            callback(self._lost)

    def _failed(self, error: BaseException) -> RankLostError:
        """A collective fails in its own words where a rank is gone; the connection knows better."""
        self._has_lost.wait(_REASON_SECONDS)
        self._lose(f"a forward failed on rank 0: {error}")
        return RankLostError(self._lost)

    def start(self, batch: ForwardBatch) -> RunningForward:
        with self._lock:
            released = self._drain_released()
            numbers = [next(self._numbers) for _ in batch.cache_segments]
            send_all(self._ranks, batch_message(batch, numbers, released))
            try:
                running = self._inner.start(_own_batch(batch))
            except BackendError:  # before any program has started
                send_all(self._ranks, Message("refused"))
                raise
            except BaseException as error:
                raise self._failed(error) from error
        blocks = tuple(
            RankBlock(block.num_tokens, number, block, self._released.put)
            for number, block in zip(numbers, running.blocks, strict=True)
        )
        return RunningForward(blocks, partial(self._wait, running, blocks))

    def _wait(self, running: RunningForward, blocks: tuple[RankBlock, ...]) -> ForwardOutput:
        try:
            return replace(running.wait(), blocks=blocks)
        except Exception as error:
            raise self._failed(error) from error

    def _drain_released(self) -> list[int]:
        numbers = []
        try:
            while True:
                block = self._released.get_nowait()
                block.inner.release()
                numbers.append(block.number)
        except Empty:
            return numbers

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        """All ranks compile the same, side by side, and run each once together. None is left for its first use, where
        ranks would not wait for each other."""
        asked: dict[str, Any] = {"max_dense_len": max_dense_len, "has_sequences": True}
        with self._lock:
            send_all(self._ranks, Message("programs", asked))
        own = self._inner.programs(**asked)
        return [
            Program(
                each.title,
                None if each.lower is None else partial(self._lower, number, each.lower),
                partial(self._prepare, number, each.prepare),
            )
            for number, each in enumerate(own)
        ]

    def _lower(self, number: int, lower: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        with self._lock:
            send_all(self._ranks, Message("compile", {"number": number}))
        return lower()

    def _prepare(self, number: int, prepare: Callable[[], object]) -> None:
        """Not before every rank has compiled it: a collective does not wait for long."""
        with self._lock:
            send_all(self._ranks, Message("prepare", {"number": number}))
            for rank in self._ranks:
                rank.receive()
            try:
                prepare()
            except BaseException as error:
                raise self._failed(error) from error

    def synchronize(self) -> None:
        self._inner.synchronize()

    def memory_stats(self) -> Mapping[str, int]:
        return self._inner.memory_stats()

    @property
    def num_compilations(self) -> int:
        return self._inner.num_compilations

    @property
    def is_compiling(self) -> bool:
        return self._inner.is_compiling

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self._inner.is_out_of_memory(error)

    def close(self) -> None:
        for rank in self._ranks:
            try:
                rank.send(Message("close"))
            except RankLostError:
                continue
            finally:
                rank.close()
        self._inner.close()


def _load_watched(load: Load, others: Sequence[Connection]) -> Backend:
    """Load this rank's part. jax waits for all ranks, and for long; a rank that fails meanwhile ends it here.

    Raises RankLostError, and whatever `load` raises.
    """
    loading: Future[Backend] = Future()

    def run() -> None:
        try:
            loading.set_result(load())
        except BaseException as error:
            loading.set_exception(error)

    threading.Thread(target=run, name="prefixwise-load-rank", daemon=True).start()
    while not wait([loading], _POLL_SECONDS).done:
        lost = next((each.lost for each in others if each.lost is not None), None)
        if lost is not None:
            raise RankLostError(lost)
    return loading.result()


def _check_facts(title: str, theirs: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raises BackendError where the rank runs something else."""
    ours = json.loads(json.dumps(facts))
    differing = [
        f"{name} {theirs.get(name)!r} instead of {value!r}" for name, value in ours.items() if theirs.get(name) != value
    ]
    if differing:
        raise BackendError(f"{title} must run the same as rank 0, and has {'; '.join(differing)}")


def facts_of(backend: Backend) -> dict[str, Any]:
    """What must be the same on all ranks: the model's shape, and everything that decides programs and forwards."""
    info = {name: value for name, value in asdict(backend.info).items() if name not in _OWN_FACTS}
    return {**info, "model": repr(backend.config)}


def _own_batch(batch: ForwardBatch) -> ForwardBatch:
    """With rank 0's own blocks."""
    prefixes = tuple(each._replace(blocks=tuple(map(_inner, each.blocks))) for each in batch.prefixes)
    return replace(batch, prefixes=prefixes)


def _inner(block: KVBlock) -> KVBlock:
    assert isinstance(block, RankBlock), "a block of another backend"
    return block.inner


def batch_message(batch: ForwardBatch, numbers: Sequence[int], released: Sequence[int]) -> Message:
    """`numbers`: of the blocks that it caches; `released`: of those that are read no more."""
    values: dict[str, Any] = {"numbers": list(numbers), "released": list(released)}
    arrays = {}
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, np.ndarray):
            arrays[each.name] = value
        elif each.name not in ("prefixes", "embed_overrides"):
            values[each.name] = value
    values["prefixes"] = [
        [[block.number for block in prefix.blocks if isinstance(block, RankBlock)], prefix.segment]
        for prefix in batch.prefixes
    ]
    if batch.embed_overrides is not None:
        arrays["embed_tokens"] = batch.embed_overrides.tokens
        arrays["embed_vectors"] = batch.embed_overrides.vectors
    return Message("forward", values, arrays)


def batch_of(message: Message, blocks: Mapping[int, KVBlock]) -> ForwardBatch:
    """The inverse of `batch_message`, with this rank's blocks."""
    arrays: dict[str, Any] = dict(message.arrays)
    values = {name: value for name, value in message.values.items() if name not in ("numbers", "released", "prefixes")}
    overrides = None
    if "embed_tokens" in arrays:
        overrides = EmbedOverrides(arrays.pop("embed_tokens"), arrays.pop("embed_vectors"))
    prefixes = tuple(
        Prefix(tuple(blocks[number] for number in numbers), segment) for numbers, segment in message.values["prefixes"]
    )
    layout, cached = Layout(values.pop("layout")), tuple(values.pop("cache_segments"))
    return ForwardBatch(
        layout=layout, cache_segments=cached, prefixes=prefixes, embed_overrides=overrides, **values, **arrays
    )


def follow(load: Load, options: BackendOptions) -> None:
    """On the other ranks: run what rank 0 says until it closes the model. Raises BackendError, also if it is lost."""
    leader = connect_to_leader(options.dist_init_addr or "", options.node_rank)
    try:
        backend = _load_watched(load, [leader])
        leader.send(Message("loaded", facts_of(backend)))
        leader.receive()
        log.info("rank %d of %d follows %s", options.node_rank, options.nnodes, leader.title)
        _Follower(backend, leader).run()
    except BaseException as error:
        leader.fail(str(error))
        raise
    leader.close()
    log.info("rank 0 has closed the model")


class _Follower:
    def __init__(self, backend: Backend, leader: Connection) -> None:
        self._backend = backend
        self._leader = leader
        self._blocks: dict[int, KVBlock] = {}
        self._programs: Sequence[Program] = ()
        self._compiled: dict[int, Future[None]] = {}
        self._compilers = ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_COMPILERS), "prefixwise-compile")
        self._running: list[RunningForward] = []  # started and not waited for; two at most

    def run(self) -> None:
        try:
            while (message := self._next()).kind != "close":
                getattr(self, f"_on_{message.kind}")(message)
        finally:
            self._compilers.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> Message:
        """While rank 0 has nothing more to say, wait for the forwards."""
        if self._leader.inbox.empty():
            self._wait(0)
        return self._leader.receive()

    def _wait(self, most: int) -> None:
        while len(self._running) > most:
            self._running.pop(0).wait()

    def _on_forward(self, message: Message) -> None:
        for number in message.values["released"]:
            self._blocks.pop(number).release()
        try:
            running = self._backend.start(batch_of(message, self._blocks))
        except BackendError:
            answer = self._leader.receive()
            if answer.kind != "refused":
                raise
            return
        self._blocks.update(zip(message.values["numbers"], running.blocks, strict=True))
        self._running.append(running)
        self._wait(1)

    def _on_refused(self, message: Message) -> None:
        raise BackendError("rank 0 has refused a forward that this rank has started: their KV caches differ")

    def _on_programs(self, message: Message) -> None:
        self._programs = self._backend.programs(**message.values)
        self._compiled.clear()

    def _on_compile(self, message: Message) -> None:
        number: int = message.values["number"]
        lower = self._programs[number].lower
        assert lower is not None, "rank 0 has other programs"
        self._compiled[number] = self._compilers.submit(lower())

    def _on_prepare(self, message: Message) -> None:
        number: int = message.values["number"]
        if number in self._compiled:
            self._compiled[number].result()
        self._leader.send(Message("ready"))
        self._programs[number].prepare()
