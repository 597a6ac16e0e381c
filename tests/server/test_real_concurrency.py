"""Requests that are computed together, from prefixes that are kept, partly kept or not: each gets its lone bits.

`prefixwise serve` on PyTorch; `test_real_jax.py` has the same on JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefixwise.launch.loading import load_engine, resolved_config
from prefixwise.launch.options import EngineOptions
from prefixwise.server.config import ServerOptions
from prefixwise.server.service import Service
from tests.reference import is_emulated
from tests.server.app_client import AppClient
from tests.server.real_requests import (
    BLOCK,
    VOCABULARY,
    Answer,
    Body,
    ask,
    ask_at_once,
    cached_tokens,
    leftovers,
    mixed_requests,
    plain_request,
    scores_of,
)
from tests.server.server_process import WORKERS, ServerProcess, real_server

BODIES = mixed_requests(seed=1, count=20)
PATIENT = (
    "--request-timeout=3600",
)  # so that no request is refused on a slow machine, as one that would come too late


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """A dtype that the CPU emulates has the path of float32."""
    return is_emulated(parameters["servers"][0])


@dataclass(frozen=True)
class Servers:
    """Of one model, whose GEMMs give other bits at other row counts unless they are held to one."""

    caching: ServerProcess  # as users have it
    cacheless: AppClient  # the same application, in this process

    def lone(self, body: Body) -> Answer:
        """The answer of the server without a KV cache, to a request that has it to itself."""
        response = self.cacheless.post("/v1/score", body)
        assert response.status_code == 200, response.text
        answer: Answer = response.json()
        return answer


@pytest.fixture(
    scope="module",
    params=[("float32",), ("bfloat16",), ("float32", WORKERS)],
    ids=["float32", "bfloat16", "float32 workers"],
)
def servers(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Iterator[Servers]:
    model, (dtype, *form) = checkpoint_of("medium"), request.param
    options = EngineOptions(model=model, device="cpu", dtype=dtype, prefix_cache=False)
    with (
        real_server(*PATIENT, f"--model-path={model}", f"--dtype={dtype}", *form, wait=False) as server,
        closing(load_engine(options)) as engine,
    ):
        service = Service(ServerOptions())
        service.open(engine, resolved_config(options, engine))
        server.wait_until_ready()
        yield Servers(server, AppClient(service))
        service.close()


def test_requests_sent_at_once_get_their_lone_scores(servers: Servers) -> None:
    lone = [servers.lone(body) for body in BODIES]
    cold = ask_at_once(servers.caching, BODIES)
    assert scores_of(cold) == scores_of(lone)
    check_that_they_met(cold)
    warm = ask_at_once(servers.caching, BODIES[::3])
    assert scores_of(warm) == scores_of(lone[::3])
    assert {cached_tokens(answer) for answer in lone} == {0}
    assert leftovers(servers.caching) == (0, 0, 0)
    stats = servers.cacheless.get("/server_info").json()["stats"]
    assert (stats["running_requests"], stats["waiting_requests"], stats["used_blocks"]) == (0, 0, 0)


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
def test_a_partly_cached_prefix_gives_the_bits_of_a_cold_one(servers: Servers, same: slice, num_kept: int) -> None:
    """Only whole blocks from the start are found again; where the border is must not show."""
    first = {**plain_request(1000 * same.start + same.stop, 6, prefix_len=300), "algorithm": "prefill_extend"}
    query = [(token + 1) % VOCABULARY for token in first["query"]]
    query[same] = first["query"][same]
    second = {**first, "query": query}
    assert cached_tokens(ask(servers.caching, first)) == 0
    partly = ask(servers.caching, second)
    assert cached_tokens(partly) == num_kept
    assert partly["scores"] == servers.lone(second)["scores"]
    assert partly["scores"] != servers.lone(first)["scores"]
