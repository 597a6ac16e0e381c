"""`AsyncClient`: `Client` for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, overload

import httpx

from prefixwise.client.attempts import (
    DEFAULT_CONNECTIONS,
    DEFAULT_RETRIES,
    DEFAULT_TIMEOUT,
    Attempts,
    Reply,
    Settings,
    closed_client,
    finish,
    of_adapter,
)
from prefixwise.contract.classify import CLASSIFY_FIELDS, ClassifyOptions, EmbedOptions
from prefixwise.contract.errors import QueueFullError, UnavailableError
from prefixwise.contract.fields import with_fields
from prefixwise.contract.judge import JUDGE_FIELDS, JudgeOptions
from prefixwise.contract.judge_result import JudgeResult
from prefixwise.contract.methods import Answers, Documents, Inputs, Messages, OnProgress, adapter_body, warned
from prefixwise.contract.request import SCORE_FIELDS, OnItemError, ScoreOptions, TextOrIds, TokenIds
from prefixwise.contract.rerank_request import RerankOptions, rerank_fields
from prefixwise.contract.result import ClassifyResult, EmbedResult, RerankResult, ScoreResult
from prefixwise.contract.server_results import Call, classify_call, embed_call, judge_call, rerank_call, score_call

Result = TypeVar("Result")


class AsyncClient:
    """`Client` for asyncio: the same methods, which are awaited. Use it as a context manager, or call `aclose()`.

    It may be used from any number of event loops, as by one `asyncio.run` after another. Connections are kept open for
    the calls of the same loop, and `aclose()` closes those of the loop that it runs in.

    Args:
        url: The server's address, as for `Client`.
        api_key: The key of a server that has one.
        timeout: Seconds for a call, as for `Client`.
        max_retries: How many times a call is sent again, as for `Client`.
        max_connections: How many requests of an event loop may be under way at the same time.

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
        self._settings = Settings.checked(url, api_key, timeout, max_retries, max_connections)
        self._pools: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self._is_closed = False

    @property
    def url(self) -> str:
        """The server's address."""
        return self._settings.url

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    @overload
    async def score(
        self,
        query: str,
        items: Iterable[str],
        *,
        on_item_error: Literal["fail"] = "fail",
        lora: str | None = None,
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
        lora: str | None = None,
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
        lora: str | None = None,
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
        lora: str | None = None,
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
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ScoreOptions],
    ) -> ScoreResult[Any, Any]:
        """Score the labels after each item, as `Scorer.score` does.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
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
        body = {"query": query, "items": items, "on_item_error": on_item_error, **adapter_body(lora), **options}
        return warned(await self._send(score_call(body), on_progress))

    @with_fields(rerank_fields("native"), RerankOptions)
    async def rerank(
        self,
        query: str,
        documents: Documents,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[RerankOptions],
    ) -> RerankResult:
        """Order documents by their relevance to the query, as `Scorer.rerank` does.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
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
        body = {"query": query, "documents": documents, **adapter_body(lora), **options}
        return warned(of_adapter(lora, await self._send(rerank_call(body), on_progress)))

    @with_fields(JUDGE_FIELDS, JudgeOptions)
    async def judge(
        self,
        messages: Messages,
        items: Iterable[str] | None = None,
        *,
        answers: Answers,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[JudgeOptions],
    ) -> JudgeResult:
        """Judge items by a rubric, or one chat, as `Scorer.judge` does.

        Args:
            lora: The name of a loaded LoRA adapter; None is the model itself.
            on_progress: Is called once, when the response is there: with the number of items, twice.

        Returns:
            For each item, in their order: the distribution over the answers.

        Raises:
            RequestError: The request is wrong, or the model has no chat template. Its `code` and `param` say what is.

        Examples:
            >>> async def judge() -> int:
            ...     async with AsyncClient(server_url) as client:
            ...         return len(await client.judge([{"role": "user", "content": "{item}"}], ["b"], answers="y/z"))
            >>> asyncio.run(judge())
            1
        """
        body = {"messages": messages, "items": items, "answers": answers, **adapter_body(lora), **options}
        return warned(await self._send(judge_call(body), on_progress))

    @with_fields(CLASSIFY_FIELDS[1:], ClassifyOptions)
    async def classify(
        self,
        inputs: Inputs,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[ClassifyOptions],
    ) -> ClassifyResult:
        """Classify whole inputs, as `Scorer.classify` does.

        Args:
            inputs: One text, several, or the token ids of either.
            lora: The name of a loaded LoRA adapter; None is the model itself.
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
        return warned(await self._send(classify_call({"input": inputs, **adapter_body(lora), **options}), on_progress))

    @with_fields(CLASSIFY_FIELDS[2:], EmbedOptions)
    async def embed(
        self,
        inputs: Inputs,
        *,
        lora: str | None = None,
        on_progress: OnProgress | None = None,
        **options: Unpack[EmbedOptions],
    ) -> EmbedResult:
        """The hidden state after the last token of each input, as `Scorer.embed` gives it.

        Args:
            inputs: One text, several, or the token ids of either.
            lora: The name of a loaded LoRA adapter; None is the model itself.
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
        return await self._send(embed_call({"input": inputs, **adapter_body(lora), **options}), on_progress)

    async def _send(self, call: Call[Result], on_progress: OnProgress | None) -> Result:
        attempts = Attempts(self._settings)
        while True:
            try:
                return finish(call, await self._post(call, attempts), on_progress)
            except (QueueFullError, UnavailableError) as error:
                failure = error
            await asyncio.sleep(attempts.wait_after(failure))

    async def _post(self, call: Call[Result], attempts: Attempts) -> Reply:
        http = self._pool()
        with attempts.errors(http):
            async with asyncio.timeout(attempts.seconds_left()):
                response = await http.post(call.path, content=call.content, **attempts.arguments())
        return Reply.of(response, response.content)

    def _pool(self) -> httpx.AsyncClient:
        """The connections of the running event loop; no other loop can use them. Raises BackendError after the end."""
        if self._is_closed:
            raise closed_client()
        for ended in [loop for loop in list(self._pools) if loop.is_closed()]:
            self._pools.pop(ended, None)
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            pool = self._pools[loop] = httpx.AsyncClient(**self._settings.of_httpx())
        return pool

    async def aclose(self) -> None:
        """Close the client, and its connections of this event loop."""
        self._is_closed = True
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
