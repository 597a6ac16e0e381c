"""`/health` and `/health_generate`: may this server be sent work, and does work really come back?"""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from prefixwise.contract.errors import UnavailableError
from prefixwise.contract.parse import parse_score_request
from prefixwise.engine.engine import ScoringEngine
from prefixwise.prompts.template import build_prompt
from prefixwise.server.call import Call
from prefixwise.server.jobs import run_job
from prefixwise.server.replies import json_reply
from prefixwise.server.service import Service

GENERATE_SECONDS = 20.0


async def health(service: Service, call: Call) -> Response:
    """200 from the end of the warm-up to the first signal; else the 503 that every working route answers with."""
    if not service.engine.scheduler.is_alive:
        raise UnavailableError("the scheduler has died, so nothing is scored; restart the server", code="not_ready")
    return json_reply({"status": "ok"})


async def health_generate(service: Service, call: Call) -> Response:
    """One tiny request through the whole engine."""
    begin = time.monotonic()
    try:
        async with asyncio.timeout(GENERATE_SECONDS):
            await _score_a_little(service.engine, call)
    except TimeoutError:
        message = f"a tiny request must be scored within {GENERATE_SECONDS:g} seconds, and it was not"
        raise UnavailableError(message, code="not_ready") from None
    return json_reply({"status": "ok", "milliseconds": round(1000 * (time.monotonic() - begin), 3)})


async def _score_a_little(engine: ScoringEngine, call: Call) -> None:
    token = 1 if engine.config.delimiter_token_id == 0 else 0
    is_classifier = bool(engine.backend.config.num_classes)
    body = {
        "query": [token],
        "items": [[token]],
        "label_token_ids": [0 if is_classifier else token],  # a row of its head
        "score_mode": "logit" if is_classifier else "prob",
    }
    request = parse_score_request(body)
    prompt = build_prompt(request, None, engine.config.delimiter_token_id)
    prepared = engine.prepare_prompt(request, prompt, time.perf_counter())
    job = await run_job(call, lambda on_change: engine.submit(prepared, on_change=on_change))
    engine.finish(prepared, job)
