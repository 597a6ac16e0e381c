"""What runs of lm-evaluation-harness have found: kept in parts, compared, and shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prefixwise.host import replacing

GOALS = {"shared": 8.0, "own": 2.5}  # times the documents per second of `hf`
GPU_GOALS = {"shared": 10.0, "own": 3.0}
MAX_DIFFERENCE = 1e-4  # of a log-likelihood, in nats
MODELS = ("prefixwise", "local-completions", "hf")


@dataclass(frozen=True)
class Run:
    """One task through one model."""

    accuracy: float
    logprobs: NDArray[np.float64]  # of every choice of every document
    num_documents: int
    seconds: float
    cpu_seconds: float  # of this process, which a busy machine does not change much; not those of a server

    @property
    def rate(self) -> float:
        return self.num_documents / self.seconds

    @classmethod
    def of_parts(cls, parts: Sequence[Run]) -> Run:
        num_documents = sum(part.num_documents for part in parts)
        return cls(
            sum(part.accuracy * part.num_documents for part in parts) / num_documents,
            np.concatenate([part.logprobs for part in parts]),
            num_documents,
            sum(part.seconds for part in parts),
            sum(part.cpu_seconds for part in parts),
        )


@dataclass(frozen=True)
class Parts:
    """A folder with what was measured so far, all of it on one machine with one model."""

    folder: Path
    num_documents: int | None  # of a part; None: all
    facts: Mapping[str, Any]  # machine and model

    def found(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the folder has by this name; else what `make` returns, which it has from then on."""
        path, facts = self.folder / f"{name.replace('/', '.')}.json", self.folder / "facts.json"
        if not facts.is_file():
            _write(facts, self.facts)
        if _read(facts) != self.facts:
            expected, got = _read(facts), dict(self.facts)
            raise SystemExit(f"{self.folder} must be used with {expected}, got {got}: expected another folder")
        if not path.is_file():
            _write(path, make())
        return _read(path)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def row(task: str, shots: str, runs: dict[str, Run]) -> dict[str, Any]:
    """What is reported of a task. `runs`: by model. Log-likelihoods are compared with those of the last one."""
    *others, last = runs
    reference = runs[last]
    differences = {name: float(np.abs(runs[name].logprobs - reference.logprobs).max()) for name in others}
    return {
        "task": task,
        "shots": shots,
        "documents": reference.num_documents,
        "choices": len(reference.logprobs),
        "accuracy": {name: run.accuracy for name, run in runs.items()},
        "max_difference": differences,  # none: it is the only model
        "compared_with": last,
        "documents_per_second": {name: run.rate for name, run in runs.items()},
        "ratio": {name: runs[name].rate / reference.rate for name in others if last == "hf"},
        "cpu_seconds": {name: run.cpu_seconds for name, run in runs.items() if name != "local-completions"},
    }


def failures(rows: Sequence[dict[str, Any]], is_exact: bool = True, goals: Mapping[str, float] = GOALS) -> list[str]:
    """What is not as it must be: other accuracies and log-likelihoods in float32 (`is_exact`), or too slow."""
    found = []
    for each in rows:
        title = f"{each['task']}, {each['shots']}"
        if is_exact and len(set(each["accuracy"].values())) > 1:
            found.append(f"{title}: accuracies differ: {each['accuracy']}")
        if is_exact and max(each["max_difference"].values(), default=0) > MAX_DIFFERENCE:
            found.append(f"{title}: log-likelihoods differ by {each['max_difference']}")
        if each["ratio"].get("prefixwise", np.inf) < goals.get(each["shots"], 0):
            found.append(f"{title}: {each['ratio']['prefixwise']:.1f} x hf, goal {goals[each['shots']]}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| task | examples | documents | accuracy | difference | class | server | `hf` | class / `hf` |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for each in rows:
        found = each["documents_per_second"]
        rates = " | ".join(f"{found[name]:.2f}" if name in found else "" for name in MODELS)
        ratio = f"{each['ratio']['prefixwise']:.1f}" if "prefixwise" in each["ratio"] else ""
        accuracy, difference = each["accuracy"][each["compared_with"]], max(each["max_difference"].values(), default=0)
        lines.append(
            f"| {each['task']} | {each['shots']} | {each['documents']} | {accuracy:.3f} | {difference:.1e} | "
            f"{rates} | {ratio} |"
        )
    return "\n".join(lines)
