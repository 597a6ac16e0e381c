from __future__ import annotations

from typing import Any

import pytest

from prefixwise.contract.errors import InvalidValueError
from prefixwise.server.config import ServerOptions


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"port": -1}, "invalid_port"),
        ({"port": 65_536}, "invalid_port"),
        ({"port": True}, "invalid_port"),
        ({"max_request_bytes": 0}, "invalid_max_request_bytes"),
        ({"request_timeout": -1.0}, "invalid_request_timeout"),
        ({"request_timeout": float("nan")}, "invalid_request_timeout"),
        ({"shutdown_grace": float("inf")}, "invalid_shutdown_grace"),
        ({"host": ""}, "invalid_host"),
        ({"log_level": "loud"}, "invalid_log_level"),
        ({"served_model_names": ("a", " ")}, "invalid_served_model_names"),
        ({"cors_origins": ("example.org",)}, "invalid_cors_origins"),
        ({"api_key": ""}, "invalid_api_key"),
        ({"api_key": " key"}, "invalid_api_key"),
        ({"api_key": "k\udcff"}, "invalid_api_key"),
        ({"api_key": "k\x7fy"}, "invalid_api_key"),
        ({"max_connections": 0}, "invalid_max_connections"),
        ({"max_pipelined_requests": -1}, "invalid_max_pipelined_requests"),
        ({"header_timeout": 0}, "invalid_header_timeout"),
        ({"max_response_bytes": 0}, "invalid_max_response_bytes"),
        ({"min_transfer_rate": -1}, "invalid_min_transfer_rate"),
        ({"max_body_memory": 0}, "invalid_max_body_memory"),
        ({"max_request_bytes": 60, "max_response_bytes": 40, "max_body_memory": 99}, "invalid_max_body_memory"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        ServerOptions(**options)
    assert caught.value.code == code
    assert caught.value.param == code.removeprefix("invalid_")


def test_edges_are_taken() -> None:
    ServerOptions(max_request_bytes=60, max_response_bytes=40, max_body_memory=100, min_transfer_rate=0)
    options = ServerOptions(port=0, request_timeout=0, shutdown_grace=0, max_request_bytes=1, cors_origins=("*",))
    assert options.port == 0


def test_the_key_is_never_shown() -> None:
    options = ServerOptions(api_key="hush-hush")
    assert "hush-hush" not in repr(options)
    assert "hush-hush" not in str(options.describe())
    assert options.describe()["api_key_set"] is True
    assert ServerOptions().describe()["api_key_set"] is False
    with pytest.raises(InvalidValueError) as caught:
        ServerOptions(api_key="hush-hush ")
    assert "hush-hush" not in str(caught.value)
