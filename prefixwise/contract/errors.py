"""Every error that prefixwise raises on purpose, with its HTTP status, type and code.

    PrefixwiseError                     catch this to catch all of them
    ├── RequestError                  a request gets no scores: carries status, type, code, param, item_index
    │   ├── InvalidRequestError       the shape is wrong: a type, a mix, something that is not JSON          400
    │   ├── MissingParameterError     something that must be there is not                                   400
    │   ├── InvalidValueError         the shape is right, the value is not                                  400
    │   ├── VocabularyError           a token id that the model does not have                               422
    │   ├── ModelNotFoundError        the request names a model that is not served                          404
    │   ├── NotFoundError             there is nothing under this path, or this id                          404
    │   ├── MethodNotAllowedError     there is, but not for this method                                     405
    │   ├── AuthenticationError       the API key is missing or wrong                                       401
    │   ├── RequestTooLargeError      the body has more bytes than are taken                                413
    │   └── ServiceError              the request may be fine, and is not scored; sending it again may help
    │       ├── QueueFullError        too many tokens are waiting: carries retry_after                      429
    │       ├── DeadlineExceededError its time was up before it was done                                    504
    │       ├── UnavailableError      the server is starting or shutting down                               503
    │       ├── CancelledError        its caller has gone                                                   499
    │       └── InternalError         anything unforeseen; the log has the rest                             500
    ├── ModelLoadError                a checkpoint cannot be used: folder, architecture, tensor, file
    ├── TokenizerError                a model has no tokenizer that we can read, and text was given
    ├── ProfileError                  a reranker profile is not there, not legal, or not for this model
    ├── BatchError                    a batch job cannot start, go on or be written: its files, its options
    ├── ArtifactError                 a file of the harness cannot be read, written or understood
    ├── ClientSettingError            an address, a key or a time limit that no client can work with
    └── BackendError                  a backend or device that was asked for is not there

A message says what was expected, what came and, where that helps, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class PrefixwiseError(Exception):
    """The root. Catch it to turn any error of this package into one line for a person."""


class RequestError(PrefixwiseError):
    """A request that gets no scores. Catch it to answer a caller; `to_body()` is the HTTP answer."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, item_index: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param  # the request field at fault
        self.item_index = item_index  # set when one item is at fault and the others may be fine

    def to_body(self) -> dict[str, object]:
        """The body that every surface answers with (`detail`, `message`: some rerank clients read only those)."""
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


class RequestTooLargeError(RequestError):
    """A body that is larger than the server takes."""

    status = 413


class ServiceError(RequestError):
    """The request may be fine, and gets no scores all the same. Catch it to try again later."""

    type = "server_error"


class QueueFullError(ServiceError):
    """More tokens are waiting than the queue may hold."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after = retry_after  # seconds


class DeadlineExceededError(ServiceError):
    """The request's time was up before its last item was scored."""

    status = 504

    def __init__(self, message: str) -> None:
        super().__init__(message, code="deadline_exceeded")


class UnavailableError(ServiceError):
    """The server is not ready yet, or shutting down."""

    status = 503


class CancelledError(ServiceError):
    """Whoever sent the request does not wait for it any more."""

    status = 499  # as proxies log a client that closed its connection; nobody receives it

    def __init__(self) -> None:
        super().__init__("the request was cancelled before it was done", code="cancelled")


class InternalError(ServiceError):
    """A failure that nobody foresaw; the message says no more than that, the log says the rest."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message, code="internal_error")


class ModelLoadError(PrefixwiseError):
    """A checkpoint that cannot be used; the message names the file or tensor."""


class TokenizerError(PrefixwiseError):
    """The model has no tokenizer that can be read, so only token ids can be scored."""


class ProfileError(PrefixwiseError):
    """A reranker profile that does not exist, is not legal, or does not fit the model; the message names all of it."""


class BatchError(PrefixwiseError):
    """A batch job that cannot start, go on or be written; single rows that fail are no reason for it."""


class ArtifactError(PrefixwiseError):
    """A workload, a result or a report that cannot be read, written or understood; the message names the file."""


class ClientSettingError(PrefixwiseError):
    """A server's address, its key or a time limit is wrong before anything is sent; the message names it."""


class BackendError(PrefixwiseError):
    """A backend, device or dtype that was asked for cannot run here."""
