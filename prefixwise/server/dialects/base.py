"""`Dialect`: what an API that scores has to define. `scoring.py` calls it in this order:

matches        where one path has several dialects: is this body for it?
has_text       must the body be tokenized? Then the thread pool prepares it.
prepare_call   JSON to requests that the engine can run; most dialects have one request in a call
render_call    the finished requests to JSON
error_body     an error to JSON

JSON may hold iterators and `ScoreRows` in place of long lists: `answers.py` makes their entries while it sends them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, TypeVar, final

import orjson

from prefixwise.contract.checks import check_token_count
from prefixwise.contract.errors import InvalidRequestError, RequestError, TokenizerError
from prefixwise.contract.rerank_request import RerankRequest
from prefixwise.contract.result import RerankResult, truncation_warnings
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.reranker import PreparedRerank
from prefixwise.server.context import RequestContext
from prefixwise.server.service import Service

Body = Mapping[str, object]
AnyRequest = TypeVar("AnyRequest")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for the engine, and what its dialect needs to render the result."""

    dialect: Dialect
    body: Body
    model: str  # the name in the response
    scoring: PreparedRequest
    rerank: PreparedRerank | None = None  # None: the request scores items
    priority: int = 0  # lower ones run first
    answer_bytes: int = 0  # of an item's text in the response, beside the dialect's `result_bytes`


@dataclass(frozen=True, slots=True)
class Call:
    """The requests of one HTTP call, in their order. All are submitted together."""

    dialect: Dialect
    requests: tuple[Prepared | RequestError, ...]  # an error: of a request that fails alone
    model: str  # the name in the response
    warnings: tuple[str, ...] = ()  # about all of them

    @property
    def prepared(self) -> list[Prepared]:
        return [each for each in self.requests if isinstance(each, Prepared)]

    def max_response_bytes(self, sent_bytes: int) -> int:
        """The response has at most about so many. It follows from the request, so nothing has to be scored for it.

        `sent_bytes`: of the request's body, as documents come back no longer than they were sent.
        """
        sizes = [
            _max_bytes(each, sent_bytes) if isinstance(each, Prepared) else _error_bytes(each) for each in self.requests
        ]
        return sum(sizes)


# Bytes of JSON.
_NUMBER_BYTES = 25  # -1.2345678901234567e-308 and a comma
_FIELDS_BYTES = 1024  # of a response, beside its lists
RESULT_BYTES = 128  # of a document or input, beside its numbers
_ROW_BYTES = 8  # of an item's scores, beside its numbers
_ITEM_ERROR_BYTES = 512
_TRUNCATION_BYTES = 96
_DEBUG_BYTES = 64 * 2**10  # with the layout
_BATCH_BYTES = 4  # in the debug block, for each token: of the forwards that computed it
_TOKEN_BYTES = 160  # of a token that `debug_top_k` shows


def _max_bytes(prepared: Prepared, sent_bytes: int) -> int:
    scoring, rerank = prepared.scoring, prepared.rerank
    request = scoring.request
    if rerank is None:
        per_item = _ROW_BYTES + prepared.dialect.result_bytes + prepared.answer_bytes
        size = scoring.num_values * _NUMBER_BYTES + scoring.num_items * per_item
    else:
        num_results = min(rerank.request.top_n or rerank.request.num_items, rerank.request.num_items)
        size = num_results * (_NUMBER_BYTES + RESULT_BYTES)
        size += sent_bytes if prepared.dialect.returns_documents(prepared.body) else 0
    size += len(scoring.item_errors) * _ITEM_ERROR_BYTES + len(scoring.prompt.truncated) * _TRUNCATION_BYTES
    size += 2 * sum(map(len, (*request.warnings, *(request.labels or ()))))
    if request.return_debug:
        size += _DEBUG_BYTES + scoring.prompt.prompt_tokens * _BATCH_BYTES
    if request.debug_top_k is not None:
        size += (scoring.prompt.prompt_tokens + request.debug_top_k) * _TOKEN_BYTES
    return size + _FIELDS_BYTES


def _error_bytes(error: RequestError) -> int:
    return 6 * len(error.message) + _FIELDS_BYTES


class Dialect(ABC):
    """An API that scores. Stateless: one object serves all requests."""

    result_bytes: ClassVar[int] = 0  # of the response's JSON for an item, beside its scores, at most

    def matches(self, body: Body) -> bool:
        """Is the body in this dialect? If a path's dialects all say no, the last one applies."""
        return True

    @abstractmethod
    def has_text(self, body: Body) -> bool:
        """Must the body be tokenized? A guess from its types is enough: it only decides which thread prepares it."""

    @abstractmethod
    def prepare_call(self, service: Service, body: Body) -> Call:
        """Parse, check, tokenize and plan. Raises RequestError, or TokenizerError if the model has no tokenizer."""

    @abstractmethod
    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        """The response's JSON. `states`: of the prepared requests, done. Raises the error that ended the call."""

    def returns_documents(self, body: Body) -> bool:
        """Does the body ask for its documents back?"""
        return False

    def error_body(self, error: RequestError) -> object:
        """The JSON of an error."""
        return error.to_body()


class SingleDialect(Dialect):
    """An API whose calls have one request each. A new one defines `has_text`, `prepare` and `render`."""

    @abstractmethod
    def prepare(self, service: Service, body: Body) -> Prepared:
        """Parse, check, tokenize and plan. Raises RequestError, or TokenizerError if the model has no tokenizer."""

    @abstractmethod
    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        """The response's JSON. `state`: the request, done. Raises its error if it failed."""

    @final
    def prepare_call(self, service: Service, body: Body) -> Call:
        prepared = self.prepare(service, body)
        return Call(self, (prepared,), prepared.model)

    @final
    def render_call(
        self, service: Service, context: RequestContext, call: Call, states: Sequence[RequestState]
    ) -> object:
        return self.render(service, context, call.prepared[0], states[0])


class RerankDialect(SingleDialect):
    """An API that reranks. A new one defines `parse` and `result_body`."""

    returns_objects: ClassVar[bool] = False  # documents that are objects come back with all of their fields

    @abstractmethod
    def parse(self, body: Body) -> RerankRequest:
        """Raises RequestError."""

    @abstractmethod
    def result_body(self, body: Body, result: RerankResult, model: str, request_id: str) -> object:
        """The response's JSON. `model`: the name that it carries."""

    @final
    def has_text(self, body: Body) -> bool:
        return True

    @final
    def prepare(self, service: Service, body: Body) -> Prepared:
        request = self.parse(body)
        if self.returns_objects and self.returns_documents(body):
            _check_objects(body[request.documents_field], request.documents_field)
        model = service.names.answer_to_any(request.model, strict=service.options.strict_model)
        rerank = service.reranker.prepare(request)
        return Prepared(self, body, model, rerank.scoring, rerank, request.priority)

    @final
    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        assert prepared.rerank is not None, "`prepare` sets it"
        result = finish_rerank(service, prepared.rerank, state)
        add_warnings(context, [*result.warnings, *truncation_warnings(result.truncated)])
        return self.result_body(prepared.body, result, prepared.model, context.id)


def _check_objects(documents: object, name: str) -> None:
    """Raises invalid_NAME_type for an object that JSON cannot hold within a response."""
    assert isinstance(documents, list), "`parse` checked it"
    for index, document in enumerate(documents):
        try:
            orjson.dumps([[[[document]]]] if isinstance(document, Mapping) else None)
        except TypeError as error:
            message = f"{name}[{index}] must hold what can be returned, up to 250 levels of valid Unicode, got {error}"
            code = f"invalid_{name}_type"
            raise InvalidRequestError(message, code=code, param=name, item_index=index) from None


def finish_rerank(service: Service, prepared: PreparedRerank, state: RequestState) -> RerankResult:
    """The result, whose warnings about the profile the log gets once. Raises the error that ended the request."""
    for warning in service.reranker.profile_warnings(prepared):
        service.log_once(warning)
    return service.reranker.finish(prepared, state)


def bounded(requests: Iterable[AnyRequest]) -> tuple[AnyRequest, ...]:
    """The requests of a call, as they are prepared. Raises too_many_tokens if all of them have too many for one."""
    found, num_tokens = [], 0
    for each in requests:
        found.append(each)
        if isinstance(each, Prepared):
            num_tokens += each.scoring.num_tokens
            check_token_count(num_tokens)
    return tuple(found)


MAX_WARNING_HEADERS = 10  # clients bound the size of all headers


def add_warnings(context: RequestContext, warnings: Iterable[str]) -> None:
    """Warnings go into headers, as a bare list has no place for them and some clients drop unknown fields.

    They quote the request, so the log does not get them.
    """
    for warning in islice(dict.fromkeys(warnings), MAX_WARNING_HEADERS):
        value = warning.encode("ascii", "backslashreplace").replace(b"\x7f", b"\\x7f")  # `quote` escapes below 0x20
        context.add_header(b"x-prefixwise-warning", value)


def warnings_field(result: RerankResult) -> dict[str, object]:
    """`warnings` of a response that is an object, if there are any."""
    warnings = [*result.warnings, *truncation_warnings(result.truncated)]
    return {"warnings": warnings} if warnings else {}


@contextmanager
def map_tokenizer_error() -> Iterator[None]:
    """Text for a model without a tokenizer is an error of the request."""
    try:
        yield
    except TokenizerError as error:
        raise InvalidRequestError(str(error), code="no_tokenizer") from None
