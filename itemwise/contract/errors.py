"""Every error that itemwise raises on purpose, with its HTTP status, type and code.

    ItemwiseError                     catch this to catch all of them
    ├── RequestError                  the request is at fault: carries status, type, code, param, item_index
    │   ├── InvalidRequestError       the shape is wrong: a type, a mix, something that is not JSON          400
    │   ├── MissingParameterError     something that must be there is not                                   400
    │   ├── InvalidValueError         the shape is right, the value is not                                  400
    │   ├── VocabularyError           a token id that the model does not have                               422
    │   └── ModelNotFoundError        the request names a model that is not served                          404
    ├── ModelLoadError                a checkpoint cannot be used: folder, architecture, tensor, file
    ├── TokenizerError                a model has no tokenizer that we can read, and text was given
    └── BackendError                  a backend or device that was asked for is not there

A message says what was expected, what came and, where that helps, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class ItemwiseError(Exception):
    """The root. Catch it to turn any error of this package into one line for a person."""


class RequestError(ItemwiseError):
    """A request that cannot be scored. Catch it to answer a caller; `to_body()` is the HTTP answer."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, item_index: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param  # the request field at fault
        self.item_index = item_index  # set when one item is at fault and the others may be fine

    def to_body(self) -> dict[str, object]:
        """The body that every surface answers with (`detail`: some rerank clients read only that)."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error, "detail": self.message}


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


class ModelLoadError(ItemwiseError):
    """A checkpoint that cannot be used; the message names the file or tensor."""


class TokenizerError(ItemwiseError):
    """The model has no tokenizer that can be read, so only token ids can be scored."""


class BackendError(ItemwiseError):
    """A backend, device or dtype that was asked for cannot run here."""
