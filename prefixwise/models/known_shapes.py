"""The shape of a model without its weights: `known_shapes.toml`, a folder with its config.json, or a GGUF file."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path

from prefixwise.contract.errors import ModelLoadError
from prefixwise.models.config import ModelConfig
from prefixwise.models.hf_folder import describe_hf_folder, describe_hf_model


@cache
def known_shapes() -> dict[str, ModelConfig]:
    """By hub id."""
    text = files("prefixwise.models").joinpath("known_shapes.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)["model"]
    return {name: describe_hf_model(entry) for entry in entries for name in entry["names"]}


def describe_model(model: str) -> ModelConfig:
    """By hub id, or the part of it behind the owner, in any case of its letters; a folder; or a .gguf file.

    Raises ModelLoadError where it is none of them. Nothing is downloaded.
    """
    path = Path(model).expanduser()
    if model and (path / "config.json").is_file():
        return describe_hf_folder(path)
    if path.is_file() and path.suffix == ".gguf":
        from prefixwise.models.gguf import open_gguf

        return open_gguf(path, model).config
    for name, config in known_shapes().items():
        if model.lower() in (name.lower(), name.partition("/")[2].lower()):
            return config
    known = ", ".join(name.partition("/")[2] for name in known_shapes())
    raise ModelLoadError(
        f"no model of the name {model!r}: expected a folder with config.json, a .gguf file, or one of {known}"
    )
