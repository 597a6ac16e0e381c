"""`deploy/`: what images, compose and Kubernetes say of the server is what the server is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DRAIN_SECONDS = 12  # beyond --shutdown-grace: docs/operations.md


def read_yaml(path: Path) -> Any:
    """The only document of the file."""
    (document,) = read_documents(path.read_text("utf-8"))
    return document


def read_documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def serve_parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The options of `prefixwise serve` by name, as the real program parses the arguments."""
    from typer.main import get_command

    from prefixwise.cli.main import app

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    parameters: dict[str, Any] = serve.make_context("serve", list(arguments)).params
    return parameters


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile in order: name and arguments, without comments and line continuations."""
    lines = (DEPLOY / "images" / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(name, " ".join(arguments.split())) for name, arguments in pairs]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage. The first one of each is FROM."""
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for name, arguments in dockerfile():
        if name == "FROM":
            current = found[arguments.rpartition(" AS ")[2]] = []
        current.append((name, arguments))
    return found


def arguments_of(stage: str, name: str) -> Iterator[str]:
    """The arguments of every such instruction in the stage."""
    return (arguments for each, arguments in stages()[stage] if each == name)
