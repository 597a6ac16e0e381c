"""Real models on a CPU: a forward that caches blocks and scores items gives the bits of two that do one each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise.backends.load import load_backend
from prefixwise.engine.request_state import RequestState
from prefixwise.engine.step_filler import MANY_LABELS
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.models.sources import open_checkpoint
from tests.engine.step_runner import StepRunner, kind_of, prefix_of, state_of

pytestmark = pytest.mark.usefixtures("programs_on_disk")

MANY = tuple((k,) for k in range(1, 2 + MANY_LABELS))
ITEM_LENS = [3, 1, 70, 128, 20]


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Longer steps in one dtype: JAX must compile programs of two sizes, and PyTorch cuts them in all dtypes alike."""
    if parameters["backend"] == "torch-bfloat16" and find_spec("torch") is not None:
        from tests.reference import is_emulated

        return is_emulated("bfloat16") or parameters["step_tokens"] > 512
    return bool(parameters["backend"] != "torch-float32" and parameters["step_tokens"] > 512)


@pytest.fixture(
    params=["torch-float32", "torch-bfloat16", "jax-float32", pytest.param("jax-bfloat16", marks=pytest.mark.slow)]
)
def backend(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Iterator[Backend]:
    name, dtype = request.param.split("-")
    cache_bytes = 1 << 26 if name == "jax" else None  # as in `test_isolation.py`, for its programs
    options = BackendOptions(backend=name, device="cpu", dtype=dtype, token_budget=2048, prefix_cache_bytes=cache_bytes)
    loaded = load_backend(open_checkpoint(checkpoint_of("medium")), options)
    yield loaded
    loaded.close()


def make_jobs() -> list[RequestState]:
    """Prefixes that some share, that begin alike, that end with a token alone; labels of all numbers."""
    return [
        state_of(prefix_of(400), ITEM_LENS, need_logsumexp=True),
        state_of(prefix_of(400), ITEM_LENS[::-1]),
        state_of(prefix_of(256), ITEM_LENS),
        state_of(prefix_of(129, 50), ITEM_LENS, labels=((3, 7, 9), (5, 1))),
        state_of(prefix_of(200, 90), ITEM_LENS, labels=MANY),
        state_of(0, ITEM_LENS),
    ]


def run(
    backend: Backend, step_tokens: int, *, joins_prefill: bool, **limits: int
) -> tuple[list[RequestState], list[str]]:
    """The requests, while one whose prefix was cached before goes on beside them; and the kinds of all forwards."""
    runner = StepRunner(step_tokens, backend=backend, joins_prefill=joins_prefill, **limits)
    before = state_of(prefix_of(300, 7), [30] * (step_tokens // 25))
    steps = [runner.run(before)]
    states = [before, *make_jobs()]
    steps += runner.finish(*states)
    runner.cache.clear()
    return states, [kind_of(forward) for step in steps for forward in step.forwards]


@pytest.mark.parametrize("step_tokens", [512, 2048])
def test_the_bits_are_those_of_separate_forwards(backend: Backend, step_tokens: int) -> None:
    """In short steps also where blocks go on behind those of earlier forwards."""
    for max_prefill_tokens in (512, 256) if step_tokens == 512 else (step_tokens,):
        separate, kinds_separate = run(backend, step_tokens, joins_prefill=False, max_prefill_tokens=max_prefill_tokens)
        joined, kinds = run(backend, step_tokens, joins_prefill=True, max_prefill_tokens=max_prefill_tokens)
        assert kinds.count("joined") >= 2
        assert "joined" not in kinds_separate
        assert len(kinds) < len(kinds_separate)
        assert_same_bits(joined, separate)


def assert_same_bits(joined: list[RequestState], separate: list[RequestState]) -> None:
    for one, other in zip(joined, separate, strict=True):
        assert one.label_logits.tobytes() == other.label_logits.tobytes()
        assert np.isfinite(one.label_logits).all()
        assert (one.logsumexp is None) == (other.logsumexp is None)
        if one.logsumexp is not None and other.logsumexp is not None:
            assert one.logsumexp.tobytes() == other.logsumexp.tobytes()
