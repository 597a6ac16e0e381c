"""Warm-up: everything that is compiled, is compiled before the first request, and one small request runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from itemwise.contract.parse import parse_score_request
from itemwise.engine.engine import ScoringEngine
from itemwise.plan.algorithms import max_dense_row_len

log = logging.getLogger("itemwise")

OnProgram = Callable[[int, int, str], None]  # programs done, programs in all, the next one's title


def warm_up(engine: ScoringEngine, on_program: OnProgram | None = None) -> int:
    """Compile all programs of the engine's backend, and score a little. How many programs there were, which is known
    before the first is compiled."""
    begin = perf_counter()
    scheduler = engine.scheduler
    longest_dense = max_dense_row_len(engine.planner.options)
    programs = scheduler.call(lambda: engine.backend.programs(max_dense_row_len=longest_dense))
    log.info("warm-up: %d programs to compile", len(programs))
    for number, program in enumerate(programs):
        if on_program is not None:
            on_program(number, len(programs), program.title)
        scheduler.call(program.prepare)
    _score_a_little(engine)
    scheduler.admission.forget_rate()
    log.info("warm-up: ready after %.1f s", perf_counter() - begin)
    return len(programs)


def _score_a_little(engine: ScoringEngine) -> None:
    """The host's share of a request is slow for the first time, too."""
    token = 1 if engine.config.delimiter_token_id == 0 else 0
    for algorithm in ("serial", "packed", "prefill_extend"):
        body = {"query": [token], "items": [[token]], "label_token_ids": [0], "score_mode": "prob"}
        engine.score(parse_score_request({**body, "algorithm": algorithm}))
