from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefixwise.bench.kinds.base import Scores
from prefixwise.bench.run.parity import ReferenceMissingError, TransformersReference, compare_with_reference
from prefixwise.contract.errors import ArtifactError, ModelLoadError
from tests.bench.evaluations import DELIMITER, ITEMS, LABELS, QUERY, multi_evaluation, serial_evaluation
from tests.checkpoints import make_gguf
from tests.reference import Reference, expected_scores

ALONE = [[*QUERY, *item] for item in ITEMS]
ALIGNED = [[*QUERY, DELIMITER, *item] for item in ITEMS]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[[str], Path]) -> Path:
    return checkpoint_of("qwen3")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> TransformersReference:
    return TransformersReference.load(str(checkpoint))


def moved(scores: Scores, by: float) -> Scores:
    return [[score + by for score in row] for row in scores]


def test_it_says_what_transformers_says(
    reference: TransformersReference, reference_of: Callable[[str], Reference]
) -> None:
    expected = expected_scores("softmax", reference_of("qwen3").label_logits(ALONE), LABELS)
    assert np.abs(np.array(reference.probabilities(ALONE, LABELS)) - expected).max() < 1e-6


def test_it_computes_in_float32_whatever_the_checkpoint_is_in(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16").save_pretrained(tmp_path)
    loaded = TransformersReference.load(str(tmp_path))
    assert {str(each.dtype) for each in loaded.model.parameters()} == {"torch.float32"}


def test_a_gguf_file_is_read_by_its_name_or_by_that_of_its_folder(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    llama = checkpoint_of("llama")
    path = make_gguf(llama, tmp_path / "model.gguf")
    by_file, by_folder, by_origin = (TransformersReference.load(str(name)) for name in (path, tmp_path, llama))
    assert by_file.path == by_folder.path == str(path)
    assert np.allclose(by_file.probabilities(ALONE, LABELS), by_origin.probabilities(ALONE, LABELS), atol=1e-6)


def test_what_transformers_cannot_run_is_one_line(reference: TransformersReference) -> None:
    with pytest.raises(ModelLoadError, match=r"transformers cannot run .*: index 512 is out of bounds"):
        reference.probabilities(ALONE, [4, 512])


def test_each_server_is_held_against_its_own_prompt(reference: TransformersReference) -> None:
    torch_serial, torch_multi = (reference.probabilities(contexts, LABELS) for contexts in (ALONE, ALIGNED))
    multi = multi_evaluation(moved(torch_multi, 0.125))
    serial = serial_evaluation(moved(torch_serial, 0.25))
    found = compare_with_reference(multi, serial, reference)
    assert found.max_abs_diff_jax_serial_vs_torch_serial == pytest.approx(0.25)
    assert found.max_abs_diff_jax_multi_vs_torch_multi_semantic == pytest.approx(0.125)
    across = np.abs(np.array(multi.isolation.base_scores) - torch_serial).max()
    assert found.max_abs_diff_jax_multi_vs_torch_serial == pytest.approx(across)
    assert across != pytest.approx(0.125)


def test_the_vectors_behind_the_figures_are_kept(reference: TransformersReference, checkpoint: Path) -> None:
    found = compare_with_reference(multi_evaluation(), serial_evaluation([[0.0, 1.0], [1.0, 0.0]]), reference)
    assert found.jax_multi_scores == [[0.5, 0.5], [0.25, 0.75]]
    assert found.jax_serial_scores == [[0.0, 1.0], [1.0, 0.0]]
    assert found.torch_serial_reference_scores == reference.probabilities(ALONE, LABELS)
    assert found.torch_multi_semantic_reference_scores == reference.probabilities(ALIGNED, LABELS)
    assert (found.reference["path"], found.reference["dtype"]) == (str(checkpoint), "float32")


def test_evaluations_of_other_inputs_are_an_error(reference: TransformersReference) -> None:
    with pytest.raises(ArtifactError, match="the same labels"):
        compare_with_reference(multi_evaluation(labels=[1, 2]), serial_evaluation(), reference)


def test_without_transformers_there_is_no_reference(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ReferenceMissingError, match="needs transformers, and transformers is not installed"):
        TransformersReference.load(str(checkpoint))


def test_without_pytorch_neither(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setattr("transformers.utils.is_torch_available", lambda: False)
    with pytest.raises(ReferenceMissingError, match="needs PyTorch"):
        TransformersReference.load(str(checkpoint))


def test_what_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"transformers cannot load '{tmp_path}': ") as raised:
        TransformersReference.load(str(tmp_path))
    assert "\n" not in str(raised.value)


def test_a_name_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(ModelLoadError, match="'a-model' is neither a local path nor a model the hub gives us"):
        TransformersReference.load("a-model")
