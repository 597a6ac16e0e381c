"""The model matrix: for every model a serial and a multi-item server, both evaluated, combined, compared and judged.

One server at a time, so that each has the machine to itself. Each model has its own folder of artifacts:

    serial.json  multi.json  multi_vs_serial.json  parity.json  gate.json  serial_server.log  multi_server.log

A model that fails is a row with the reason, and the run goes on with the next.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixwise.bench.client import ScoreClient
from prefixwise.bench.files import Kind, read_artifact, write_artifact
from prefixwise.bench.kinds.evaluation import EndpointEvaluation
from prefixwise.bench.kinds.gate_report import GateReport, failed_checks, judge
from prefixwise.bench.kinds.model_matrix import ModelRow
from prefixwise.bench.kinds.multi_vs_serial import MultiVsSerial
from prefixwise.bench.kinds.parity import Parity
from prefixwise.bench.options import EvaluationShape, GateBounds
from prefixwise.bench.processes import local_server
from prefixwise.bench.run.parity import EMBEDDED, TransformersReference, compare_with_reference
from prefixwise.bench.run.validation import (
    Endpoint,
    Mode,
    TokenChoice,
    combine,
    evaluate,
    reported_vocab_size,
    settle_tokens,
)
from prefixwise.contract.errors import ArtifactError, PrefixwiseError

SERIAL_FLAGS = ("--algorithm", "serial", "--disable-radix-cache")


STEPS_PER_MODEL = 3


@dataclass(frozen=True)
class MatrixPlan:
    """What every model goes through. None: the default, or what the model's vocabulary makes of it."""

    output_dir: Path
    shape: EvaluationShape
    bounds: GateBounds
    labels: tuple[int, ...] | None = None
    delimiter: int | None = None
    server_flags: tuple[str, ...] = ()
    timeout_sec: float = 180.0
    api_key: str | None = None
    resume: bool = False


@dataclass(frozen=True)
class Watcher:
    """Callbacks for progress."""

    step: Callable[[str], None]
    introduce: Callable[[ScoreClient], dict[str, Any]]  # says which server it is, and gives what it reports
    note: Callable[[str], None]


@dataclass(frozen=True)
class ModelRun:
    """One model on its way through the plan."""

    model: str
    plan: MatrixPlan
    watcher: Watcher

    @property
    def folder(self) -> Path:
        return self.plan.output_dir / folder_name(self.model)

    def row(self) -> ModelRow:
        """The row with its metrics, or with the reason of its failure."""
        try:
            serial = self._evaluation("serial", None)
            multi = self._evaluation("multi", serial)
            combined, parity = self._combined(multi, serial)
            report = judge(combined.model_dump(), parity.model_dump(), self.plan.bounds)
            write_artifact(self._path("gate"), report)
        except PrefixwiseError as error:
            return ModelRow(model=self.model, status="error", reason=" ".join(str(error).split()))
        return row_of(self.model, combined, parity, report, {name: str(self._path(name)) for name in _NAMES})

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _evaluation(self, mode: Mode, serial: EndpointEvaluation | None) -> EndpointEvaluation:
        """The multi-item evaluation uses the tokens of the serial one."""
        kept = self._kept(mode, EndpointEvaluation)
        if kept is not None and self._is_wanted(kept, mode, serial):
            self.watcher.step(f"{self.model}: {mode} kept")
            return kept
        self.watcher.step(f"{self.model}: {mode} server")
        flags = self._flags(mode, serial)
        env = {} if self.plan.api_key is None else {"PREFIXWISE_API_KEY": self.plan.api_key}
        with local_server(flags, self.folder / f"{mode}_server.log", env=env) as server:
            found = self._evaluate(mode, server.url, serial)
        found.settings["server_flags"] = flags
        write_artifact(self._path(mode), found)
        return found

    def _evaluate(self, mode: Mode, url: str, serial: EndpointEvaluation | None) -> EndpointEvaluation:
        with ScoreClient(url, timeout_sec=self.plan.timeout_sec, api_key=self.plan.api_key) as client:
            info = self.watcher.introduce(client)
            if serial is None:
                size = reported_vocab_size(info, client.get_json("/v1/models"))
                choice, notes = settle_tokens(self.plan.labels, self.plan.delimiter, size, self.model)
                for note in notes:
                    self.watcher.note(note)
            else:
                choice = _choice_of(serial)
            found = evaluate(Endpoint(client, mode, self.model), choice, self.plan.shape, lambda title: None)
        for count, failure in found.failures.items():
            self.watcher.note(f"{self.model}: {mode} server, {count} items: {failure}")
        found.server_config = info
        return found

    def _flags(self, mode: Mode, serial: EndpointEvaluation | None) -> list[str]:
        own = [] if self.model == EMBEDDED else ["--model-path", self.model]
        ways = SERIAL_FLAGS if serial is None else multi_flags(serial.delimiter)
        return [*own, "--served-model-name", self.model, *ways, *self.plan.server_flags]

    def _is_wanted(self, kept: EndpointEvaluation, mode: Mode, serial: EndpointEvaluation | None) -> bool:
        """Is it what this plan would make? For its tokens it is enough that the plan's rules lead to them."""
        size = kept.settings.get("vocab_size")
        if not isinstance(size, int) or kept.mode != mode or kept.model != self.model or kept.failures:
            return False
        plan = self.plan
        if serial is None:
            choice, _ = settle_tokens(plan.labels, plan.delimiter, size, self.model)
        else:
            choice = _choice_of(serial)
        settings = {**plan.shape.settings(size), "server_flags": self._flags(mode, serial)}
        return kept.settings == settings and _choice_of(kept) == choice

    def _combined(self, multi: EndpointEvaluation, serial: EndpointEvaluation) -> tuple[MultiVsSerial, Parity]:
        combined = combine(multi, serial)
        write_artifact(self._path("multi_vs_serial"), combined)
        scores = (multi.isolation.base_scores, serial.isolation.base_scores)
        parity = self._kept("parity", Parity)
        if parity is not None and (parity.jax_multi_scores, parity.jax_serial_scores) == scores:
            self.watcher.step(f"{self.model}: parity kept")
            return combined, parity
        self.watcher.step(f"{self.model}: parity")
        parity = compare_with_reference(multi, serial, TransformersReference.load(self.model))
        write_artifact(self._path("parity"), parity)
        return combined, parity

    def _kept(self, name: str, kind: type[Kind]) -> Kind | None:
        """The valid artifact of an earlier run, when resuming."""
        if not self.plan.resume:
            return None
        try:
            return read_artifact(self._path(name), kind)
        except ArtifactError:
            return None


_NAMES = ("serial", "multi", "multi_vs_serial", "parity", "gate")


def multi_flags(delimiter: int) -> Sequence[str]:
    """As the earlier system started it: no prefix cache between requests, so that runs are independent."""
    return ("--multi-item-scoring-delimiter", str(delimiter), "--disable-radix-cache")


def folder_name(model: str) -> str:
    """Readable, and not the same for two models."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", model).strip("_.")[-60:]
    return f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def row_of(
    model: str, combined: MultiVsSerial, parity: Parity, report: GateReport, artifacts: dict[str, str]
) -> ModelRow:
    """A model that was measured: does it pass?"""
    details = [check.detail for check in report.checks.values() if check.detail]
    names = failed_checks(report)
    failures = [f"{name}: {detail}" for name, detail in zip(names, details, strict=True)]
    return ModelRow(
        model=model,
        status="pass" if report.all_pass else "fail",
        reason="; ".join(failures) or None,
        same_length_isolation_max=combined.isolation.same_length_mutation_max_abs_diff,
        changed_length_isolation_max=combined.isolation.changed_length_mutation_max_abs_diff,
        delimiter_aligned_equivalence_max=combined.aligned_max_abs_diff,
        jax_serial_vs_torch_serial_max=parity.max_abs_diff_jax_serial_vs_torch_serial,
        jax_multi_vs_torch_multi_semantic_max=parity.max_abs_diff_jax_multi_vs_torch_multi_semantic,
        speedups={count: each.speedup_vs_serial_p50 for count, each in combined.performance.items()},
        gate=report,
        artifacts=artifacts,
    )


def _choice_of(evaluation: EndpointEvaluation) -> TokenChoice:
    return TokenChoice(tuple(evaluation.labels), evaluation.delimiter, evaluation.settings["vocab_size"])
