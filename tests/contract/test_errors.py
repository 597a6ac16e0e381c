"""The error tree: statuses, types, and the one body that every surface answers with."""

from __future__ import annotations

import pytest

from itemwise.contract import errors
from itemwise.contract.errors import RequestError


@pytest.mark.parametrize(
    ("cls", "status", "type_"),
    [
        (errors.InvalidRequestError, 400, "invalid_request_error"),
        (errors.MissingParameterError, 400, "missing_parameter_error"),
        (errors.InvalidValueError, 400, "invalid_value_error"),
        (errors.VocabularyError, 422, "invalid_value_error"),
        (errors.ModelNotFoundError, 404, "model_error"),
    ],
)
def test_every_request_error_has_its_status_and_type(cls: type[RequestError], status: int, type_: str) -> None:
    error = cls("expected this, got that", code="some_code")
    assert (error.status, error.type) == (status, type_)
    assert isinstance(error, RequestError)


def test_the_body_holds_the_message_twice_for_clients_that_read_only_detail() -> None:
    error = errors.InvalidValueError("items must not be empty, got []", code="empty_items", param="items")
    assert error.to_body() == {
        "error": {
            "message": "items must not be empty, got []",
            "type": "invalid_value_error",
            "param": "items",
            "code": "empty_items",
        },
        "detail": "items must not be empty, got []",
    }


def test_an_error_knows_its_item_and_prints_its_message() -> None:
    error = RequestError("items[3] is bad", code="some_code", item_index=3)
    assert (error.item_index, error.param, str(error)) == (3, None, "items[3] is bad")


@pytest.mark.parametrize(
    "cls", [errors.RequestError, errors.ModelLoadError, errors.TokenizerError, errors.BackendError]
)
def test_the_root_catches_every_error(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.ItemwiseError)
