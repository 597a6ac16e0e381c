"""`Client`: the methods and results of `Scorer`, for a model that a server has loaded."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TypeVar

import httpx

from prefixwise.client.attempts import (
    DEFAULT_CONNECTIONS,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    Attempts,
    Reply,
    Settings,
    finish,
    of_adapter,
)
from prefixwise.contract.errors import QueueFullError, UnavailableError
from prefixwise.contract.judge_result import JudgeResult
from prefixwise.contract.methods import Body, OnProgress, ScoringMethods
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from prefixwise.contract.server_results import Call, classify_call, embed_call, judge_call, rerank_call, score_call

Result = TypeVar("Result")


class Client(ScoringMethods):
    """A server's model, with the methods of `Scorer`. Any number of threads may use it.

    Use it as a context manager, or call `close()`.

    Args:
        url: The server's address, like `http://127.0.0.1:30000`; a `/v1` at its end is dropped.
        api_key: The key of a server that has one.
        timeout: Seconds for a call, the wait for a free connection and retries included. The server stops working on
            the request after them, too.
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
        self._settings = Settings.checked(url, api_key, timeout, max_retries, max_connections)
        self._http = httpx.Client(**self._settings.of_httpx())

    @property
    def url(self) -> str:
        """The server's address."""
        return self._settings.url

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def post_score(self, body: Body) -> ScoreResult:
        """Send a body of `/v1/score` as it is. Its warnings are in the result alone.

        It has one request: each of `requests`, HTTP's way to send many, is a call of its own here.

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
        return self._send(rerank_call(body), None)

    def _score(self, body: Body, on_progress: OnProgress | None) -> ScoreResult:
        return self._send(score_call(body), on_progress)

    def _rerank(self, body: Body, on_progress: OnProgress | None) -> RerankResult:
        return of_adapter(body.get("model"), self._send(rerank_call(body), on_progress))

    def _judge(self, body: Body, on_progress: OnProgress | None) -> JudgeResult:
        return self._send(judge_call(body), on_progress)

    def _classify(self, body: Body, on_progress: OnProgress | None) -> ClassifyResult:
        return self._send(classify_call(body), on_progress)

    def _embed(self, body: Body, on_progress: OnProgress | None) -> EmbedResult:
        return self._send(embed_call(body), on_progress)

    def _send(self, call: Call[Result], on_progress: OnProgress | None) -> Result:
        attempts = Attempts(self._settings)
        while True:
            try:
                return finish(call, self._post(call, attempts), on_progress)
            except (QueueFullError, UnavailableError) as error:
                failure = error
            time.sleep(attempts.wait_after(failure))

    def _post(self, call: Call[Result], attempts: Attempts) -> Reply:
        with (
            attempts.errors(self._http),
            self._http.stream("POST", call.path, content=call.content, **attempts.arguments()) as response,
        ):
            return attempts.read(response)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
