"""The names under which the model is served: which ones a request may use, and which one a response carries."""

from __future__ import annotations

from collections.abc import Iterable

from prefixwise.contract.describe import quote
from prefixwise.contract.errors import ModelNotFoundError

_ANY = "default"  # what is served, whatever its name


class ServedNames:
    """`public` names are listed, and the first of them stands in responses; `others` are understood as well."""

    def __init__(self, public: Iterable[str], others: Iterable[str] = ()) -> None:
        self.public = tuple(dict.fromkeys(public))
        self.all = tuple(dict.fromkeys((*self.public, *others)))

    def answer_to(self, sent: str | None) -> str:
        """The name for the response: as the caller wrote it, or the first. Raises model_not_found."""
        if sent in self.all and sent is not None:
            return sent
        if sent is None or sent == _ANY:
            return self.public[0]
        served = ", ".join(map(quote, self.public))
        message = f'model must be one of {served} or "{_ANY}", got {quote(sent)}'
        raise ModelNotFoundError(message, code="model_not_found", param="model")

    def answer_to_any(self, sent: str | None, *, strict: bool) -> str:
        """For clients that must send some name, of whatever model they were made for: taken as the served one's,
        unless `strict`."""
        return self.answer_to(sent if strict or sent in self.all else None)
