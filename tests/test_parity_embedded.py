"""The embedded model against Hugging Face transformers: real weights, real tokenizer, text in; and its isolation.

A module of its own: transformers needs much memory to read a GGUF file, which is returned when the module is done, and
a model is loaded for all tests in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from prefixwise import Scorer
from prefixwise.contract.request import Algorithm, ScoreMode
from prefixwise.models.families import HF_TENSOR_NAMES, stored_name
from prefixwise.models.sources import embedded_model_path, open_checkpoint
from tests.reference import Floats, Reference, bound_of, expected_scores, is_emulated
from tests.test_parity import ALGORITHMS, MODES, assert_within_bfloat16

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT_QUERY = "Decide whether the text is about food. Text: "
TEXT_ITEMS = ("Fresh pasta with tomato sauce.", "The tax code of 1986.", "", "Grüße aus Köln 🙂", "pizza " * 40)
TEXT_LABELS = (" yes", " no")
# Query and items as the tokenizer of transformers cuts them: to make it of a GGUF file takes longer than to score them.
# `models/test_gguf_tokenizer.py` holds ours against it.
EXPECTED_IDS: tuple[list[int], ...] = (
    [12654, 489, 1991, 260, 1694, 314, 563, 1114, 30, 9378, 42, 216],
    [40058, 19904, 351, 17048, 14124, 30],
    [504, 3024, 2909, 282, 216, 33, 41, 40, 38, 30],
    [],
    [27302, 7170, 34878, 85, 253, 376, 659, 7466, 34115, 47526],
    [96, 16017, *[18501] * 39, 216],
)


def is_slow(test: str, parameters: Mapping[str, Any]) -> bool:
    """Score modes are functions of the same logits, and on a CPU all algorithms are equal bit for bit. JAX in bfloat16
    every day: `test_parity.py`, `test_isolation.py`."""
    mode, algorithm = (parameters.get(name) for name in ("mode", "algorithm"))
    if parameters.get("cpu") == "jax" and (test.startswith("test_items_are_isolated") or "bfloat16" in test):
        return True
    if test == "test_items_are_isolated_in_bfloat16" and is_emulated("bfloat16"):  # by the path of float32
        return True
    if parameters.get("cpu") == "jax":
        return mode not in ("logprob", None) or algorithm not in ("packed", None)
    return test == "test_scores_equal_transformers" and algorithm != "auto" and mode != "logprob"


@dataclass(frozen=True)
class Expected:
    """What transformers makes of the file; the model itself is freed."""

    logits: Floats  # [items, V]
    tensors: Mapping[str, bytes]  # a digest of each tensor's bytes in float32


@pytest.fixture(scope="module")
def expected() -> Expected:
    path = embedded_model_path()
    reference = Reference.load(path.parent, gguf_file=path.name)
    query, *items = EXPECTED_IDS
    logits = reference.label_logits([query + item for item in items])
    return Expected(logits, {name: digest(each.numpy()) for name, each in reference.model.state_dict().items()})


def digest(values: NDArray[np.float32]) -> bytes:
    assert values.dtype == np.float32
    return blake2b(np.ascontiguousarray(values).data).digest()


def test_tensors_are_those_of_transformers(expected: Expected) -> None:
    tensors = open_checkpoint(None).tensors
    assert len(tensors) == 272
    for key, tensor in tensors.items():
        values = tensor.read_rows(0, tensor.shape[0])
        assert digest(values) == expected.tensors[stored_name(key, HF_TENSOR_NAMES, "model.layers")], key


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_scores_equal_transformers(
    scorer_of: Callable[..., Scorer], cpu: dict[str, Any], expected: Expected, algorithm: Algorithm, mode: ScoreMode
) -> None:
    scorer = scorer_of("embedded", **cpu)
    result = scorer.score(TEXT_QUERY, TEXT_ITEMS, labels=TEXT_LABELS, score_mode=mode, algorithm=algorithm)
    difference = np.array(result.scores) - expected_scores(mode, expected.logits, label_ids(scorer))
    assert np.abs(difference).max() <= bound_of(mode)


@pytest.mark.usefixtures("users_compilation")
def test_items_are_isolated(scorer_of: Callable[..., Scorer], cpu: dict[str, Any]) -> None:
    check_isolation(scorer_of("embedded", **cpu))


def check_isolation(scorer: Scorer) -> None:
    """Each item has the bits that it has alone, and in any order."""

    def scores(items: Sequence[str]) -> list[list[float]]:
        return scorer.score(TEXT_QUERY, items, labels=TEXT_LABELS, score_mode="logprob").scores

    together = scores(TEXT_ITEMS)
    assert [scores([item])[0] for item in TEXT_ITEMS] == together
    assert scores(TEXT_ITEMS[::-1])[::-1] == together


def test_bfloat16_stays_within_its_bounds(
    scorer_of: Callable[..., Scorer], cpu: dict[str, Any], expected: Expected
) -> None:
    scorer = scorer_of("embedded", dtype="bfloat16", **cpu)
    result = scorer.score(TEXT_QUERY, TEXT_ITEMS, labels=TEXT_LABELS, apply_softmax=True)
    assert_within_bfloat16(np.array(result.scores), expected_scores("softmax", expected.logits, label_ids(scorer)))


@pytest.mark.usefixtures("users_compilation")
def test_items_are_isolated_in_bfloat16(scorer_of: Callable[..., Scorer], cpu: dict[str, Any]) -> None:
    check_isolation(scorer_of("embedded", dtype="bfloat16", **cpu))


def label_ids(scorer: Scorer) -> list[int]:
    assert scorer.engine.tokenizer is not None
    return [scorer.engine.tokenizer.label_id(label, i) for i, label in enumerate(TEXT_LABELS)]
