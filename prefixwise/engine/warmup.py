"""Warm-up: everything that is compiled, is compiled before the first request, and one small request runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

from prefixwise.contract.errors import BackendError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.engine.scheduler import Scheduler
from prefixwise.forward.backend import Program
from prefixwise.plan.algorithms import max_dense_row_len

log = logging.getLogger("prefixwise")

MAX_COMPILERS = 16  # programs that are compiled at a time, where there are so many cores

OnProgram = Callable[[int, int, str], None]  # programs compiled, programs in all, the next one's title


def warm_up(engine: ScoringEngine, on_program: OnProgram | None = None) -> int:
    """Compile all programs of the engine's backend, and score a little. How many programs there were, which is known
    before the first is compiled. Raises BackendError where one of them cannot be compiled."""
    begin = perf_counter()
    scheduler = engine.scheduler
    longest_dense = max_dense_row_len(engine.planner.options)
    programs = scheduler.call(lambda: engine.backend.programs(max_dense_row_len=longest_dense))
    log.info("warm-up: %d programs to compile", len(programs))
    _compile(scheduler, programs, on_program)
    # In their order, and after all of them: a compiler may time products on the device.
    for number, program in enumerate(programs):
        if on_program is not None and program.lower is None:
            on_program(number, len(programs), program.title)
        scheduler.call(program.prepare)
    _score_a_little(engine)
    scheduler.admission.forget_rate()
    log.info("warm-up: ready after %.1f s", perf_counter() - begin)
    return len(programs)


def _compile(scheduler: Scheduler, programs: Sequence[Program], on_program: OnProgram | None) -> None:
    """Side by side, begun in their order: processes that compile together may wait for each other's part of a program,
    and the first that is not done is under way in all of them."""

    def compile_one(program: Program) -> None:
        if program.lower is not None:
            scheduler.call(program.lower)()

    compilers = ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS), thread_name_prefix="prefixwise-compile")
    try:
        compiling = [compilers.submit(compile_one, program) for program in programs]
        for number, (program, done) in enumerate(zip(programs, compiling, strict=True)):
            if on_program is not None and program.lower is not None:
                on_program(number, len(programs), program.title)
            try:
                done.result()
            except Exception as error:
                raise BackendError(f"cannot compile the program {program.title!r}: {error}") from error
    finally:
        compilers.shutdown(cancel_futures=True)


def _score_a_little(engine: ScoringEngine) -> None:
    """The host's share of a request is slow for the first time, too."""
    token = 1 if engine.config.delimiter_token_id == 0 else 0
    for algorithm in ("serial", "packed", "prefill_extend"):
        body = {"query": [token], "items": [[token]], "label_token_ids": [0], "score_mode": "prob"}
        engine.score(parse_score_request({**body, "algorithm": algorithm}))
