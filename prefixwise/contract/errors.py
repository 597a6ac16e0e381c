"""The errors that prefixwise raises, each with its HTTP status, type and code.

    PrefixwiseError                     catch this to catch all of them
    ├── RequestError                  a request gets no scores: carries status, type, code, param, item_index
    │   ├── InvalidRequestError       the shape is wrong: a type, a mix, something that is not JSON          400
    │   ├── MissingParameterError     a required field is absent                                            400
    │   ├── InvalidValueError         the shape is right, the value is not                                  400
    │   ├── VocabularyError           a token id that the model does not have                               422
    │   ├── ModelNotFoundError        the request names a model that is not served                          404
    │   ├── NotFoundError             nothing exists under this path or id                                  404
    │   ├── MethodNotAllowedError     the path exists, but not for this method                              405
    │   ├── AuthenticationError       the API key is missing or wrong                                       401
    │   ├── ForbiddenError            a web page sent it that may not                                       403
    │   ├── RequestTooLargeError      the body is larger than the server accepts                            413
    │   └── ServiceError              the request may be valid, and is not scored; a retry may help
    │       ├── QueueFullError        too many tokens are waiting: carries retry_after                      429
    │       ├── DeadlineExceededError the request took too long                                             504
    │       ├── UnavailableError      the server is starting or shutting down, or its engine does not score 503
    │       ├── CancelledError        the client has gone                                                   499
    │       └── InternalError         an unexpected failure; the log has the details                        500
    ├── ModelLoadError                a checkpoint cannot be used: folder, architecture, tensor, file
    ├── TokenizerError                a model has no readable tokenizer, and text was given
    ├── ProfileError                  a reranker profile does not exist, is not valid, or does not fit the model
    ├── BatchError                    a batch job cannot start, continue or be written: its files, its options
    ├── ArtifactError                 a file of the harness cannot be read, written or understood
    ├── ClientSettingError            a wrong address, key or time limit of a client
    └── BackendError                  a backend or device is not available

A message says what was expected, what it got and, if that helps, what to do. `PrefixwiseWarning` is the category of
Python warnings about requests that are scored.
"""

from __future__ import annotations

import copyreg
import json
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import ClassVar

_MAX_SHOWN = 60  # characters of a value in a message
_are_json: ContextVar[bool] = ContextVar("are_json", default=False)  # the values in messages


class PrefixwiseError(Exception):
    """The root. Catch it to show any error of this package as one line."""

    def __reduce__(self) -> tuple[object, ...]:
        """A copy, and what another process receives, has all attributes. (Exceptions alone would call `__init__`.)"""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class PrefixwiseWarning(UserWarning):
    """A request is scored, and its scores may not be what the caller wants; the result has it in `warnings`, too."""


class RequestError(PrefixwiseError):
    """A request that gets no scores. Catch it to respond to the caller; `to_body()` is the HTTP body.

    Attributes:
        message: What was expected, and what it got.
        status: The HTTP status.
        type: The kind of error, as OpenAI's API names kinds.
        code: What is wrong, for programs.
        param: The wrong field of the request, if it is one.
        item_index: The wrong item, if it is one and other items may be valid.

    Examples:
        >>> try:
        ...     raise RequestError("items must not be empty, got []", code="empty_items", param="items")
        ... except RequestError as error:
        ...     print(error.code, error.param, error.status)
        empty_items items 400
    """

    status: int = 400
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, item_index: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
        self.item_index = item_index

    def to_body(self) -> dict[str, object]:
        """The body of the HTTP response. (Some rerank clients only read `detail` or `message`.)"""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error, "detail": self.message, "message": self.message}


class InvalidRequestError(RequestError):
    """A wrong type, a mix of text and ids, a body that is not a JSON object."""


class MissingParameterError(RequestError):
    """`query`, `items` or the labels are absent."""

    type = "missing_parameter_error"


class InvalidValueError(RequestError):
    """A value out of range, an unknown name, parameters that contradict each other."""

    type = "invalid_value_error"


class VocabularyError(InvalidValueError):
    """A token id at or above the number of rows of the model's embedding."""

    status = 422


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here."""

    status = 404
    type = "model_error"


class NotFoundError(RequestError):
    """No such route, or nothing under this id."""

    status = 404


class MethodNotAllowedError(RequestError):
    """The route exists, and not for this method."""

    status = 405


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"


class ForbiddenError(RequestError):
    """A web page may have sent the request, and the server does not know that page; or the server does not allow it."""

    status = 403
    type = "permission_error"


class RequestTooLargeError(RequestError):
    """The body is larger than the server accepts, or the request than the device can compute before its deadline."""

    status = 413


class ServiceError(RequestError):
    """The request may be valid, and gets no scores. Catch it to retry later.

    Attributes:
        retry_after: Seconds until a retry may help, where that is known.
    """

    type = "server_error"
    retry_after: int | None = None


class QueueFullError(ServiceError):
    """More tokens are waiting than the queue may hold, or than can be computed before the request's deadline."""

    status = 429
    type = "rate_limit_error"
    retry_after: int  # seconds

    def __init__(self, message: str, *, retry_after: int, code: str = "queue_full") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class DeadlineExceededError(ServiceError):
    """The request took longer than its deadline."""

    status = 504

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class UnavailableError(ServiceError):
    """The server is starting or shutting down, or its engine does not score."""

    status = 503

    def __init__(self, message: str, *, code: str, retry_after: int | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class CancelledError(ServiceError):
    """The client does not wait for the request any more."""

    status = 499  # as proxies log a client that closed its connection

    def __init__(self) -> None:
        super().__init__("the request was cancelled before it was done", code="cancelled")


class InternalError(ServiceError):
    """An unexpected failure; the log has the details."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message, code="internal_error")


class ModelLoadError(PrefixwiseError):
    """A checkpoint cannot be used; the message names the file or tensor."""


class TokenizerError(PrefixwiseError):
    """The model has no readable tokenizer, so it can only score token ids."""


class ProfileError(PrefixwiseError):
    """A reranker profile does not exist, is not valid, or does not fit the model; the message lists all problems."""


class BatchError(PrefixwiseError):
    """A batch job cannot start, continue or be written. Single rows that fail do not raise it."""


class ArtifactError(PrefixwiseError):
    """A workload, result or report cannot be read, written or understood; the message names the file."""


class ClientSettingError(PrefixwiseError):
    """A server address, key or time limit is wrong; the message names it."""


class BackendError(PrefixwiseError):
    """A backend, device or dtype is not available on this machine."""


# Values in messages


@contextmanager
def json_values() -> Iterator[None]:
    """Messages in the block show values as a client has sent them in JSON: `null`, `true`, `[1, 2] (list)`."""
    token = _are_json.set(True)
    try:
        yield
    finally:
        _are_json.reset(token)


def describe(value: object) -> str:
    """The beginning of the value, and its type: `"x" (str)`, `[1, 2, 3, ...] (list)`; None is `None`.

    Within `json_values` they are JSON's: `"x" (string)`, and `null`.
    """
    if value is None:
        return "null" if _are_json.get() else "None"
    kind = type(value).__name__
    return f"{_brief(value)} ({_JSON_TYPES.get(kind, kind) if _are_json.get() else kind})"


def count(number: int, noun: str) -> str:
    """A number with its noun: "1 item", "1,000 items"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def quote(text: str) -> str:
    """The beginning of the text in double quotes; lone surrogates, which UTF-8 cannot encode, are escaped."""
    return json.dumps(_cut(text), ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _brief(value: object) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):  # `reprlib` sorts all keys to show the first ones
        value = dict(islice(value.items(), _MAX_SHOWN))
    try:
        return _cut(" ".join((_JSON if _are_json.get() else reprlib).repr(value).split()))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


class _JsonRepr(reprlib.Repr):
    """The beginning of a JSON value. `Repr` calls the methods by the types of values."""

    def repr_str(self, x: str, level: int) -> str:
        return quote(x if len(x) <= self.maxstring else x[: self.maxstring] + "...")

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:  # noqa: N802
        return "null"


_JSON = _JsonRepr()
_JSON_TYPES = {"bool": "boolean", "int": "integer", "float": "number", "str": "string", "dict": "object"}
