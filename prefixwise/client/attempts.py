"""The attempts of one call: a client's settings, how long each attempt may take, what comes back, and retries.

A time limit is for the whole of a call: the wait for a free connection, every attempt, and the response to its end.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from time import monotonic, time
from typing import Any, NamedTuple, TypeVar

import httpx

from prefixwise._version import __version__
from prefixwise.contract.client_settings import check_api_key, check_timeout
from prefixwise.contract.errors import (
    BackendError,
    ClientSettingError,
    DeadlineExceededError,
    ModelNotFoundError,
    RequestError,
    ServiceError,
    UnavailableError,
    describe,
)
from prefixwise.contract.methods import OnProgress
from prefixwise.contract.result import RerankResult
from prefixwise.contract.server_results import Call, error_of_response

DEFAULT_TIMEOUT = 180.0  # seconds
DEFAULT_RETRIES = 3
DEFAULT_CONNECTIONS = 100
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a retry, where the server says nothing

Result = TypeVar("Result")

# Settings


class Settings(NamedTuple):
    """The arguments of a client, checked."""

    url: str
    api_key: str | None
    timeout: float
    max_retries: int
    max_connections: int

    @classmethod
    def checked(cls, url: str, api_key: str | None, timeout: float, max_retries: int, max_connections: int) -> Settings:
        """Raises ClientSettingError."""
        check_url(url)
        check_api_key(api_key)
        check_timeout(timeout)
        for name, value, least in (("max_retries", max_retries, 0), ("max_connections", max_connections, 1)):
            if not isinstance(value, int) or value < least:
                raise ClientSettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
        address = re.sub(r"(?<![:/])/+v1$", "", url.rstrip("/"))  # as other APIs' clients want it; a host may be v1
        return cls(address, api_key, timeout, max_retries, max_connections)

    def of_httpx(self) -> dict[str, Any]:
        """The arguments of httpx's clients."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {
            "base_url": self.url,
            "headers": {"Content-Type": "application/json", "User-Agent": f"prefixwise/{__version__}", **key},
            "limits": httpx.Limits(max_connections=self.max_connections),
            "verify": self.url.startswith("https:"),  # a plain address needs no certificates, which take time to read
        }


def check_url(url: object) -> None:
    """Raises ClientSettingError."""
    if not isinstance(url, str):
        raise ClientSettingError(f"expected an address like http://127.0.0.1:30000, got {describe(url)}")
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as a name is looked up
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ClientSettingError(f"expected an address like http://127.0.0.1:30000, got {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientSettingError(f"expected an address like http://127.0.0.1:30000, got {url!r}")
    if parsed.port is not None and not 0 < parsed.port < 65_536:
        raise ClientSettingError(f"expected a port from 1 to 65535, got {parsed.port}")
    if parsed.userinfo or parsed.query or parsed.fragment:  # it is written into artifacts, and paths are added to it
        raise ClientSettingError("expected an address of scheme, host, port and path alone, got more behind or before")


# Attempts


class Reply(NamedTuple):
    """A whole response."""

    status: int
    content: bytes
    retry_after: int | None  # seconds

    @classmethod
    def of(cls, response: httpx.Response, content: bytes) -> Reply:
        return cls(response.status_code, content, _retry_after(response.headers.get("Retry-After", "")))

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")


def _retry_after(value: str) -> int | None:
    """The seconds that the server names; proxies may name a date instead."""
    if value.isascii() and value.isdecimal():
        return int(value)
    try:
        return max(0, math.ceil(parsedate_to_datetime(value).timestamp() - time()))
    except ValueError:
        return None


class TimeLeft(dict[str, float]):
    """httpx's time limits of an attempt. It looks each one up when its phase begins: pool, connect, write, read.

    Numbers would give every phase the whole time.
    """

    def __init__(self, seconds_left: Callable[[], float]) -> None:
        super().__init__()
        self._seconds_left = seconds_left

    def get(self, phase: str, default: Any = None) -> float:
        """The seconds that are left, whatever the phase."""
        return self._seconds_left()


def _trace_headers() -> dict[str, str]:
    """`traceparent` of the current span, where the caller uses OpenTelemetry: the server goes on with its trace."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate

    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


def closed_client() -> BackendError:
    """The error of a call after a client's end."""
    return BackendError("this client is closed, so its connections are gone; make another one")


class Attempts:
    """The attempts of one call: how long each may take, and how long to wait before the next one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._deadline = monotonic() + settings.timeout
        self._retries_left = settings.max_retries
        self._next_wait = _FIRST_WAIT

    def seconds_left(self) -> float:
        return max(self._deadline - monotonic(), 0.001)

    def arguments(self) -> dict[str, Any]:
        """Of httpx, for the next attempt: it and the server have the seconds that are left."""
        headers = {"X-Request-Timeout": f"{self.seconds_left():.3f}", **_trace_headers()}
        return {"headers": headers, "extensions": {"timeout": TimeLeft(self.seconds_left)}}

    def read(self, response: httpx.Response) -> Reply:
        """The whole response. httpx limits each read, and there may be any number of them. Raises ReadTimeout."""
        parts = []
        for part in response.iter_bytes():
            parts.append(part)
            if monotonic() > self._deadline:
                raise httpx.ReadTimeout("the response has no end")
        return Reply.of(response, b"".join(parts))

    @contextmanager
    def errors(self, http: httpx.Client | httpx.AsyncClient) -> Iterator[None]:
        """An attempt within it that gets no response raises ServiceError, or BackendError after the client's end."""
        try:
            yield
        except (httpx.TimeoutException, TimeoutError):
            seconds = f"{self._settings.timeout:g} s"
            raise DeadlineExceededError(
                f"expected a response of {self._settings.url} within {seconds}, got none"
            ) from None
        except httpx.TransportError as error:
            why = str(error) or type(error).__name__
            raise UnavailableError(f"cannot reach {self._settings.url}: {why}", code="unreachable") from None
        except RuntimeError:  # httpx has no class of its own for it
            if http.is_closed:
                raise closed_client() from None
            raise

    def wait_after(self, error: ServiceError) -> float:
        """Seconds until the next attempt. Raises the error if there is none."""
        wait = self._next_wait * random.uniform(0.5, 1.0) if error.retry_after is None else float(error.retry_after)
        self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)
        if self._retries_left == 0 or monotonic() + wait >= self._deadline:
            raise error
        self._retries_left -= 1
        return wait


def finish(call: Call[Result], reply: Reply, on_progress: OnProgress | None) -> Result:
    """The result of a call. Raises the error of the response."""
    if reply.status != 200:
        raise error_of_response(reply.status, reply.text, reply.retry_after)
    try:
        result = call.read(json.loads(reply.content))
    except RequestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        shown = reply.text[:200]
        message = f"expected a response of prefixwise to {call.path}, got {shown!r} ({type(error).__name__}: {error})"
        raise ServiceError(message, code="bad_response") from None
    if on_progress is not None:
        on_progress(call.num_items, call.num_items)
    return result


def of_adapter(lora: object, result: RerankResult) -> RerankResult:
    """The result. Raises ModelNotFoundError unless this adapter made it (None: the model itself).

    Rerank routes take any name of a model, as some APIs' clients must send one, and respond with that of the one used.
    """
    if lora is not None and lora != result.model:
        message = f"lora must be the name of a LoRA adapter that the server has loaded, got {describe(lora)}"
        raise ModelNotFoundError(message, code="model_not_found", param="lora")
    return result
