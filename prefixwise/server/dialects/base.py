"""`Dialect`: what an API that scores has to define. `scoring.py` calls it in this order:

matches      where one path has several dialects: is this body for it?
has_text     must the body be tokenized? Then the thread pool prepares it.
prepare      JSON to a request that the engine can run
render       the finished request to JSON
error_body   an error to JSON
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from prefixwise.contract.errors import RequestError
from prefixwise.contract.request import RerankRequest
from prefixwise.contract.result import RerankResult
from prefixwise.engine.prepare import PreparedRequest
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.reranker import PreparedRerank
from prefixwise.server.context import RequestContext
from prefixwise.server.service import Service

Body = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for the engine, and what its dialect needs to render the result."""

    dialect: Dialect
    body: Body
    model: str  # the name in the response
    scoring: PreparedRequest
    rerank: PreparedRerank | None = None  # None: the request scores items
    priority: int = 0  # lower ones run first


class Dialect(ABC):
    """An API that scores. Stateless: one object serves all requests."""

    def matches(self, body: Body) -> bool:
        """Is the body in this dialect? Only asked where a path has several."""
        return True

    @abstractmethod
    def has_text(self, body: Body) -> bool:
        """Must the body be tokenized? A guess from its types is enough: it only decides which thread prepares it."""

    @abstractmethod
    def prepare(self, service: Service, body: Body) -> Prepared:
        """Parse, check, tokenize and plan. Raises RequestError, or TokenizerError if the model has no tokenizer."""

    @abstractmethod
    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        """The response's JSON. `state`: the request, done. Raises its error if it failed."""

    def error_body(self, error: RequestError) -> object:
        """The JSON of an error."""
        return error.to_body()


class RerankDialect(Dialect):
    """An API that reranks. A new one defines `parse` and `result_body`."""

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
        model = service.names.answer_to_any(request.model, strict=service.options.strict_model)
        rerank = service.reranker.prepare(request)
        return Prepared(self, body, model, rerank.scoring, rerank, request.priority)

    @final
    def render(self, service: Service, context: RequestContext, prepared: Prepared, state: RequestState) -> object:
        assert prepared.rerank is not None, "`prepare` sets it"
        result = service.reranker.finish(prepared.rerank, state)
        _add_warnings(service, context, result)
        return self.result_body(prepared.body, result, prepared.model, context.id)


def _add_warnings(service: Service, context: RequestContext, result: RerankResult) -> None:
    """Warnings go into headers, as TEI's list has no place for them and some clients drop unknown fields."""
    for warning in result.warnings:
        service.log_once(warning)
    for warning in (*result.warnings, *truncation_warnings(result)):
        context.add_header(b"x-prefixwise-warning", warning.encode("ascii", "backslashreplace"))


def truncation_warnings(result: RerankResult) -> list[str]:
    """One warning if documents were cut, else none."""
    num_cut = len(result.truncated)
    return [f"{num_cut} document(s) were longer than is read, and were cut: `truncated` says which"] if num_cut else []
