"""Checkpoints that are made, or read by another library, once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from prefixwise.models.checkpoint import Checkpoint
from prefixwise.models.sources import embedded_model_path, open_checkpoint
from tests.checkpoints import FAMILY_NAMES, GGUF_FAMILY_NAMES, make_gguf, make_hf_checkpoint, quick_gguf_reader


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per family; tests that change a folder make their own."""
    base = tmp_path_factory.mktemp("hf")
    return {family: make_hf_checkpoint(base / family, family) for family in FAMILY_NAMES}


@pytest.fixture(scope="session")
def gguf_files(hf_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as F32 GGUF files."""
    base = tmp_path_factory.mktemp("gguf")
    return {family: make_gguf(hf_folders[family], base / f"{family}.gguf") for family in GGUF_FAMILY_NAMES}


@pytest.fixture(scope="session")
def embedded(embedded_path: Path) -> Checkpoint:
    return open_checkpoint(embedded_path)


@pytest.fixture(scope="session")
def embedded_path() -> Path:
    return embedded_model_path()


@pytest.fixture(scope="session")
def embedded_reader(embedded_path: Path) -> gguf.GGUFReader:
    """gguf's own view of the file."""
    with quick_gguf_reader():
        return gguf.GGUFReader(embedded_path)
