"""Fixtures that several rooms share: small checkpoints, their scorers and their references, made once per run."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from itemwise import Scorer
from itemwise.models.embedded import embedded_model_path
from tests.checkpoints import add_tokenizer, make_hf_checkpoint
from tests.reference import Reference

# Large enough that matrix products of this shape give other bits at other row counts unless they are held to one.
MEDIUM_SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
}

# Two layers of Qwen3-0.6B, for devices that choose their kernels by shape.
WIDE_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.04,
}
SIZES = {"medium": MEDIUM_SIZES, "wide": WIDE_SIZES}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint with a tokenizer by family name; `medium` and `wide` are Qwen3s of realistic widths."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("checkpoints") / family
            if family in SIZES:
                make_hf_checkpoint(folder, "qwen3", **SIZES[family])
            else:
                make_hf_checkpoint(folder, family)
            made[family] = add_tokenizer(folder, bos=family.startswith("llama"))
        return made[family]

    return get


@pytest.fixture(scope="session")
def reference_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], Reference]:
    loaded: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in loaded:
            if family == "embedded":
                path = embedded_model_path()
                loaded[family] = Reference.load(path.parent, gguf_file=path.name)
            else:
                loaded[family] = Reference.load(checkpoint_of(family))
        return loaded[family]

    return get


@pytest.fixture(scope="session")
def scorer_of(checkpoint_of: Callable[[str], Path]) -> Iterator[Callable[..., Scorer]]:
    """A scorer by family and options, loaded once for the whole run."""
    loaded: dict[tuple[object, ...], Scorer] = {}

    def get(family: str, **options: Any) -> Scorer:
        options = {"dtype": "float32", **options}
        key = (family, *sorted(options.items()))
        if key not in loaded:
            loaded[key] = Scorer(None if family == "embedded" else checkpoint_of(family), **options)
        return loaded[key]

    yield get
    for scorer in loaded.values():
        scorer.close()
