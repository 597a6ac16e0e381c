"""The error tree: statuses, types, and the one body that every surface answers with."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections.abc import Callable

import pytest

from prefixwise.contract import errors
from prefixwise.contract.errors import RequestError, describe, json_values, quote


@pytest.mark.parametrize(
    ("cls", "status", "type_"),
    [
        (errors.InvalidRequestError, 400, "invalid_request_error"),
        (errors.MissingParameterError, 400, "missing_parameter_error"),
        (errors.InvalidValueError, 400, "invalid_value_error"),
        (errors.VocabularyError, 422, "invalid_value_error"),
        (errors.ModelNotFoundError, 404, "model_error"),
        (errors.NotFoundError, 404, "invalid_request_error"),
        (errors.MethodNotAllowedError, 405, "invalid_request_error"),
        (errors.AuthenticationError, 401, "authentication_error"),
        (errors.RequestTooLargeError, 413, "invalid_request_error"),
        (errors.UnavailableError, 503, "server_error"),
    ],
)
def test_every_request_error_has_its_status_and_type(cls: type[RequestError], status: int, type_: str) -> None:
    error = cls("expected this, got that", code="some_code")
    assert (error.status, error.type) == (status, type_)
    assert isinstance(error, RequestError)


@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (errors.QueueFullError("too many", retry_after=7), 429, "rate_limit_error", "queue_full"),
        (errors.DeadlineExceededError("too late"), 504, "server_error", "deadline_exceeded"),
        (errors.CancelledError(), 499, "server_error", "cancelled"),
        (errors.InternalError("see the log"), 500, "server_error", "internal_error"),
    ],
)
def test_errors_of_the_service_have_codes_of_their_own(
    error: errors.ServiceError, status: int, type_: str, code: str
) -> None:
    assert (error.status, error.type, error.code, error.param) == (status, type_, code, None)
    body = error.to_body()["error"]
    assert body == {"message": str(error), "type": type_, "param": None, "code": code}
    assert str(error)


def test_a_full_queue_says_when_to_come_again() -> None:
    assert errors.QueueFullError("too many", retry_after=7).retry_after == 7


def test_what_may_help_to_send_again_can_be_caught_apart_from_what_cannot() -> None:
    """A request at fault stays at fault."""
    service = {errors.QueueFullError, errors.DeadlineExceededError, errors.UnavailableError, errors.InternalError}
    assert all(issubclass(cls, errors.ServiceError) for cls in (*service, errors.CancelledError))
    at_fault = (errors.InvalidValueError, errors.NotFoundError, errors.AuthenticationError, errors.RequestTooLargeError)
    assert not any(issubclass(cls, errors.ServiceError) for cls in at_fault)


def test_the_body_repeats_the_message_for_clients_that_read_only_detail_or_message() -> None:
    error = errors.InvalidValueError("items must not be empty, got []", code="empty_items", param="items")
    assert error.to_body() == {
        "error": {
            "message": "items must not be empty, got []",
            "type": "invalid_value_error",
            "param": "items",
            "code": "empty_items",
        },
        "detail": "items must not be empty, got []",
        "message": "items must not be empty, got []",
    }


def test_an_error_knows_its_item_and_prints_its_message() -> None:
    error = RequestError("items[3] is bad", code="some_code", item_index=3)
    assert (error.item_index, error.param, str(error)) == (3, None, "items[3] is bad")


ARGUMENTS = {  # of those that need others than a message and a code
    errors.QueueFullError: ("full", {"retry_after": 3}),
    errors.UnavailableError: ("starting", {"code": "not_ready", "retry_after": 2}),
    errors.VocabularyError: ("items[1] is bad", {"code": "c", "param": "items", "item_index": 1}),
    errors.DeadlineExceededError: ("late", {}),
    errors.InternalError: ("see the log", {}),
}
CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.PrefixwiseError)
]


@pytest.mark.parametrize("remake", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_reaches_another_process_whole(
    cls: type[errors.PrefixwiseError], remake: Callable[[object], object]
) -> None:
    message, options = ARGUMENTS.get(cls, ("bad", {"code": "c"} if issubclass(cls, RequestError) else {}))
    error = errors.CancelledError() if cls is errors.CancelledError else cls(message, **options)  # type: ignore[arg-type]
    again = remake(error)
    assert (type(again), str(again), vars(again)) == (cls, str(error), vars(error))


@pytest.mark.parametrize(
    "cls", [errors.RequestError, errors.ModelLoadError, errors.TokenizerError, errors.BackendError]
)
def test_the_root_catches_every_error(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.PrefixwiseError)


# How error messages show what came


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", '"x" (str)'),
        ('say "hi"\n', r'"say \"hi\"\n" (str)'),
        ("naïve", '"naïve" (str)'),
        (True, "True (bool)"),
        (None, "None"),
        (1.5, "1.5 (float)"),
        ([1, 2], "[1, 2] (list)"),
        ({"a": 1}, "{'a': 1} (dict)"),
    ],
)
def test_a_value_is_shown_with_its_type(value: object, shown: str) -> None:
    assert describe(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x", '"x" (string)'),
        (True, "true (boolean)"),
        (None, "null"),
        (3, "3 (integer)"),
        (1.5, "1.5 (number)"),
        ([None, False, "it's"], '[null, false, "it\'s"] (list)'),
        ({"a": [True, {"b": None}]}, '{"a": [true, {"b": null}]} (object)'),
        (["\n" * 40], '["' + "\\n" * 29 + "... (list)"),
        ((1,), "(1,) (tuple)"),
    ],
)
def test_a_value_that_a_client_has_sent_is_shown_as_json(value: object, shown: str) -> None:
    with json_values():
        assert describe(value) == shown
    assert describe(None) == "None"


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), {"a": ["x" * 10_000] * 100}])
def test_a_long_value_is_cut_to_one_short_line(value: object) -> None:
    shown = describe(value)
    assert "..." in shown
    assert len(shown) < 120


@pytest.mark.parametrize("nested", [False, True])
def test_a_number_that_python_will_not_print_is_described(nested: bool) -> None:
    shown = describe([10**5000] if nested else 10**5000)
    assert shown.startswith("a number of thousands of digits")


def test_a_lone_surrogate_is_spelled_out_so_that_the_message_can_be_sent() -> None:
    assert quote("a\ud800") == r'"a\ud800"'


def test_the_examples_of_the_docstrings_are_true() -> None:
    assert doctest.testmod(errors) == (0, 1)
