"""`ScoreClient`: one server's `/v1/score` over HTTP, timed, every failure of one of five failure kinds.

A time limit is for the whole of a call: an answer that comes byte by byte is not waited for any longer than one that
does not come.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

import httpx

from prefixwise.bench.files import without_nan
from prefixwise.bench.kinds.base import FailureReason, Scores
from prefixwise.bench.server_facts import without_secrets
from prefixwise.client.attempts import check_url
from prefixwise.contract.client_settings import check_api_key, check_timeout
from prefixwise.contract.errors import PrefixwiseError, describe

SCORE_PATH = "/v1/score"
_OUT_OF_MEMORY = re.compile(r"out of memory|RESOURCE_EXHAUSTED|\bOOM\b|CUDA error: memory", re.IGNORECASE)
_SHOWN = 300  # characters of a body in an error
_PROBE_SEC = 10.0


class CallError(PrefixwiseError):
    """A call that gave no scores. Catch it to record it and go on."""

    def __init__(self, reason: FailureReason, detail: str, *, code: str | None = None, seconds: float = 0.0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.code = code  # the server's own, or its HTTP status; None where it gave no answer
        self.seconds = seconds


class UnreachableError(PrefixwiseError):
    """There is no server at this address. Catch it to stop before anything is written."""


@dataclass(frozen=True)
class Answer:
    """Scores, and how long they took from the first byte sent to the last one read."""

    scores: Scores
    seconds: float
    body: dict[str, Any]


class ScoreClient:
    """Keeps one connection open; for one thread. Use it as a context manager."""

    def __init__(self, url: str, *, timeout_sec: float = 180.0, api_key: str | None = None) -> None:
        """`url`: the server's address, with or without `/v1/score`. Raises ClientSettingError."""
        check_url(url)
        check_timeout(timeout_sec)
        check_api_key(api_key)
        self.base_url = url.rstrip("/").removesuffix(SCORE_PATH)
        self._timeout_sec = timeout_sec
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Not through a proxy of the environment, which would be measured, too; a plain address needs no certificates.
        is_plain = self.base_url.startswith("http://")
        self._http = httpx.Client(timeout=timeout_sec, headers=headers, trust_env=False, verify=not is_plain)

    @property
    def url(self) -> str:
        return self.base_url + SCORE_PATH

    def score(self, request: Mapping[str, Any]) -> Answer:
        """Raises CallError. The answer has a row of finite numbers for every item, one number for every label."""
        content = json.dumps(request).encode()
        response, seconds = self._call("POST", SCORE_PATH, content)
        body = decode_answer(response, seconds)
        return Answer(checked_scores(body, request, seconds), seconds, body)

    def get_json(self, path: str) -> dict[str, Any]:
        """The JSON of another route, without secrets; empty where the server has no such route."""
        try:
            response, _ = self._call("GET", path)
            found = without_secrets(without_nan(response.json())) if response.status_code == 200 else {}
        except (CallError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def check_reachable(self) -> None:
        """Raises UnreachableError. Any answer will do; a server that is connected and silent may be busy."""
        limit = min(self._timeout_sec, _PROBE_SEC)
        try:
            with self._http.stream("GET", self.base_url + "/health", timeout=limit):
                pass
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            pass
        except httpx.HTTPError as error:
            raise UnreachableError(f"cannot reach {self.base_url}: {_phrase(error)}") from None

    def _call(self, method: str, path: str, content: bytes | None = None) -> tuple[httpx.Response, float]:
        """The whole answer, and how long it took. Raises CallError."""
        headers = {} if content is None else {"Content-Type": "application/json"}
        begin = perf_counter()
        try:
            with self._http.stream(method, self.base_url + path, content=content, headers=headers) as response:
                body = self._read(response, begin)
            seconds = perf_counter() - begin
        except httpx.TimeoutException as error:
            raise CallError("timeout", _phrase(error), seconds=perf_counter() - begin) from None
        except httpx.HTTPError as error:
            raise CallError("http_error", _phrase(error), seconds=perf_counter() - begin) from None
        return httpx.Response(response.status_code, content=body), seconds

    def _read(self, response: httpx.Response, begin: float) -> bytes:
        """httpx limits each read, and there may be any number of them. Raises CallError."""
        parts = []
        for part in response.iter_bytes():
            parts.append(part)
            seconds = perf_counter() - begin
            if seconds > self._timeout_sec:
                raise CallError("timeout", f"no whole answer within {self._timeout_sec:g} s", seconds=seconds)
        return b"".join(parts)

    def server_info(self) -> dict[str, Any]:
        """The server's configuration, by our route or by SGLang's."""
        return self.get_json("/server_info") or self.get_json("/get_server_info")

    def why_no_info(self) -> str:
        """Why `server_info` is empty: the status of the answer, such as 401 without a key."""
        try:
            response, _ = self._call("GET", "/server_info")
        except CallError as error:
            return str(error)
        return f"HTTP {response.status_code}"

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ScoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _phrase(error: Exception) -> str:
    return str(error) or type(error).__name__


def decode_answer(response: httpx.Response, seconds: float) -> dict[str, Any]:
    """The body of an answer to a scoring request. Raises CallError."""
    text = response.text
    if response.status_code != 200:
        reason: FailureReason = "oom" if _OUT_OF_MEMORY.search(text) else "http_error"
        detail = f"HTTP {response.status_code}: {text[:_SHOWN]}"
        raise CallError(reason, detail, code=_error_code(text) or str(response.status_code), seconds=seconds)
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise CallError("bad_json", f"expected JSON, got {text[:_SHOWN]!r}", seconds=seconds) from None
    if not isinstance(body, dict):
        raise CallError("bad_response", f"expected an object, got {text[:_SHOWN]}", seconds=seconds)
    return body


def _error_code(text: str) -> str | None:
    try:
        code = json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(code) if code is not None else None


def checked_scores(body: Mapping[str, Any], request: Mapping[str, Any], seconds: float) -> Scores:
    """A row of finite numbers for every item, one number for every label. Raises CallError."""
    scores = body.get("scores")
    num_items = len(request["items"])
    if not isinstance(scores, list) or len(scores) != num_items:
        got = f"{len(scores)} rows" if isinstance(scores, list) else describe(scores)
        raise CallError("bad_response", f"expected {num_items} rows of scores, got {got}", seconds=seconds)
    labels = request.get("label_token_ids") or request.get("labels")
    if labels is None:  # of a classifier: its classes
        labels = scores[0] if scores and isinstance(scores[0], list) else ()
    num_labels = len(labels)
    for index, row in enumerate(scores):
        if not isinstance(row, list) or len(row) != num_labels or not all(map(_is_number, row)):
            detail = f"expected {num_labels} finite numbers in scores[{index}], got {_shown(row)}"
            raise CallError("bad_response", detail, seconds=seconds)
    return scores


def _shown(row: object) -> str:
    try:
        return str(row)[:_SHOWN]
    except (ValueError, RecursionError):  # a number or a nesting that Python itself does not print
        return f"a {type(row).__name__} that cannot be shown"


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON has integers of any size
        return False
