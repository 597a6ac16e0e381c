"""The rows of a part on a server that is running: `prefixwise batch --url`. Several requests are under way at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from prefixwise.batch.parts import Part, PartRecord, Row
from prefixwise.batch.requests import RowDefaults, row_fields
from prefixwise.batch.work_folder import OnResult, RowResult
from prefixwise.batch.worker import PartResults, PartTask, Result, score_parts
from prefixwise.client.client import Client
from prefixwise.contract.errors import (
    InvalidRequestError,
    InvalidValueError,
    MissingParameterError,
    ModelNotFoundError,
    RequestError,
    RequestTooLargeError,
)

MAX_REQUESTS_IN_FLIGHT = 16  # a server shares its steps among them

# Of a row; any other error would be that of every row.
_ERRORS_OF_ROWS = (
    InvalidRequestError,
    InvalidValueError,
    MissingParameterError,
    ModelNotFoundError,
    RequestTooLargeError,
)


class ServerRowScorer:
    """Sends the rows of one part after another to a server."""

    def __init__(self, client: Client, defaults: RowDefaults) -> None:
        self._client = client
        self._defaults = defaults

    def score(self, rows: Sequence[Row], on_result: OnResult = lambda result: None) -> list[RowResult]:
        """Results in the order of the rows. Raises BatchError for a failure that is not a row's."""
        results = PartResults(rows, on_result)
        parsed = [index for index, _ in results.parse(self._defaults)]
        with ThreadPoolExecutor(MAX_REQUESTS_IN_FLIGHT) as pool:
            sent = {pool.submit(self._ask, rows[index]): index for index in parsed}
            try:
                for future, index in sent.items():
                    self._finish(results, index, future)
            finally:  # after an error no further row is sent
                pool.shutdown(cancel_futures=True)
        return results.in_order()

    def _ask(self, row: Row) -> Result | RequestError:
        """The result, or the error of the row. Raises RequestError for an error of every row."""
        assert not isinstance(row.body, RequestError), "such a row was not parsed"
        body = row_fields(row.body, self._defaults)
        try:
            return self._client.post_rerank(body) if "documents" in body else self._client.post_score(body)
        except _ERRORS_OF_ROWS as error:
            return error

    def _finish(self, results: PartResults, index: int, future: Future[Result | RequestError]) -> None:
        try:
            result = future.result()
        except RequestError as error:
            raise results.failure(index, f"the server at {self._client.url}", error) from error
        if isinstance(result, RequestError):
            results.fail(index, result)
        else:
            results.finish(index, result)


def score_on_server(
    parts: Sequence[Part], task: PartTask, client: Client, on_result: OnResult = lambda result: None
) -> Iterator[PartRecord]:
    """Score the parts and yield a record after each; then close the client. Raises BatchError."""
    with closing(client):
        yield from score_parts(parts, task, ServerRowScorer(client, task.defaults), on_result)
