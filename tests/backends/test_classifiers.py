"""Rerankers that were converted for sequence classification give what the causal model gives, on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from prefixwise.backends.load import load_backend
from prefixwise.backends.torch.weights import load_weights
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.forward.batch import ForwardBatch, Layout
from prefixwise.models.sources import open_checkpoint
from tests.backends.torch.batches import ITEMS, PREFIXES, sequences_batch
from tests.checkpoints import make_classifier, read_hf_tensors

pytestmark = pytest.mark.usefixtures("quick_compilation", "programs_on_disk")

YES, NO = 30, 41
PREFIX = PREFIXES[1]
BOUND = 1e-5
JAX = BackendOptions("jax", device="cpu", dtype="float32", token_budget=512, prefix_cache_bytes=1 << 26)
BACKENDS: dict[str, BackendOptions] = {
    "torch": BackendOptions("torch", device="cpu", dtype="float32"),
    "jax": JAX,
    "jax-tp2": replace(JAX, tp_size=2),
}
CONVERSIONS = {"torch": ("difference", "single", "rows"), "jax": ("rows",), "jax-tp2": ("difference",)}

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Backends:
    """One backend with the causal model, and with conversions of it. JAX finds the same layers on disk."""

    causal: Backend
    converted: dict[str, Backend]

    @property
    def all(self) -> tuple[Backend, ...]:
        return self.causal, *self.converted.values()


@pytest.fixture(scope="module")
def folders(checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The causal model, and its three conversions."""
    causal, base = checkpoint_of("qwen3"), tmp_path_factory.mktemp("classifiers")
    head = read_hf_tensors(causal)["model.embed_tokens.weight"]  # which is tied
    rows = {"difference": head[[YES]] - head[[NO]], "single": head[[YES]], "rows": head[[NO, YES]]}
    return {"causal": causal} | {name: make_classifier(base / name, causal, each) for name, each in rows.items()}


@pytest.fixture(scope="module", params=BACKENDS)
def backends(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[Backends]:
    def load(name: str) -> Backend:
        return load_backend(open_checkpoint(folders[name]), BACKENDS[request.param])

    loaded = Backends(load("causal"), {name: load(name) for name in CONVERSIONS[request.param]})
    yield loaded
    for backend in loaded.all:
        backend.close()


def batch_of(*labels: int, need_logsumexp: bool = False) -> ForwardBatch:
    """One packed sequence, so that JAX has one program to compile."""
    batch = sequences_batch(PREFIX, [ITEMS], Layout.PACKED)
    label_ids = np.tile(np.array(labels, np.int32), (len(ITEMS), 1))
    return replace(batch, label_ids=label_ids, need_logsumexp=need_logsumexp)


def logits_of(backend: Backend, *labels: int) -> Floats:
    return backend.forward(batch_of(*labels)).label_logits


def test_a_conversion_scores_as_the_causal_model(backends: Backends) -> None:
    expected = logits_of(backends.causal, NO, YES)
    assert np.ptp(expected[:, 1] - expected[:, 0]) > 1, "so that a mistake would show"
    wanted = {"difference": expected[:, 1:] - expected[:, :1], "single": expected[:, 1:], "rows": expected}
    for name, backend in backends.converted.items():
        found = logits_of(backend, *range(backend.config.num_classes))
        assert found.shape == wanted[name].shape
        assert np.abs(found - wanted[name]).max() <= BOUND, name
        last = backend.config.num_classes - 1
        assert np.array_equal(logits_of(backend, last), found[:, -1:]), "a row by itself"


def test_a_classifier_scores_as_transformers(backends: Backends, folders: dict[str, Path]) -> None:
    from transformers import AutoModelForSequenceClassification

    for name, backend in backends.converted.items():
        model = AutoModelForSequenceClassification.from_pretrained(folders[name], dtype=torch.float32).eval()
        found = logits_of(backend, *range(backend.config.num_classes))
        for item, logits in zip(ITEMS, found, strict=True):
            ids = torch.from_numpy(np.concatenate([PREFIX, item])).long()
            with torch.inference_mode():
                assert np.abs(model(ids[None]).logits[0].numpy() - logits).max() <= BOUND


def test_normalizers_are_those_of_the_classes(backends: Backends) -> None:
    """No request asks a classifier for them, but they are compiled with the rest."""
    for backend in backends.converted.values():
        output = backend.forward(batch_of(*range(backend.config.num_classes), need_logsumexp=True))
        assert output.logsumexp is not None
        expected = np.logaddexp.reduce(output.label_logits, axis=1)
        assert np.abs(output.logsumexp - expected).max() <= BOUND


def test_warm_up_runs_the_programs_of_a_head_of_few_rows(backends: Backends) -> None:
    for backend in backends.converted.values():
        programs = {each.title: each for each in backend.programs(max_dense_len=0)}
        assert bool(programs) == (backend.info.name == "jax")
        for title in ("score, 512 tokens", "labels", "logsumexp") if programs else ():
            programs[title].prepare()


def test_the_rows_stay_in_float32(folders: dict[str, Path]) -> None:
    """As they do in JAX: `jax/test_weights.py`."""
    weights = load_weights(open_checkpoint(folders["difference"]), torch.bfloat16, torch.device("cpu"))
    assert (weights.embedding.dtype, weights.embedding.shape) == (torch.bfloat16, (512, 64))
    assert (weights.head.dtype, weights.head.shape) == (torch.float32, (1, 64))
    assert np.array_equal(weights.head.numpy(), read_hf_tensors(folders["difference"])["score.weight"])


def test_hidden_states_come_where_they_are_asked_for(backends: Backends) -> None:
    """One row per scored token, from all shards; the logits keep their bits."""
    for backend in backends.all:
        batch = batch_of(0)
        without, found = backend.forward(batch), backend.forward(replace(batch, need_hidden=True))
        assert without.hidden is None
        assert found.hidden is not None
        assert found.hidden.shape == (len(ITEMS), backend.config.model_size)
        assert found.hidden.dtype == np.float32
        assert np.array_equal(found.label_logits, without.label_logits)
    (causal, *_), (converted, *_) = (
        [each.forward(replace(batch_of(0), need_hidden=True)).hidden for each in group]
        for group in ((backends.causal,), backends.converted.values())
    )
    assert causal is not None
    assert converted is not None
    assert np.array_equal(causal, converted), "the head is behind them"
