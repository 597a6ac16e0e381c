"""Tokenizers that are made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from prefixwise.prompts.tokenizer import TextTokenizer
from tests.prompts.reranker_tokenizers import MAKERS, read_text_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tokenizer, by one of the names of MAKERS."""
    base = tmp_path_factory.mktemp("tokenizers")
    return cache(lambda name: MAKERS[name](base / name))


@pytest.fixture(scope="session")
def text_tokenizer(tokenizer_folder: Callable[[str], Path]) -> Callable[[str], TextTokenizer]:
    return cache(lambda name: read_text_tokenizer(tokenizer_folder(name)))
