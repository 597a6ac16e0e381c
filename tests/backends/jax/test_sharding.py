"""One model on several devices: however heads, MLP, vocabulary and batch are split, scores are those of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.contract.errors import BackendError
from prefixwise.contract.request import ScoreMode
from prefixwise.engine.likelihoods import Likelihoods
from prefixwise.plan.likelihoods import TokenSequence
from tests.reference import LOGIT_BOUND, PROBABILITY_BOUND, Floats

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

CPU: dict[str, Any] = {"backend": "jax", "device": "cpu"}
MODELS = ("heads-16-8", "heads-12-2", "heads-9-3", "heads-8-1", "heads-of-olmo2", "heads-of-gemma2")
MESHES = {
    "tp2": {"tp_size": 2},
    "tp4": {"tp_size": 4},
    "tp8": {"tp_size": 8},
    "dp2-tp4": {"dp_size": 2, "tp_size": 4},
}
PATHS: dict[str, dict[str, Any]] = {
    "serial": {"algorithm": "serial"},
    "packed-segment": {"algorithm": "packed", "mask": "segment"},
    "packed-dense": {"algorithm": "packed", "mask": "dense"},
    "prefill_extend": {"algorithm": "prefill_extend"},
}
# What is run every day: each way to split the heads (evenly; KV heads repeated; heads padded; one KV head repeated) and
# each path, on copies of the model, too. A path has programs of its own to compile, but for `serial`, which has those
# of `packed-segment`, and so has every mesh.
EVERYDAY = {
    ("heads-16-8", "tp8", "packed-segment"),
    ("heads-12-2", "dp2-tp4", "prefill_extend"),
    ("heads-9-3", "dp2-tp4", "packed-dense"),
    ("heads-8-1", "tp8", "packed-segment"),
    ("heads-of-olmo2", "tp8", "packed-segment"),
}
LABELS = (3, 5, 300)
MODES: tuple[ScoreMode, ...] = ("softmax", "logprob")

RANDOM = np.random.default_rng(11)
# Forwards of less than 512 tokens, serial ones too, so that each mesh needs one size of programs.
REQUESTS: dict[str, tuple[list[int], list[list[int]]]] = {
    name: (RANDOM.integers(0, 500, query_len).tolist(), [RANDOM.integers(0, 500, n).tolist() for n in item_lens])
    for name, query_len, item_lens in (
        ("a query of two key blocks", 140, (1, 33, 0)),
        ("many items", 20, (5, 1, 12, 0, 33, 7, 20, 3, 64, 2, 2)),
        ("an item for two copies of the model", 9, (4,)),
    )
}


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    if test != "test_scores_are_those_of_one_device":
        return False
    return tuple(parameters[name] for name in ("model", "mesh", "path")) not in EVERYDAY


def scores_of(scorer: Scorer, request: str, mode: ScoreMode) -> Floats:
    query, items = REQUESTS[request]
    return np.array(scorer.score(query, items, label_token_ids=LABELS, score_mode=mode).scores)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def expected(model: str, scorer_of: Callable[..., Scorer]) -> dict[tuple[str, ScoreMode], Floats]:
    """The scores of one device, by request and mode."""
    scorer = scorer_of(model, **CPU, **PATHS["packed-segment"])
    found = {(request, mode): scores_of(scorer, request, mode) for request in REQUESTS for mode in MODES}
    spread = found["many items", "softmax"].std(0).max()
    assert spread >= 0.15, f"scores hardly differ between items ({spread:.3f}), so an error would not show"
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mesh", MESHES)
def test_scores_are_those_of_one_device(
    scorer_of: Callable[..., Scorer],
    expected: dict[tuple[str, ScoreMode], Floats],
    model: str,
    mesh: str,
    path: str,
    request_name: str,
    mode: ScoreMode,
) -> None:
    found = scores_of(scorer_of(model, **CPU, **MESHES[mesh], **PATHS[path]), request_name, mode)
    assert np.abs(found - expected[request_name, mode]).max() <= PROBABILITY_BOUND


@pytest.mark.parametrize("path", ["packed-segment", "prefill_extend"])
def test_an_item_alone_has_the_bits_that_it_has_among_others(scorer_of: Callable[..., Scorer], path: str) -> None:
    """Whichever copy of the model it goes to, and however the devices add up. So has its hidden state."""
    scorer = scorer_of("heads-12-2", **CPU, **MESHES["dp2-tp4"], **PATHS[path])
    query, items = REQUESTS["many items"]
    options: dict[str, Any] = {"label_token_ids": LABELS, "score_mode": "logprob", "return_pooled_hidden_states": True}
    together = scorer.score(query, items, **options)
    alone = [scorer.score(query, [item], **options) for item in items]
    assert [each.scores[0] for each in alone] == together.scores == scores_of(scorer, "many items", "logprob").tolist()
    states = [each.pooled_hidden_states for each in alone]
    np.testing.assert_array_equal(np.concatenate([state for state in states if state]), together.pooled_hidden_states)


def test_log_likelihoods_are_those_of_one_device(scorer_of: Callable[..., Scorer]) -> None:
    """The vocabulary is split between the devices: of its most likely tokens, too."""
    ids = [*REQUESTS["a query of two key blocks"][0], *REQUESTS["many items"][0]]
    asked = [
        TokenSequence(np.array(ids, np.int32), 1, reads_next=True),
        TokenSequence(np.array(ids[:40], np.int32), 30),
    ]
    one, several = (
        Likelihoods(scorer_of("heads-12-2", **CPU, **mesh, **PATHS["prefill_extend"]).engine).read(asked, top_k=5)
        for mesh in ({}, MESHES["dp2-tp4"])
    )
    for expected, found in zip(one, several, strict=True):
        assert np.abs(found.logprobs - expected.logprobs).max() <= LOGIT_BOUND
        assert np.abs(found.top_logprobs - expected.top_logprobs).max() <= LOGIT_BOUND
        assert found.top_ids[:, 0].tolist() == expected.top_ids[:, 0].tolist()


def test_it_says_on_how_many_devices_it_runs(scorer_of: Callable[..., Scorer]) -> None:
    scorer = scorer_of("heads-12-2", **CPU, **MESHES["dp2-tp4"])
    assert scorer.engine.backend.info.device == "8 x cpu"


def test_more_shards_than_devices(checkpoint_of: Callable[[str], Path]) -> None:
    with pytest.raises(BackendError, match="dp_size=2 and tp_size=8 need 16 devices, got 8; lower one of them"):
        Scorer(checkpoint_of("heads-12-2"), **CPU, dp_size=2, tp_size=8)
