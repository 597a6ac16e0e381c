"""What a rerank dialect has to say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from prefixwise.contract.errors import RequestError
from prefixwise.contract.rerank import RerankRequest, RerankResult


class RerankDialect(ABC):
    """A client's way to ask, and the answers that it can read. Without state."""

    @abstractmethod
    def parse(self, body: Mapping[str, object]) -> RerankRequest:
        """Raises RequestError."""

    @abstractmethod
    def render(self, body: Mapping[str, object], result: RerankResult, model: str, call_id: str) -> object:
        """The answer to `body`, as JSON. `model`: the name that it carries."""

    def error_body(self, error: RequestError) -> object:
        """The answer where there is none, as JSON."""
        return error.to_body()
