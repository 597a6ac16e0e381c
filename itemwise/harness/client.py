"""`ScoreClient`: one server's `/v1/score` over HTTP, timed, with every failure put into one of five drawers."""

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

from itemwise.contract.errors import ItemwiseError
from itemwise.harness.artifacts import FailureReason, Scores

SCORE_PATH = "/v1/score"
_OUT_OF_MEMORY = re.compile(r"out of memory|RESOURCE_EXHAUSTED|\bOOM\b|CUDA error: memory", re.IGNORECASE)
_SHOWN = 300  # characters of a body in an error


class CallError(ItemwiseError):
    """A call that gave no scores. Catch it to record it and go on."""

    def __init__(self, reason: FailureReason, detail: str, *, code: str | None = None, seconds: float = 0.0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.code = code  # the server's own, or its HTTP status; None where it gave no answer
        self.seconds = seconds


@dataclass(frozen=True)
class Answer:
    """Scores, and how long they took from the first byte sent to the last one read."""

    scores: Scores
    seconds: float
    body: dict[str, Any]


class ScoreClient:
    """Keeps one connection open; for one thread. Use it as a context manager."""

    def __init__(self, url: str, *, timeout_sec: float = 180.0, api_key: str | None = None) -> None:
        """`url`: the server's address, with or without `/v1/score`."""
        self.base_url = url.rstrip("/").removesuffix(SCORE_PATH)
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
        begin = perf_counter()
        try:
            response = self._http.post(self.url, content=content, headers={"Content-Type": "application/json"})
        except httpx.TimeoutException as error:
            raise CallError("timeout", _words(error), seconds=perf_counter() - begin) from None
        except httpx.HTTPError as error:
            raise CallError("http_error", _words(error), seconds=perf_counter() - begin) from None
        seconds = perf_counter() - begin
        body = decode_answer(response, seconds)
        return Answer(checked_scores(body, request, seconds), seconds, body)

    def get_json(self, path: str) -> dict[str, Any]:
        """Of another route; empty where the server has none like it."""
        try:
            response = self._http.get(self.base_url + path)
            found = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def server_info(self) -> dict[str, Any]:
        """As the server tells it: ours and SGLang's have two names for it."""
        return self.get_json("/server_info") or self.get_json("/get_server_info")

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> ScoreClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _words(error: Exception) -> str:
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
    except ValueError:
        raise CallError("bad_json", f"expected JSON, got {text[:_SHOWN]!r}", seconds=seconds) from None
    if not isinstance(body, dict):
        raise CallError("bad_response", f"expected an object, got {text[:_SHOWN]}", seconds=seconds)
    return body


def _error_code(text: str) -> str | None:
    try:
        code = json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code) if code is not None else None


def checked_scores(body: Mapping[str, Any], request: Mapping[str, Any], seconds: float) -> Scores:
    """A row of finite numbers for every item, one number for every label. Raises CallError."""
    scores = body.get("scores")
    num_items, num_labels = len(request["items"]), len(request["label_token_ids"])
    if not isinstance(scores, list) or len(scores) != num_items:
        got = f"{len(scores)} rows" if isinstance(scores, list) else type(scores).__name__
        raise CallError("bad_response", f"expected {num_items} rows of scores, got {got}", seconds=seconds)
    for index, row in enumerate(scores):
        if not isinstance(row, list) or len(row) != num_labels or not all(map(_is_number, row)):
            detail = f"expected {num_labels} finite numbers in scores[{index}], got {str(row)[:_SHOWN]}"
            raise CallError("bad_response", detail, seconds=seconds)
    return scores


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
