"""Counting what jax compiles, and what it finds on disk instead.

python -m tests.backends.jax.compilations FOLDER CACHE_FOLDER

Scores a little in a process of its own, and prints the scores and the counts as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from prefixwise import Scorer
from prefixwise.backends.jax.backend import JaxBackend
from prefixwise.backends.jax.mesh import set_jax_option

COMPILED = "/jax/core/compile/backend_compile_duration"  # or found on disk
FOUND = "/jax/compilation_cache/cache_hits"
WRITTEN = "/jax/compilation_cache/cache_misses"

CACHE_FOLDER = "jax_compilation_cache_dir"
CACHE_OPTIONS = (
    CACHE_FOLDER,
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextmanager
def count_events() -> Iterator[Counter[str]]:
    """All of jax's events from here on, by name."""
    events: Counter[str] = Counter()
    lock = threading.Lock()  # programs are compiled side by side

    def add(event: str, *details: Any, **more: Any) -> None:
        with lock:
            events[event] += 1

    jax.monitoring.register_event_listener(add)
    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(add)
        jax.monitoring.unregister_event_duration_listener(add)


def cache_folder() -> str | None:
    """Where jax keeps compiled programs."""
    folder: str | None = getattr(jax.config, CACHE_FOLDER)
    return folder


@contextmanager
def own_cache() -> Iterator[None]:
    """The folder of compiled programs that is set in here is forgotten afterwards."""
    before = {name: getattr(jax.config, name) for name in CACHE_OPTIONS}
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            set_jax_option(name, value)
        compilation_cache.reset_cache()


@contextmanager
def shared_cache(folder: Path) -> Iterator[None]:
    """Compiled programs are stored in the folder and looked for there."""
    with own_cache():
        for name, value in zip(CACHE_OPTIONS, (str(folder), 0.0, -1), strict=True):
            set_jax_option(name, value)
        compilation_cache.reset_cache()
        yield


def score_a_little(folder: str | Path, cache_folder: str | Path) -> dict[str, Any]:
    """The scores of a new scorer, how many programs it compiled or found in JAX's cache, found there, and wrote, and
    how many it read without tracing."""
    with (
        count_events() as events,
        Scorer(folder, backend="jax", device="cpu", dtype="float32", compilation_cache_dir=cache_folder) as scorer,
    ):
        scores = scorer.score([1, 2, 3], [[4], [5, 6]], label_token_ids=[3, 5], algorithm="packed").scores
        num_read = loaded_programs(scorer)
    counts = {"needed": events[COMPILED], "found": events[FOUND], "written": events[WRITTEN], "read": num_read}
    return {"scores": scores, **counts}


def loaded_programs(scorer: Scorer) -> int:
    """How many of its programs were read without tracing."""
    backend = scorer.engine.backend
    assert isinstance(backend, JaxBackend)
    return backend._runner.programs.num_loaded


if __name__ == "__main__":
    print(json.dumps(score_a_little(*sys.argv[1:])))
