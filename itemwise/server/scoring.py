"""A scoring request's walk through the server: body, request, engine, result. All routes that score take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.responses import Response

from itemwise.contract.errors import InvalidRequestError, TokenizerError
from itemwise.contract.request import ScoreRequest
from itemwise.contract.result import ScoreResult
from itemwise.engine.engine import PreparedRequest
from itemwise.engine.job import Job, OnChange
from itemwise.server.body import decode_object, read_body
from itemwise.server.call import Call, Geometry
from itemwise.server.jobs import run_job, within_deadline
from itemwise.server.replies import JsonBytes
from itemwise.server.service import Service

# Below these bounds the host's work is shorter than handing it to another thread and back.
_INLINE_BYTES = 64 * 1024
_INLINE_SCORES = 10_000  # items x labels

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Dialect:
    """What a route's JSON means: its body as a request, and a result as its response's body."""

    parse: Callable[[dict[str, object]], ScoreRequest]
    render: Callable[[ScoreRequest, ScoreResult], bytes]


async def answer_score(service: Service, call: Call, dialect: Dialect) -> Response:
    """Score what the body asks for. Raises RequestError where that cannot be done."""
    service.engine.scheduler.admission.check()  # before the body is even read

    async def work(deadline: float | None) -> Response:
        prepared = await _prepare(service, call, dialect)
        job = await _run(service, call, prepared, deadline)
        return await _finish(service, call, dialect, prepared, job)

    return await within_deadline(call, service.options.request_timeout, work)


def blame_request(prepare: Callable[[], Prepared]) -> Prepared:
    """The engine's host work. Text for a model without tokenizer is the request's fault."""
    try:
        return prepare()
    except TokenizerError as error:
        raise InvalidRequestError(str(error), code="no_tokenizer") from None


async def _prepare(service: Service, call: Call, dialect: Dialect) -> PreparedRequest:
    body = await read_body(call, service.options.max_request_bytes)

    def decode() -> ScoreRequest:
        return dialect.parse(decode_object(body))

    def prepare(request: ScoreRequest) -> PreparedRequest:
        return blame_request(partial(service.engine.prepare, request))

    if len(body) >= _INLINE_BYTES:
        prepared = await service.in_pool(lambda: prepare(decode()))
    else:
        request = decode()
        prepared = await service.in_pool(partial(prepare, request)) if request.is_text else prepare(request)
    _note_geometry(service, call, prepared)
    return prepared


def _note_geometry(service: Service, call: Call, prepared: PreparedRequest) -> None:
    call.geometry = Geometry(
        items=prepared.num_items,
        labels=prepared.request.num_labels,
        prompt_tokens=prepared.prompt.prompt_tokens,
    )
    if prepared.plan is not None:
        call.geometry.algorithm = prepared.plan.algorithm
        service.metrics.count_algorithm(prepared.plan.algorithm)


async def _run(service: Service, call: Call, prepared: PreparedRequest, deadline: float | None) -> Job:
    engine = service.engine
    job: Job | None = None

    def submit(on_change: OnChange) -> Job:
        nonlocal job
        job = engine.submit(prepared, deadline=deadline, on_change=on_change)
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


async def _finish(service: Service, call: Call, dialect: Dialect, prepared: PreparedRequest, job: Job) -> Response:
    def finish() -> bytes:
        return dialect.render(prepared.request, service.engine.finish(prepared, job))

    num_scores = prepared.num_items * prepared.request.num_labels
    body = finish() if num_scores < _INLINE_SCORES else await service.in_pool(finish)
    if call.geometry is not None:
        service.metrics.count_scores(call.geometry, len(prepared.item_errors))
    return JsonBytes(body)
