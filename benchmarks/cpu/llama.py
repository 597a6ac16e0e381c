"""llama.cpp on the embedded model's own file, through the low-level functions of llama-cpp-python.

The query is computed once, as sequence 0. Its cells are then shared with, or copied to, as many sequences as a batch
has, and each item is the end of one of them; a batch of one is the plain reuse of a prefix. What is tried, one after
the other, each with the best of those before: how many threads, how many sequences and whether they share one cache,
flash attention, how many tokens are computed at a time. The fastest few are then tried again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from benchmarks.cpu.cases import SEARCH_SEED, Drawn, Role, draw
from benchmarks.cpu.peer import Peer, Round, fastest
from prefixwise.models.sources import embedded_model_path

_QUERY = 0  # its sequence; items have those from 1
_SEARCH_ITEMS = 10  # at least so many are timed in a search
_FINALISTS = 3  # settings that are timed again, and how often


@dataclass(frozen=True)
class Settings:
    """Of a context of llama.cpp."""

    sequences: int  # items of a batch
    unified: bool  # one cache for all sequences, whose tokens pass over each other's cells
    flash: bool
    step: int  # most tokens that are computed at a time, `n_ubatch`
    threads: int

    def __str__(self) -> str:
        cache = "one cache" if self.unified else "a cache each"
        flash = "flash attention" if self.flash else "no flash attention"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{self.sequences} sequences with {cache}, {flash}, {self.step} tokens at a time, {threads}"


class LlamaCpp(Peer):
    """Every query is new, and its cells are forgotten after a round."""

    def __init__(self, role: Role) -> None:
        self._role = role
        llama_cpp.llama_backend_init()
        path = embedded_model_path()
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
        assert self._model, f"llama.cpp cannot load {path}"
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._file = path.name
        self._context: Any = None

    def prepare(self) -> dict[str, Any]:
        best, tried = self._search()
        self._context = _new_context(self._model, best, self._role.geometry)
        self._settings = best
        self.run(SEARCH_SEED)
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "settings": {"file": self._file, "best": str(best), "built_for": _features()},
            "items_per_second": tried,
        }

    def run(self, seed: int) -> Round:
        return self._time(self._context, self._settings, seed)

    def _search(self) -> tuple[Settings, dict[str, float]]:
        scale, cores = self._role.scale, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        best = Settings(scale.llama_batches[-1], True, True, scale.llama_steps[-1], cores)
        tried: dict[str, float] = {}
        groups: tuple[list[dict[str, Any]], ...] = (
            [{"threads": threads} for threads in sorted({1, max(1, cores // 2), cores})],
            [{"sequences": count, "unified": one} for count in scale.llama_batches for one in (True, False)],
            [{"flash": True}, {"flash": False}],
            [{"step": step} for step in scale.llama_steps],
        )
        by_title: dict[str, Settings] = {}
        for changes in groups:
            settings = [replace(best, **change) for change in changes]
            by_title |= {str(each): each for each in settings}
            best, found = fastest(settings, self._rate)
            tried |= found
        finalists = sorted(tried, key=lambda title: -tried[title])[:_FINALISTS]
        best, found = fastest([by_title[title] for title in finalists], self._steady_rate)
        return best, tried | {f"{title}, again": rate for title, rate in found.items()}

    def _steady_rate(self, settings: Settings) -> float:
        """The best of a few: once is too noisy to choose between settings that are close."""
        return max(self._rate(settings) for _ in range(_FINALISTS))

    def _rate(self, settings: Settings) -> float:
        """Of a few items, a batch at least; the query is the same for all settings."""
        drawn = self._draw(SEARCH_SEED)
        items = drawn.items[: max(_SEARCH_ITEMS, settings.sequences)]
        with _context(self._model, settings, self._role.geometry) as context:
            _read(context, settings, drawn.query)
            begin = perf_counter()
            _score(context, settings, replace(drawn, items=items), self._vocab_size)
            return len(items) / (perf_counter() - begin)

    def _time(self, context: Any, settings: Settings, seed: int) -> Round:
        drawn = self._draw(seed)
        begin = perf_counter()
        _read(context, settings, drawn.query)
        logits = _score(context, settings, drawn, self._vocab_size)
        seconds = perf_counter() - begin
        return Round(len(drawn.items), seconds, (1 / (1 + np.exp(logits[:, 1] - logits[:, 0]))).tolist())

    def _draw(self, seed: int) -> Drawn:
        return draw(self._vocab_size, self._role.geometry, seed)


def _new_context(model: Any, settings: Settings, geometry: tuple[int, int, int]) -> Any:
    """Cells for the query and a batch of items behind it."""
    query_tokens, _, item_tokens = geometry
    count = settings.sequences + 1
    params = llama_cpp.llama_context_default_params()
    each = query_tokens + item_tokens
    params.n_ctx = query_tokens + settings.sequences * item_tokens if settings.unified else count * _padded(each)
    params.n_batch = max(query_tokens, settings.sequences * item_tokens)
    params.n_ubatch = min(settings.step, params.n_batch)
    params.n_seq_max = count
    params.n_threads = params.n_threads_batch = settings.threads
    params.kv_unified = settings.unified
    params.flash_attn_type = 1 if settings.flash else 0
    params.no_perf = True
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, f"llama.cpp has no context with {settings}"
    return context


def _padded(tokens: int) -> int:
    return -(-tokens // 256) * 256  # llama.cpp rounds a sequence's cells up to this


@contextmanager
def _context(model: Any, settings: Settings, geometry: tuple[int, int, int]) -> Iterator[Any]:
    context = _new_context(model, settings, geometry)
    try:
        yield context
    finally:
        llama_cpp.llama_free(context)


def _read(context: Any, settings: Settings, query: NDArray[np.int64]) -> None:
    """The query, for all sequences of a batch; nothing else is left."""
    memory = llama_cpp.llama_get_memory(context)
    llama_cpp.llama_memory_clear(memory, False)
    _decode(context, [query], first=_QUERY, position=0, logits=False)
    for sequence in range(1, settings.sequences + 1):
        llama_cpp.llama_memory_seq_cp(memory, _QUERY, sequence, -1, -1)


def _score(context: Any, settings: Settings, drawn: Drawn, vocab_size: int) -> NDArray[np.float32]:
    """Logits [I, L] of the labels after each item, behind the query that was read."""
    memory = llama_cpp.llama_get_memory(context)
    found = []
    for start in range(0, len(drawn.items), settings.sequences):
        items = drawn.items[start : start + settings.sequences]
        last = _decode(context, list(items), first=1, position=len(drawn.query), logits=True)
        found += [_label_logits(context, index, drawn.labels, vocab_size) for index in last]
        for sequence in range(1, len(items) + 1):  # back to the query
            llama_cpp.llama_memory_seq_rm(memory, sequence, len(drawn.query), -1)
    return np.array(found, dtype=np.float32)


def _decode(context: Any, tails: Sequence[NDArray[np.int64]], *, first: int, position: int, logits: bool) -> list[int]:
    """One batch: each tail goes on a sequence, counted from `first`. Returns the places of their last tokens."""
    batch = llama_cpp.llama_batch_init(sum(len(tail) for tail in tails), 0, 1)
    try:
        last, place = [], 0
        for number, tail in enumerate(tails):
            for offset, token in enumerate(tail.tolist()):
                batch.token[place] = token
                batch.pos[place] = position + offset
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = first + number
                batch.logits[place] = logits and offset == len(tail) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        status = llama_cpp.llama_decode(context, batch)
        assert status == 0, f"llama_decode returned {status}"
        return last
    finally:
        llama_cpp.llama_batch_free(batch)


def _label_logits(context: Any, index: int, labels: Sequence[int], vocab_size: int) -> list[float]:
    row = llama_cpp.llama_get_logits_ith(context, index)
    values = np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (vocab_size,))
    return [float(values[label]) for label in labels]


def _features() -> str:
    """The instructions that it was built for."""
    told: str = llama_cpp.llama_print_system_info().decode()
    return " ".join(part.split()[-3] for part in told.split("|") if part.strip().endswith("= 1"))
