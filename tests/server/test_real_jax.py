"""`prefixwise serve` on JAX: compiled programs outlive the process, and requests together get their lone bits.

One story, since compiling takes seconds: a server that keeps no prefix compiles everything and answers one by one;
it is killed in the middle of work; a server that keeps prefixes starts in its place and answers all at once.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import httpx
import pytest

from tests.checkpoints import make_hf_checkpoint
from tests.server.real_requests import (
    BLOCK,
    Answer,
    ask,
    ask_at_once,
    ask_one_by_one,
    cached_tokens,
    leftovers,
    mixed_requests,
    plain_request,
    scores_of,
    wait_for_requests,
)
from tests.server.server_process import ServerProcess, real_server

BODIES = mixed_requests(seed=2, count=30)
# The second shares one block, and part of the next, with the first.
WHOLE = {**plain_request(5, 6, prefix_len=300), "algorithm": "prefill_extend"}
PARTLY = {**WHOLE, "query": WHOLE["query"][:200] + WHOLE["query"][:100]}


@dataclass(frozen=True)
class Story:
    """What the first server did, and the second one."""

    second: ServerProcess
    first_port: int
    lone: list[Answer]
    partly: Answer
    start_seconds: tuple[float, float]
    files_before: dict[str, int]  # compiled programs and their sizes, when the first was killed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def story(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The model is so short, and its forwards so small, that there are five programs."""
    checkpoint = make_hf_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / "short", "qwen3", max_position_embeddings=511, num_hidden_layers=1
    )
    options = (f"--model-path={checkpoint}", "--backend=jax", "--token-budget=512", f"--compilation-cache-dir={folder}")
    begin = monotonic()
    with real_server(*options, "--disable-radix-cache") as first:
        first_seconds = monotonic() - begin
        lone = ask_one_by_one(first, BODIES)
        partly = ask(first, PARTLY)
        kill_at_work(first)
        files, port, begin = files_in(folder), first.port, monotonic()
        with real_server(*options, f"--port={port}") as second:
            yield Story(second, port, lone, partly, (first_seconds, monotonic() - begin), files)


def kill_at_work(server: ServerProcess) -> None:
    """`kill -9` while a request is on the device, and its client waits."""
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask, server, plain_request(1, 5000))
        wait_for_requests(server, 1)
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        with pytest.raises(httpx.HTTPError):
            waiting.result()


def test_a_killed_server_starts_again_at_once_and_compiles_nothing(story: Story, folder: Path) -> None:
    """On the same port, with nothing to be cleaned up."""
    first_seconds, second_seconds = story.start_seconds
    print(f"ready after {first_seconds:.2f} s, and after kill -9 after {second_seconds:.2f} s")
    assert story.second.port == story.first_port
    assert scores_of(ask_one_by_one(story.second, BODIES[:10])) == scores_of(story.lone[:10])
    assert story.files_before
    assert files_in(folder) == story.files_before


def test_requests_sent_at_once_get_their_lone_scores(story: Story) -> None:
    cold = ask_at_once(story.second, BODIES)
    assert scores_of(cold) == scores_of(story.lone)
    assert {cached_tokens(answer) for answer in story.lone} == {0}
    assert any(cached_tokens(answer) for answer in cold)
    batches = [batch for answer in cold for batch in answer.get("debug", {}).get("batches", ())]
    assert any(batch["forward_tokens"] > batch["num_tokens"] for batch in batches)
    assert leftovers(story.second) == (0, 0, 0)


def test_a_partly_cached_prefix_gives_the_bits_of_a_cold_one(story: Story) -> None:
    ask(story.second, WHOLE)
    partly = ask(story.second, PARTLY)
    assert cached_tokens(partly) == BLOCK
    assert partly["scores"] == story.partly["scores"]
