"""A scoring request's walk through the server: body, request, engine, result. All routes that score take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.responses import Response

from prefixwise.contract.errors import InvalidRequestError, TokenizerError
from prefixwise.engine.engine import PreparedRequest
from prefixwise.engine.job import Job, OnChange
from prefixwise.server.body import decode_object, read_body
from prefixwise.server.call import Call, Geometry
from prefixwise.server.jobs import run_job, within_deadline
from prefixwise.server.replies import JsonBytes
from prefixwise.server.service import Service

# Below these bounds the host's work is shorter than handing it to another thread and back.
_INLINE_BYTES = 64 * 1024
_INLINE_SCORES = 10_000  # items x labels

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Ready:
    """A request with all that the host has to do before it runs."""

    scoring: PreparedRequest
    render: Callable[[Job], bytes]  # the response's body, once it has run
    priority: int = 0  # lower ones are served first


@dataclass(frozen=True)
class Parsed:
    """A request that is legal in itself."""

    is_text: bool  # to be tokenized, which takes a while
    prepare: Callable[[], Ready]


Parser = Callable[[dict[str, object]], Parsed]  # what a route's JSON means; raises RequestError


async def answer_score(service: Service, call: Call, parse: Parser, *, check_queue_first: bool = True) -> Response:
    """Score what the body asks for. Raises RequestError where that cannot be done."""
    if check_queue_first:
        service.engine.scheduler.admission.check()  # before the body is even read

    async def work(deadline: float | None) -> Response:
        ready = await _prepare(service, call, parse)
        job = await _run(service, call, ready, deadline)
        return await _finish(service, call, ready, job)

    return await within_deadline(call, service.options.request_timeout, work)


def blame_request(prepare: Callable[[], Prepared]) -> Prepared:
    """The engine's host work. Text for a model without tokenizer is the request's fault."""
    try:
        return prepare()
    except TokenizerError as error:
        raise InvalidRequestError(str(error), code="no_tokenizer") from None


async def _prepare(service: Service, call: Call, parse: Parser) -> Ready:
    body = await read_body(call, service.options.max_request_bytes)

    def decode() -> Parsed:
        return parse(decode_object(body))

    def prepare(parsed: Parsed) -> Ready:
        return blame_request(parsed.prepare)

    if len(body) >= _INLINE_BYTES:
        ready = await service.in_pool(lambda: prepare(decode()))
    else:
        parsed = decode()
        ready = await service.in_pool(partial(prepare, parsed)) if parsed.is_text else prepare(parsed)
    _note_geometry(service, call, ready.scoring)
    return ready


def _note_geometry(service: Service, call: Call, prepared: PreparedRequest) -> None:
    call.geometry = Geometry(
        items=prepared.num_items,
        labels=prepared.request.num_labels,
        prompt_tokens=prepared.prompt.prompt_tokens,
    )
    if prepared.plan is not None:
        call.geometry.algorithm = prepared.plan.algorithm
        service.metrics.count_algorithm(prepared.plan.algorithm)


async def _run(service: Service, call: Call, ready: Ready, deadline: float | None) -> Job:
    engine = service.engine
    job: Job | None = None

    def submit(on_change: OnChange) -> Job:
        nonlocal job
        job = engine.submit(ready.scoring, deadline=deadline, on_change=on_change, priority=ready.priority)
        return job

    try:
        return await run_job(call, submit)
    finally:  # also of those that were given up, which have waited, too
        if job is not None:
            _note_job(service, call, job)


def _note_job(service: Service, call: Call, job: Job) -> None:
    service.metrics.observe_queue(job.queue_seconds)
    if call.geometry is not None:
        call.geometry.queue_seconds = job.queue_seconds
        call.geometry.device_seconds = job.device_seconds
        call.geometry.cached_tokens = job.cached_tokens


async def _finish(service: Service, call: Call, ready: Ready, job: Job) -> Response:
    scoring = ready.scoring
    is_small = scoring.num_items * scoring.request.num_labels < _INLINE_SCORES
    body = ready.render(job) if is_small else await service.in_pool(partial(ready.render, job))
    if call.geometry is not None:
        service.metrics.count_scores(call.geometry, len(scoring.item_errors))
    return JsonBytes(body)
