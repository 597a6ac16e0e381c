"""`prefixwise models`: the supported families, and the models on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from prefixwise.cli.output import Column, render_table, stdout_width, styled, visible, write_data

if TYPE_CHECKING:
    from prefixwise.models.families import Family
    from prefixwise.models.sources import LocalModel


def models(
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """List the supported families, and the models found in the local caches."""
    from prefixwise.models.families import FAMILIES
    from prefixwise.models.sources import find_local_models

    families = list(FAMILIES.values())
    found = find_local_models()
    write_data(_json(families, found) if as_json else _tables(families, found))


def _json(families: list[Family], found: list[LocalModel]) -> str:
    body = {
        "families": [_family_json(family) for family in families],
        "models": [_model_json(each) for each in found],
    }
    return json.dumps(body) + "\n"


def _family_json(family: Family) -> dict[str, object]:
    return {
        "name": family.name,
        "title": family.title,
        "hf_architectures": family.hf_architectures,
        "hf_classifiers": family.hf_classifiers,
        "gguf_architectures": family.gguf_architectures,
        "formats": _formats(family),
    }


def _model_json(model: LocalModel) -> dict[str, object]:
    return {**asdict(model), "path": None if model.path is None else str(model.path)}


def _formats(family: Family) -> list[str]:
    return ["safetensors", *(["GGUF"] if family.gguf_architectures else [])]


def _tables(families: list[Family], found: list[LocalModel]) -> str:
    titles = [styled(title, "bold cyan") for title in ("Supported families", "Models on this machine")]
    return f"{titles[0]}\n{_family_table(families)}\n{titles[1]}\n{_model_table(found)}"


def _family_table(families: list[Family]) -> str:
    columns = [
        Column("family", [family.name for family in families]),
        Column("models", [family.title for family in families]),
        Column("architecture", [", ".join(family.hf_architectures or family.hf_classifiers) for family in families]),
        Column("formats", [", ".join(_formats(family)) for family in families]),
    ]
    return render_table(columns, stdout_width())


def _model_table(found: list[LocalModel]) -> str:
    """Paths are never cut, so that they can be copied; a note is printed below its model."""
    columns = [
        Column("model", [visible(model.name) for model in found]),
        Column("family", [model.family or "-" for model in found]),
        Column("size", [_size(model.size_bytes) for model in found], align_right=True),
        Column("path", ["-" if model.path is None else visible(str(model.path)) for model in found]),
    ]
    header, *lines = render_table(columns, stdout_width()).splitlines(keepends=True)
    return header + "".join(line + _note(model) for line, model in zip(lines, found, strict=True))


def _note(model: LocalModel) -> str:
    if not model.note:
        return ""
    reason = model.note if model.family else f"cannot be used: {model.note}"
    return f"  {visible(reason)}\n"


def _size(num_bytes: int) -> str:
    if num_bytes >= 10**9:
        return f"{num_bytes / 10**9:.1f} GB"
    return f"{num_bytes / 10**6:.1f} MB" if num_bytes else "-"
