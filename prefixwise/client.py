"""`Client` and `AsyncClient`: the methods and results of `Scorer`, for a model that a server has loaded.

    body -> contract/server_results.py: Call (wrong requests are not sent) -> POST, and again -> JSON -> result

A response with an error becomes the exception that the server raised. Connections are kept open and shared.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, Unpack, overload

import httpx

from prefixwise._version import __version__
from prefixwise.contract.classify import (
    CLASSIFY_FIELDS,
    ClassifyOptions,
    EmbedOptions,
)
from prefixwise.contract.client_settings import check_api_key, check_timeout
from prefixwise.contract.errors import (
    ClientSettingError,
    DeadlineExceededError,
    QueueFullError,
    RequestError,
    ServiceError,
    UnavailableError,
)
from prefixwise.contract.fields import with_fields
from prefixwise.contract.methods import Body, Documents, Inputs, OnProgress, ScoringMethods, warned
from prefixwise.contract.request import SCORE_FIELDS, OnItemError, ScoreOptions, TextOrIds, TokenIds
from prefixwise.contract.rerank_request import RerankOptions, rerank_fields
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from prefixwise.contract.server_results import (
    Call,
    classify_call,
    embed_call,
    error_of_response,
    rerank_call,
    score_call,
)

DEFAULT_TIMEOUT = 180.0  # seconds
DEFAULT_RETRIES = 3
DEFAULT_CONNECTIONS = 100
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a retry, where the server says nothing

Result = TypeVar("Result")


class Client(ScoringMethods):
    """A server's model, with the methods of `Scorer`. Any number of threads may use it.

    Use it as a context manager, or call `close()`.

    Args:
        url: The server's address, like `http://127.0.0.1:30000`.
        api_key: The key of a server that has one.
        timeout: Seconds for a call, retries included. The server stops working on the request after them, too. Where
            all connections are in use, the wait for one has as many seconds of its own.
        max_retries: How many times a call is sent again after the server was busy or starting (429, 503) or could not
            be reached. It waits as long as the server's `Retry-After` says, else from half a second on, doubling.
        max_connections: How many requests of this client may be under way at the same time.

    Raises:
        ClientSettingError: One of the arguments is wrong.

    Examples:
        >>> with Client(server_url) as client:
        ...     result = client.score([1, 2, 3], [[4, 5], [6]], label_token_ids=[7, 8], apply_softmax=True)
        >>> len(result), len(result[0].scores)
        (2, 2)
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_RETRIES,
        max_connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        self._settings = _Settings.checked(url, api_key, timeout, max_retries, max_connections)
        self._http = httpx.Client(**self._settings.of_httpx())

    @property
    def url(self) -> str:
        """The server's address."""
        return self._settings.url

    def post_score(self, body: Body) -> ScoreResult:
        """Send a body of `/v1/score` as it is. Its warnings are in the result alone.

        Args:
            body: The fields of the request, by their names in JSON.

        Returns:
            The scores, in the order of the items.

        Raises:
            RequestError: The request is wrong, or cannot be scored.

        Examples:
            >>> with Client(server_url) as client:
            ...     client.post_score({"query": [1], "items": [[2]], "label_token_ids": [3]}).usage.prompt_tokens
            2
        """
        return self._score(body, None)

    def post_rerank(self, body: Body) -> RerankResult:
        """Send a body of a rerank route as it is. Its warnings are in the result alone.

        Args:
            body: The fields of the request, by their names in JSON.

        Returns:
            The documents, best first.

        Raises:
            RequestError: The request is wrong, or cannot be scored.

        Examples:
            >>> with Client(server_url) as client:
            ...     len(client.post_rerank({"query": "ab", "documents": ["cd", "ef"]}))
            2
        """
        return self._rerank(body, None)

    def _score(self, body: Body, on_progress: OnProgress | None) -> ScoreResult:
        return self._send(score_call(body), on_progress)

    def _rerank(self, body: Body, on_progress: OnProgress | None) -> RerankResult:
        return self._send(rerank_call(body), on_progress)

    def _classify(self, body: Body, on_progress: OnProgress | None) -> ClassifyResult:
        return self._send(classify_call(body), on_progress)

    def _embed(self, body: Body, on_progress: OnProgress | None) -> EmbedResult:
        return self._send(embed_call(body), on_progress)

    def _send(self, call: Call[Result], on_progress: OnProgress | None) -> Result:
        attempts = _Attempts(self._settings)
        while True:
            try:
                response = self._http.post(call.path, content=call.content, **attempts.limits())
                return _finish(call, response, on_progress)
            except httpx.TransportError as error:
                failure = attempts.failure_of(error)
            except (QueueFullError, UnavailableError) as error:
                failure = error
            time.sleep(attempts.wait_after(failure))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same methods, which are awaited. Use it as a context manager, or call `aclose()`.

    Args:
        url: The server's address, like `http://127.0.0.1:30000`.
        api_key: The key of a server that has one.
        timeout: Seconds for a call, retries included.
        max_retries: How many times a call is sent again, as for `Client`.
        max_connections: How many requests of this client may be under way at the same time.

    Raises:
        ClientSettingError: One of the arguments is wrong.

    Examples:
        >>> async def score_two() -> int:
        ...     async with AsyncClient(server_url) as client:
        ...         return len(await client.score([1, 2], [[3], [4]], label_token_ids=[5, 6]))
        >>> asyncio.run(score_two())
        2
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_RETRIES,
        max_connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        self._settings = _Settings.checked(url, api_key, timeout, max_retries, max_connections)
        self._http = httpx.AsyncClient(**self._settings.of_httpx())

    @property
    def url(self) -> str:
        """The server's address."""
        return self._settings.url

    @overload
    async def score(
        self,
        query: str,
        items: Iterable[str],
        *,
        on_item_error: Literal["fail"] = "fail",
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[str, list[float]]: ...
    @overload
    async def score(
        self,
        query: TokenIds,
        items: Iterable[TokenIds],
        *,
        on_item_error: Literal["fail"] = "fail",
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[list[int], list[float]]: ...
    @overload
    async def score(
        self,
        query: str,
        items: Iterable[str],
        *,
        on_item_error: Literal["report"],
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[str]: ...
    @overload
    async def score(
        self,
        query: TokenIds,
        items: Iterable[TokenIds],
        *,
        on_item_error: Literal["report"],
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[list[int]]: ...
    @with_fields(SCORE_FIELDS, ScoreOptions)
    async def score(
        self,
        query: TextOrIds,
        items: Iterable[str] | Iterable[TokenIds],
        *,
        on_item_error: OnItemError = "fail",
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[Any, Any]:
        """Score the labels after each item, as `Scorer.score` does.

        Args:
            on_progress: Is called once, when the response is there: with the number of items, twice.

        Returns:
            The scores, in the order of the items.

        Raises:
            RequestError: The request is wrong, or cannot be scored. Its `code` and `param` say what is.

        Examples:
            >>> async def score() -> list[str]:
            ...     async with AsyncClient(server_url) as client:
            ...         result = await client.score("xa", ["b", "c"], labels=["y", "z"])
            ...     return [each.item for each in result]
            >>> asyncio.run(score())
            ['b', 'c']
        """
        body = {"query": query, "items": items, "on_item_error": on_item_error, **options}
        return warned(await self._send(score_call(body), on_progress))

    @with_fields(rerank_fields("native"), RerankOptions)
    async def rerank(
        self,
        query: str,
        documents: Documents,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[RerankOptions],
    ) -> RerankResult:
        """Order documents by their relevance to the query, as `Scorer.rerank` does.

        Args:
            on_progress: Is called once, when the response is there: with the number of documents, twice.

        Returns:
            The documents, best first.

        Raises:
            RequestError: The request is wrong, or cannot be scored. Its `code` and `param` say what is.

        Examples:
            >>> async def rerank() -> int:
            ...     async with AsyncClient(server_url) as client:
            ...         return len(await client.rerank("ab", ["cd", "ef"], top_n=1))
            >>> asyncio.run(rerank())
            1
        """
        return warned(await self._send(rerank_call({"query": query, "documents": documents, **options}), on_progress))

    @with_fields(CLASSIFY_FIELDS[1:], ClassifyOptions)
    async def classify(
        self, inputs: Inputs, *, on_progress: OnProgress | None = None, **options: Unpack[ClassifyOptions]
    ) -> ClassifyResult:
        """Classify whole inputs, as `Scorer.classify` does.

        Args:
            inputs: One text, several, or the token ids of either.
            on_progress: Is called once, when the response is there: with the number of inputs, twice.

        Returns:
            The label and the numbers of all classes for every input.

        Raises:
            RequestError: The request is wrong, or the model is not a classifier.

        Examples:
            >>> async def classify() -> tuple[str, ...]:
            ...     async with AsyncClient(classifier_url) as client:
            ...         return (await client.classify([[5, 6, 7], [8, 9]])).labels
            >>> asyncio.run(classify())
            ('LABEL_0', 'LABEL_1', 'LABEL_2')
        """
        return warned(await self._send(classify_call({"input": inputs, **options}), on_progress))

    @with_fields(CLASSIFY_FIELDS[2:], EmbedOptions)
    async def embed(
        self, inputs: Inputs, *, on_progress: OnProgress | None = None, **options: Unpack[EmbedOptions]
    ) -> EmbedResult:
        """The hidden state after the last token of each input, as `Scorer.embed` gives it.

        Args:
            inputs: One text, several, or the token ids of either.
            on_progress: Is called once, when the response is there: with the number of inputs, twice.

        Returns:
            An array of one row for each input.

        Raises:
            RequestError: The request is wrong.

        Examples:
            >>> async def embed() -> int:
            ...     async with AsyncClient(server_url) as client:
            ...         return len((await client.embed([[1, 2], [3]])).embeddings)
            >>> asyncio.run(embed())
            2
        """
        return await self._send(embed_call({"input": inputs, **options}), on_progress)

    async def _send(self, call: Call[Result], on_progress: OnProgress | None) -> Result:
        attempts = _Attempts(self._settings)
        while True:
            try:
                response = await self._http.post(call.path, content=call.content, **attempts.limits())
                return _finish(call, response, on_progress)
            except httpx.TransportError as error:
                failure = attempts.failure_of(error)
            except (QueueFullError, UnavailableError) as error:
                failure = error
            await asyncio.sleep(attempts.wait_after(failure))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


# Settings


class _Settings(NamedTuple):
    """The arguments of a client, checked."""

    url: str
    api_key: str | None
    timeout: float
    max_retries: int
    max_connections: int

    @classmethod
    def checked(
        cls, url: str, api_key: str | None, timeout: float, max_retries: int, max_connections: int
    ) -> _Settings:
        """Raises ClientSettingError."""
        check_url(url)
        check_api_key(api_key)
        check_timeout(timeout)
        for name, value, least in (("max_retries", max_retries, 0), ("max_connections", max_connections, 1)):
            if not isinstance(value, int) or value < least:
                raise ClientSettingError(f"{name} must be a whole number of at least {least}, got {value!r}")
        return cls(url.rstrip("/"), api_key, timeout, max_retries, max_connections)

    def of_httpx(self) -> dict[str, Any]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {
            "base_url": self.url,
            "headers": {"Content-Type": "application/json", "User-Agent": f"prefixwise/{__version__}", **key},
            "limits": httpx.Limits(max_connections=self.max_connections),
            "verify": self.url.startswith("https:"),  # a plain address needs no certificates, which take time to read
        }


def check_url(url: str) -> None:
    """Raises ClientSettingError."""
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


class _Attempts:
    """The attempts of one call: how long each may take, and how long to wait before the next one."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._deadline = time.monotonic() + settings.timeout
        self._retries_left = settings.max_retries
        self._next_wait = _FIRST_WAIT

    def limits(self) -> dict[str, Any]:
        """The arguments of an attempt: it and the server have the seconds that are left."""
        seconds = max(self._deadline - time.monotonic(), 0.001)
        return {"timeout": seconds, "headers": {"X-Request-Timeout": f"{seconds:.3f}"}}

    def failure_of(self, error: httpx.TransportError) -> ServiceError:
        """The error of an attempt that got no response."""
        if isinstance(error, httpx.TimeoutException):
            seconds = f"{self._settings.timeout:g} s"
            return DeadlineExceededError(f"expected a response of {self._settings.url} within {seconds}, got none")
        why = str(error) or type(error).__name__
        return UnavailableError(f"cannot reach {self._settings.url}: {why}", code="unreachable")

    def wait_after(self, error: ServiceError) -> float:
        """Seconds until the next attempt. Raises the error if there is none."""
        wait = self._next_wait * random.uniform(0.5, 1.0) if error.retry_after is None else float(error.retry_after)
        self._next_wait = min(2 * self._next_wait, _LONGEST_WAIT)
        is_last = self._retries_left == 0 or isinstance(error, DeadlineExceededError)
        if is_last or time.monotonic() + wait >= self._deadline:
            raise error
        self._retries_left -= 1
        return wait


# Responses


def _retry_after(response: httpx.Response) -> int | None:
    """The seconds that the server names; proxies may name a date instead."""
    value = response.headers.get("Retry-After", "")
    if value.isascii() and value.isdecimal():
        return int(value)
    try:
        return max(0, math.ceil(parsedate_to_datetime(value).timestamp() - time.time()))
    except ValueError:
        return None


def _finish(call: Call[Result], response: httpx.Response, on_progress: OnProgress | None) -> Result:
    """Raises the error of the response."""
    if response.status_code != 200:
        raise error_of_response(response.status_code, response.text, _retry_after(response))
    try:
        result = call.read(response.json())
    except RequestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        shown = response.text[:200]
        message = f"expected a response of prefixwise to {call.path}, got {shown!r} ({type(error).__name__}: {error})"
        raise ServiceError(message, code="bad_response") from None
    if on_progress is not None:
        on_progress(call.num_items, call.num_items)
    return result
