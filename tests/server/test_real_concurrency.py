"""Requests that are computed together, from prefixes that are kept, partly kept or not: each gets its lone bits.

`prefixwise serve` on PyTorch; `test_real_jax.py` has the same on JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.real_requests import (
    BLOCK,
    VOCABULARY,
    Answer,
    ask,
    ask_at_once,
    ask_one_by_one,
    cached_tokens,
    leftovers,
    mixed_requests,
    plain_request,
    scores_of,
)
from tests.server.server_process import ServerProcess, real_server

BODIES = mixed_requests(seed=1, count=28)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def servers(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One as users have it, and one that keeps no prefix. The model's products give other bits at other row counts
    unless they are held to one."""
    options = (f"--model-path={checkpoint_of('medium')}", f"--dtype={request.param}")
    with (
        real_server(*options, wait=False) as server,
        real_server(*options, "--disable-radix-cache", wait=False) as keeping_nothing,
    ):
        server.wait_until_ready()
        keeping_nothing.wait_until_ready()
        yield server, keeping_nothing


def test_requests_sent_at_once_get_their_lone_scores(servers: tuple[ServerProcess, ServerProcess]) -> None:
    server, keeping_nothing = servers
    lone = ask_one_by_one(keeping_nothing, BODIES)
    cold = ask_at_once(server, BODIES)
    assert scores_of(cold) == scores_of(lone)
    check_that_they_met(cold)
    warm = ask_at_once(server, BODIES[::3])
    assert scores_of(warm) == scores_of(lone[::3])
    assert {cached_tokens(answer) for answer in lone} == {0}
    assert leftovers(server) == leftovers(keeping_nothing) == (0, 0, 0)


def check_that_they_met(answers: list[Answer]) -> None:
    """Else nothing would have been shown: forwards with parts of several requests, and blocks that several read."""
    batches = [batch for answer in answers for batch in answer.get("debug", {}).get("batches", ())]
    assert any(batch["forward_tokens"] > batch["num_tokens"] for batch in batches)
    assert any(cached_tokens(answer) for answer in answers)


@pytest.mark.parametrize(
    ("same", "num_kept"),
    [
        (slice(0, 2 * BLOCK), 2 * BLOCK),
        (slice(0, 200), BLOCK),
        (slice(0, BLOCK + 1), BLOCK),
        (slice(0, BLOCK), BLOCK),
        (slice(0, BLOCK - 1), 0),
        (slice(1, 300), 0),
        (slice(BLOCK, 300), 0),
    ],
)
def test_a_partly_cached_prefix_gives_the_bits_of_a_cold_one(
    servers: tuple[ServerProcess, ServerProcess], same: slice, num_kept: int
) -> None:
    """Only whole blocks from the start are found again; where the border is must not show."""
    server, keeping_nothing = servers
    first = {**plain_request(1000 * same.start + same.stop, 6, prefix_len=300), "algorithm": "prefill_extend"}
    query = [(token + 1) % VOCABULARY for token in first["query"]]
    query[same] = first["query"][same]
    second = {**first, "query": query}
    assert cached_tokens(ask(server, first)) == 0
    partly = ask(server, second)
    assert cached_tokens(partly) == num_kept
    assert partly["scores"] == ask(keeping_nothing, second)["scores"]
    assert partly["scores"] != ask(keeping_nothing, first)["scores"]
