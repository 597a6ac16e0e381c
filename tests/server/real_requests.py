"""Requests for servers with a real model, and ways to send them: one by one, all at once, and watching the server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

import httpx

from tests.server.server_process import ServerProcess

TIMEOUT = 60.0
VOCABULARY = 512  # of every small checkpoint
BLOCK = 128  # tokens of a prefix that are kept together
_POLL_SECONDS = 0.01  # a server that is asked without a pause has less time for what is waited for

Body = dict[str, Any]
Answer = dict[str, Any]
Headers = dict[str, str]

_MODES: dict[int, tuple[str, ...]] = {
    1: ("prob", "logprob", "logit", "sigmoid"),
    2: ("softmax", "prob", "logprob", "logit", "logit_diff", "sigmoid"),
    3: ("softmax", "prob", "logprob", "logit"),
    20: ("softmax", "logprob", "logit"),  # so many that the request has forwards of its own
}
_ALGORITHMS = ("auto", "serial", "packed", "prefill_extend", "prefill_extend")


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def related_prefixes(rng: random.Random) -> list[list[int]]:
    """One of 300 tokens, and some that have much of it: up to a block's border, up to inside one, all but the start."""
    whole = tokens(rng, 300)
    return [
        whole,
        whole[: 2 * BLOCK] + tokens(rng, 60),
        whole[:200] + tokens(rng, 100),
        whole[:BLOCK],
        whole[: BLOCK + 1],
        whole[: BLOCK - 1],
        tokens(rng, BLOCK) + whole[BLOCK:],  # all blocks but the first: nothing is shared
    ]


def mixed_requests(seed: int, count: int) -> list[Body]:
    """Of all kinds; no context is longer than 400 tokens."""
    rng = random.Random(seed)
    shared = related_prefixes(rng)
    return [_mixed_request(rng, shared) for _ in range(count)]


def _mixed_request(rng: random.Random, shared: Sequence[list[int]]) -> Body:
    num_labels = rng.choice(list(_MODES))
    is_sequence = num_labels in (2, 3) and rng.random() < 0.2
    labels: list[Any] = tokens(rng, num_labels)
    if is_sequence:
        labels = [tokens(rng, rng.randint(1, 4)) for _ in labels]
    return {
        "query": rng.choice(shared) if rng.random() < 0.7 else tokens(rng, rng.randint(1, 250)),
        "items": [tokens(rng, rng.choice([0, 1, 5, 20, 40])) for _ in range(rng.randint(1, 5))],
        "label_token_ids": labels,
        "label_scoring": "sequence" if is_sequence else "single",
        "score_mode": rng.choice(["softmax", "logprob"] if is_sequence else _MODES[num_labels]),
        "algorithm": rng.choice(_ALGORITHMS),
        "item_first": rng.random() < 0.1,
        "return_debug": rng.random() < 0.5,
    }


def plain_request(seed: int, num_items: int, *, prefix_len: int = 40, item_len: int = 10) -> Body:
    rng = random.Random(seed)
    return {
        "query": tokens(rng, prefix_len),
        "items": [tokens(rng, item_len) for _ in range(num_items)],
        "label_token_ids": [3, 5],
        "score_mode": "logit",
    }


def fetch(method: str, url: str, **more: Any) -> httpx.Response:
    """One request on a connection of its own. Without `verify` httpx would read all certificates, every time."""
    return httpx.request(method, url, timeout=TIMEOUT, verify=False, **more)


def ask(server: ServerProcess, body: Body) -> Answer:
    """The answer to one request, which must be scores."""
    response = fetch("POST", f"{server.url}/v1/score", json=body)
    assert response.status_code == 200, response.text
    answer: Answer = response.json()
    return answer


def ask_one_by_one(server: ServerProcess, bodies: Sequence[Body]) -> list[Answer]:
    return [ask(server, body) for body in bodies]


def ask_at_once(server: ServerProcess, bodies: Sequence[Body]) -> list[Answer]:
    async def send_all() -> list[httpx.Response]:
        async with async_client(server) as client:
            return await asyncio.gather(*(client.post("/v1/score", json=body) for body in bodies))

    responses = asyncio.run(send_all())
    assert [response.text for response in responses if response.status_code != 200] == []
    return [response.json() for response in responses]


def async_client(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits, verify=False)


def scores_of(answers: Sequence[Answer]) -> list[Any]:
    return [answer["scores"] for answer in answers]


def cached_tokens(answer: Answer) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def server_stats(server: ServerProcess, headers: Headers | None = None) -> dict[str, Any]:
    response = fetch("GET", f"{server.url}/server_info", headers=headers)
    stats: dict[str, Any] = response.json()["stats"]
    return stats


def wait_for_requests(server: ServerProcess, number: int, headers: Headers | None = None) -> None:
    """Until the engine has so many, and has begun with one."""
    until = monotonic() + TIMEOUT
    while monotonic() < until:
        stats = server_stats(server, headers)
        if stats["running_requests"] and stats["running_requests"] + stats["waiting_requests"] == number:
            return
        sleep(_POLL_SECONDS)
    raise AssertionError(f"there are no {number} requests")


def leftovers(server: ServerProcess, headers: Headers | None = None) -> tuple[int, int, int]:
    """Requests that run, those that wait, and blocks in use: as soon as all are 0, or what is left after a while."""
    until = monotonic() + TIMEOUT
    while True:
        stats = server_stats(server, headers)
        left = (stats["running_requests"], stats["waiting_requests"], stats["used_blocks"] + stats["pinned_blocks"])
        if not any(left) or monotonic() > until:
            return left
        sleep(_POLL_SECONDS)
