"""Log-probabilities of tokens: those of Hugging Face transformers, and the same bits whatever else is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.engine.likelihoods import Likelihoods, TokenLogprobs
from prefixwise.plan.likelihoods import TokenSequence
from tests.reference import Reference, log_softmax

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

TOP_K = 5
BOUND = 1e-4


def asked(vocab_size: int) -> list[TokenSequence]:
    """Choices behind one context, a long continuation, and whole prompts that share blocks."""
    rng = np.random.default_rng(3)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return rng.integers(0, vocab_size, count).astype(np.int32)

    context, prompt = ids(150), ids(260)
    choices = [TokenSequence(np.concatenate([context, ids(size)]), len(context)) for size in (1, 3, 6)]
    long = TokenSequence(np.concatenate([context, ids(200)]), len(context))
    prompts = [TokenSequence(prompt, 1), TokenSequence(np.concatenate([prompt[:256], ids(20)]), 1, reads_next=True)]
    prompts += [TokenSequence(np.concatenate([prompt[:170], ids(size)]), 1) for size in (9, 30)]
    return [*choices, long, *prompts, TokenSequence(ids(9), 9, reads_next=True)]


@pytest.fixture(
    scope="module",
    params=[
        "torch-cpu",
        "jax-cpu",
        *(pytest.param(f"{each}-cuda", marks=pytest.mark.gpu) for each in ("torch", "jax")),
    ],
)
def scorer(request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]) -> Iterator[Scorer]:
    backend, device = request.param.split("-")
    options = {"backend": backend, "device": device, "dtype": "float32", "batch_invariant": device == "cuda"}
    if (backend, device) == ("jax", "cpu"):  # forwards of one size, so that few programs are compiled
        options |= {"token_budget": 512, "prefix_cache_bytes": 1 << 24}
    with Scorer(checkpoint_of("qwen3"), **options) as made:
        yield made


@pytest.fixture(scope="module")
def found(scorer: Scorer) -> list[TokenLogprobs]:
    return Likelihoods(scorer.engine).read(asked(scorer.engine.backend.config.vocab_size), top_k=TOP_K)


def test_they_are_those_of_transformers(
    scorer: Scorer, found: list[TokenLogprobs], checkpoint_of: Callable[[str], Path]
) -> None:
    reference = Reference.load(checkpoint_of("qwen3"))
    for sequence, result in zip(asked(scorer.engine.backend.config.vocab_size), found, strict=True):
        ids = sequence.token_ids.tolist()
        expected = log_softmax(reference.all_logits(ids))[sequence.first - 1 :]
        places = range(len(ids) - sequence.first)
        tokens = [expected[row, ids[sequence.first + row]] for row in places]
        assert np.abs(result.logprobs[: len(tokens)] - tokens).max(initial=0) < BOUND
        best = np.sort(expected, 1)[:, ::-1][:, :TOP_K]
        assert np.abs(result.top_logprobs - best[: len(result.top_logprobs)]).max() < BOUND
        assert (result.top_logprobs[:, 0] - result.logprobs >= 0)[: len(tokens)].all()
        top = np.take_along_axis(expected[: len(result.top_ids)], result.top_ids.astype(np.int64), 1)
        assert np.abs(top - result.top_logprobs).max() < BOUND


def test_other_sequences_do_not_move_a_bit(scorer: Scorer, found: list[TokenLogprobs]) -> None:
    likelihoods = Likelihoods(scorer.engine)
    for sequence, together in zip(asked(scorer.engine.backend.config.vocab_size), found, strict=True):
        (alone,) = likelihoods.read([sequence], top_k=TOP_K)
        assert alone.logprobs.tolist() == together.logprobs.tolist()
        assert alone.top_ids.tolist() == together.top_ids.tolist()
        assert alone.top_logprobs.tolist() == together.top_logprobs.tolist()
        assert alone.is_greedy.tolist() == together.is_greedy.tolist()
