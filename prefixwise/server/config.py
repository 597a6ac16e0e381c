"""The options of a server, beside those of its engine. The command line makes them."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, get_args
from urllib.parse import urlsplit

from prefixwise.contract.errors import InvalidValueError, describe

LogLevel = Literal["debug", "info", "warning", "error"]
RerankFormat = Literal["cohere", "sglang"]

DEFAULT_MAX_REQUEST_BYTES = (
    16 * 2**20
)  # a text of so many takes 10 to 30 ms to copy or to check, which no thread interrupts
DEFAULT_MAX_RESPONSE_BYTES = 128 * 2**20
DEFAULT_MAX_BODY_MEMORY = 512 * 2**20


@dataclass(frozen=True)
class ServerOptions:
    """Address, access and limits. Raises InvalidValueError for a value out of range."""

    host: str = "127.0.0.1"
    port: int = 30_000  # 0: any free port
    served_model_names: tuple[str, ...] = ()  # responses carry the first; none: the model's own name
    api_key: str | None = field(default=None, repr=False)  # never shown, never logged
    cors_origins: tuple[str, ...] = ()  # "*": any
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    max_response_bytes: int = DEFAULT_MAX_RESPONSE_BYTES  # as estimated before anything is scored
    max_body_memory: int = DEFAULT_MAX_BODY_MEMORY  # bytes of all bodies and responses together
    request_timeout: float = 600.0  # seconds from arrival to answer; 0: no limit
    max_connections: int = 4096  # fewer where the process may not open so many files
    max_connections_per_address: int = 1024  # an IPv6 address counts with its /64 network
    max_pipelined_requests: int = 32  # behind the one in progress on a connection
    max_headers: int = 100
    max_header_bytes: int = 64 * 2**10  # the request line is among them
    header_timeout: float = 30.0  # seconds from a connection or the first byte of a request to the end of its headers
    idle_timeout: float = 60.0  # seconds in which a client must send or read something, while the server waits for it
    min_transfer_rate: int = 64 * 2**10  # bytes a second of a large body or response, after `idle_timeout`; 0: any
    keep_alive_timeout: float = 75.0  # seconds between requests: longer than balancers', so that they close first
    shutdown_grace: float = 30.0  # seconds for requests in flight after a signal
    http_workers: int | None = 0  # processes for HTTP beside the engine's; 0: one for all; None: the launcher chooses
    log_json: bool = False
    log_level: LogLevel = "info"
    reports_dir: str | None = None
    strict_model: bool = False  # rerank routes refuse unknown model names, too
    allow_runtime_lora_updating: bool = False  # may clients load LoRA adapters, from folders of this machine?
    auto_truncate: bool = True  # TEI's `/rerank`: what `truncate` means where a request does not have it
    rerank_format: RerankFormat = "cohere"  # `/v1/rerank`: the response to a body that is Cohere's and SGLang's
    otlp_traces_endpoint: str | None = None  # a URL of OTLP over HTTP; None: no traces

    def __post_init__(self) -> None:
        _check_integer("port", self.port, 0, 65_535)
        for name in ("max_request_bytes", "max_response_bytes", "max_body_memory"):
            _check_integer(name, getattr(self, name), 1, 2**62)
        largest = self.max_request_bytes + self.max_response_bytes  # else no request of that size is ever served
        expected = f"at least max_request_bytes and max_response_bytes together, {largest}"
        _require(self.max_body_memory >= largest, "max_body_memory", expected, self.max_body_memory)
        if self.http_workers is not None:
            _check_integer("http_workers", self.http_workers, 0, 256)
        for name in ("max_connections", "max_connections_per_address", "max_headers", "max_header_bytes"):
            _check_integer(name, getattr(self, name), 1, 2**31)
        _check_integer("min_transfer_rate", self.min_transfer_rate, 0, 2**62)
        _check_integer("max_pipelined_requests", self.max_pipelined_requests, 0, 2**31)
        _check_seconds("request_timeout", self.request_timeout)
        for name in ("header_timeout", "idle_timeout", "keep_alive_timeout"):
            _check_seconds(name, getattr(self, name))
            _require(getattr(self, name) > 0, name, "a number of seconds above 0", getattr(self, name))
        _check_seconds("shutdown_grace", self.shutdown_grace)
        _require(bool(self.host), "host", "a host name or address", self.host)
        _require(self.log_level in get_args(LogLevel), "log_level", f"one of {_list(LogLevel)}", self.log_level)
        is_format = self.rerank_format in get_args(RerankFormat)
        _require(is_format, "rerank_format", f"one of {_list(RerankFormat)}", self.rerank_format)
        if self.otlp_traces_endpoint is not None:
            expected = "a URL like http://127.0.0.1:4318/v1/traces, without a user and password"
            _require(_is_endpoint(self.otlp_traces_endpoint), "otlp_traces_endpoint", expected, "another one")
        for name in self.served_model_names:
            _require(bool(name.strip()), "served_model_names", "names that are not empty", name)
        for origin in self.cors_origins:
            is_origin = origin == "*" or origin.startswith(("http://", "https://"))
            _require(is_origin, "cors_origins", '"*" or origins like https://example.org', origin)
        # The key itself must not be in the message.
        if self.api_key is not None and not _is_key(self.api_key):
            message = (
                "api_key must be one or more characters without spaces around them, in UTF-8 and without control "
                "characters, got another one"
            )
            raise InvalidValueError(message, code="invalid_api_key", param="api_key")

    def describe(self) -> dict[str, object]:
        """All options for logs and `/server_info`; of the key only whether one is set."""
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "api_key"}
        return {**shown, "api_key_set": self.api_key is not None}


class ReportSource(Protocol):
    """Artifacts of the benchmarks as HTML. The launcher of the server provides it. Its methods raise ArtifactError."""

    def artifacts(self) -> Sequence[Mapping[str, object]]:
        """All artifacts that `page` can show."""

    def page(self, name: str) -> str:
        """The report of one of them."""

    def page_of(self, content: bytes, name: str) -> str:
        """The report of an artifact that the client sends."""


def _is_endpoint(url: str) -> bool:
    """Headers with keys are a matter of OTEL_EXPORTER_OTLP_HEADERS: options are shown and logged."""
    try:
        parts = urlsplit(url)
        is_web = parts.scheme in ("http", "https") and bool(parts.hostname)
        return is_web and "@" not in parts.netloc and parts.port != 0
    except ValueError:
        return False


def _is_key(key: str) -> bool:
    """Whether a header can hold it. Bytes of a command line that are not UTF-8 are lone surrogates."""
    is_clean = not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in key)
    is_utf8 = not any(0xD800 <= ord(letter) < 0xE000 for letter in key)
    return bool(key) and key == key.strip() and is_clean and is_utf8


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the address; False for a name other than localhost."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    is_good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(is_good, name, f"a whole number from {low} to {high}", value)


def _check_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_good = isinstance(value, (int, float)) and is_number and math.isfinite(value) and value >= 0
    _require(is_good, name, "a number of seconds of 0 or more", value)


def _require(is_good: bool, name: str, expected: str, value: object) -> None:
    if not is_good:
        message = f"{name} must be {expected}, got {describe(value)}"
        raise InvalidValueError(message, code=f"invalid_{name}", param=name)


def _list(choices: object) -> str:
    return ", ".join(get_args(choices))
