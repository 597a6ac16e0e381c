"""Tasks of BIG-bench and the Lee corpus, out of packages of PyPI: `bigbench`'s source has tasks as JSON, and `gensim`'s
wheel has 50 texts whose similarities people have judged.

The packages are fetched once, 390 MB; the few files that are used stay in the user's cache folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.host import replacing, user_cache_folder

# Multiple-choice tasks, small and large, of several kinds, of `benchmarks.quality.accuracy`.
TASKS = (
    "date_understanding",
    "goal_step_wikihow/goal_inference",
    "goal_step_wikihow/step_inference",
    "implicatures",
    "intent_recognition",
    "movie_recommendation",
    "ruin_names",
    "social_iqa",
    "sports_understanding",
    "strategyqa",
)
# Of `benchmarks.quality.harness`.
HARNESS_TASKS = ("intent_recognition", "social_iqa", "bbq_lite_json/disability_status_ambig")
CACHE = user_cache_folder() / "prefixwise" / "quality"
_BIGBENCH, _GENSIM = "bigbench==1.0.0", "gensim==4.4.0"
_TASK_ROOT = "bigbench-1.0.0/bigbench/benchmark_tasks/"
_LEE_ROOT = "gensim/test/test_data/"
_LEE_FILES = ("lee.cor", "similarities0-1.txt")


@dataclass(frozen=True)
class Document:
    """A question with choices. The prompt is BIG-bench's; a choice follows it at once."""

    text: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """What comes before all documents and between them, and the documents."""

    name: str
    description: str
    separator: str
    documents: tuple[Document, ...]


def read_task(name: str) -> Task:
    """One of TASKS or HARNESS_TASKS; fetched with all others if it is not there."""
    path = CACHE / "bigbench" / f"{name.replace('/', '.')}.json"
    if not path.is_file():
        _fetch_tasks()
    return parse_task(name, json.loads(path.read_text(encoding="utf-8")))


def parse_task(name: str, raw: Mapping[str, Any]) -> Task:
    """As BIG-bench reads its JSON, with its defaults. Choices and documents are shuffled: in some tasks the best choice
    comes first, and documents of one kind come together. Examples with several best choices are left out."""
    documents, order = [], Random(name)
    for example in raw["examples"]:
        scores: Mapping[str, float] = example["target_scores"]
        choices = order.sample(list(scores), len(scores))
        best = [number for number, choice in enumerate(choices) if scores[choice] == max(scores.values())]
        if len(best) != 1:
            continue
        prefix = raw.get("choice_prefix", "\n  choice: ")
        listed = "".join(prefix + choice for choice in choices) if raw.get("append_choices_to_input", True) else ""
        text = raw.get("example_input_prefix", "\nQ: ") + str(example["input"]) + listed
        documents.append(Document(text + raw.get("example_output_prefix", "\nA: "), tuple(choices), best[0]))
    order.shuffle(documents)
    separator = raw.get("few_shot_example_separator", "\n")
    return Task(name, str(raw.get("task_prefix", "")), separator, tuple(documents))


def read_lee() -> tuple[list[str], NDArray[np.float64]]:
    """50 news texts [n], and how similar people find them [n, n]."""
    folder = CACHE / "lee"
    if not all((folder / name).is_file() for name in _LEE_FILES):
        _fetch_lee()
    texts = (folder / "lee.cor").read_text(encoding="latin-1").splitlines()
    upper = np.loadtxt(folder / "similarities0-1.txt")
    return texts, np.triu(upper) + np.triu(upper, 1).T


def _fetch_tasks() -> None:
    wanted = {f"{_TASK_ROOT}{name}/task.json": name for name in (*TASKS, *HARNESS_TASKS)}
    # The tasks are compressed as one stream, so it is read once, from its beginning.
    with TemporaryDirectory() as folder, tarfile.open(_source(_BIGBENCH, Path(folder)), "r|gz") as archive:
        for member in archive:
            name = wanted.pop(member.name, None)
            if name is not None:
                source = archive.extractfile(member)
                assert source is not None, "it is a file"
                _write(CACHE / "bigbench" / f"{name.replace('/', '.')}.json", source.read())
            if not wanted:
                return
    raise FileNotFoundError(f"{_BIGBENCH} must have {', '.join(wanted)}")


def _fetch_lee() -> None:
    with TemporaryDirectory() as folder, zipfile.ZipFile(_wheel(_GENSIM, Path(folder))) as archive:
        for name in _LEE_FILES:
            _write(CACHE / "lee" / name, archive.read(_LEE_ROOT + name))


def _source(requirement: str, folder: Path) -> Path:
    return _download(requirement, folder, "--no-binary", ":all:")


def _wheel(requirement: str, folder: Path) -> Path:
    return _download(requirement, folder, "--only-binary", ":all:")


def _download(requirement: str, folder: Path, *options: str) -> Path:
    """The package's file. pip's messages go to stderr."""
    print(f"fetching {requirement} from PyPI, for {CACHE}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *options, "--dest", str(folder), requirement]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (path,) = folder.iterdir()
    return path


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
