"""`validate self`: every program of the harness on servers of our own, as commands that anyone can run again.

    workload
    for each backend   multi-item server: matrix (portable), endpoint, load
                       the same with its own settings: matrix (best native)
                       serial server: endpoint
                       combine, gate
    compare, ab, report, check

One server at a time, so that each has the machine to itself. A step that fails is recorded, and the others go on as far
as they can.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from itemwise.contract.errors import ItemwiseError
from itemwise.harness.artifacts import SELF_CHECK_VERSION, SelfCheck, SelfCheckStep, Workload
from itemwise.harness.files import now_utc, read_artifact, write_artifact
from itemwise.harness.servers import RunningServer, local_server

EMBEDDED = "embedded"
ARTIFACT_NAMES = {"jax": "jax", "torch": "pytorch"}  # what the artifacts call our backends
_URL = "{url}"


@dataclass(frozen=True)
class SelfCheckOptions:
    """How much is done."""

    output_dir: Path
    model: str = EMBEDDED
    backends: tuple[str, ...] = ("jax", "torch")
    dtype: str = "float32"
    query_tokens: int = 128
    num_items: int = 32
    item_tokens: int = 8
    client_chunk_sizes: tuple[int, ...] = (1, 8, 32)
    timed_runs: int = 3
    min_speedup: float = 3.0
    server_flags: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """How many there are, for a progress bar."""
        return 1 + 7 * len(self.backends) + (4 if len(self.backends) == 2 else 2)

    def file(self, name: str) -> str:
        return str(self.output_dir / name)


@dataclass(frozen=True)
class Command:
    """What stands behind `itemwise`; `{url}` is the running server's."""

    title: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Phase:
    """Commands that share a server, or need none."""

    commands: tuple[Command, ...]
    server: str | None = None  # its name
    flags: tuple[str, ...] = ()


class SelfCheckRun:
    """Runs the phases, and keeps what became of each command."""

    def __init__(self, options: SelfCheckOptions, on_step: Callable[[str], None]) -> None:
        self._options = options
        self._on_step = on_step
        self._steps: list[SelfCheckStep] = []

    def __call__(self) -> SelfCheck:
        """The verdict, which is also written beside the artifacts."""
        options = self._options
        options.output_dir.mkdir(parents=True, exist_ok=True)
        self._run_phase(_workload_phase(options))
        if self._steps[-1].status == 0:
            workload = read_artifact(Path(options.file("workload.json")), Workload)
            for phase in phases(options, workload):
                self._run_phase(phase)
        verdict = SelfCheck(
            schema_version=SELF_CHECK_VERSION,
            generated_at_utc=now_utc(),
            model=options.model,
            backends=list(options.backends),
            steps=self._steps,
            all_pass=all(step.status == 0 for step in self._steps),
        )
        write_artifact(options.output_dir / "self_check.json", verdict)
        return verdict

    def _run_phase(self, phase: Phase) -> None:
        log = self._options.output_dir / "logs" / f"{phase.server}.server.log"
        server = nullcontext() if phase.server is None else local_server(phase.flags, log)
        try:
            with server as running:
                for command in phase.commands:
                    self._run(command, running)
        except ItemwiseError as error:  # the server did not start
            done = {step.title for step in self._steps}
            for command in phase.commands:
                if command.title not in done:
                    self._on_step(command.title)
                    self._record(command, list(command.arguments), 1, 0.0, str(error))

    def _run(self, command: Command, server: RunningServer | None) -> None:
        self._on_step(command.title)
        url = "" if server is None else server.url
        arguments = [argument.replace(_URL, url) for argument in command.arguments]
        log = self._options.output_dir / "logs" / f"{command.title.replace(' ', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        begin = perf_counter()
        with log.open("w", encoding="utf-8") as output:
            done = subprocess.run(
                [sys.executable, "-m", "itemwise", *arguments], stdout=output, stderr=subprocess.STDOUT, check=False
            )
        detail = None if done.returncode == 0 else _last_words(log)
        self._record(command, arguments, done.returncode, perf_counter() - begin, detail)

    def _record(
        self, command: Command, arguments: Sequence[str], status: int, seconds: float, detail: str | None
    ) -> None:
        self._steps.append(
            SelfCheckStep(
                title=command.title,
                command=shlex.join(["itemwise", *arguments]),
                status=status,
                seconds=round(seconds, 3),
                detail=detail,
            )
        )


def _last_words(log: Path) -> str:
    """Of its error, where it has one; the line of JSON behind it says the same for programs."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    told = [line for line in lines if line.startswith(("error:", "fail")) or " fail" in line]
    return " / ".join((told or lines)[-3:]) or "it said nothing"


def _workload_phase(options: SelfCheckOptions) -> Phase:
    sizes = _geometry(options)
    arguments = ("bench", "workload", "--model", options.model, *sizes, "--output", options.file("workload.json"))
    return Phase((Command("workload", arguments),))


def _geometry(options: SelfCheckOptions) -> tuple[str, ...]:
    return (
        *("--query-tokens", str(options.query_tokens)),
        *("--num-items", str(options.num_items)),
        *("--item-tokens", str(options.item_tokens)),
    )


def phases(options: SelfCheckOptions, workload: Workload) -> Iterator[Phase]:
    """All that follows the workload, whose labels and delimiter are the model's own."""
    for backend in options.backends:
        yield from _phases_of_backend(options, workload, backend)
    yield Phase(tuple(_last_commands(options)))


def _phases_of_backend(options: SelfCheckOptions, workload: Workload, backend: str) -> Iterator[Phase]:
    name = ARTIFACT_NAMES[backend]
    base = (
        *("--backend", backend, "--dtype", options.dtype),
        *(() if options.model == EMBEDDED else ("--model-path", options.model)),
        *("--served-model-name", options.model),
        *options.server_flags,
    )
    delimiter = ("--multi-item-scoring-delimiter", str(workload.delimiter_token_id))
    yield Phase(
        (
            Command(f"{name} portable matrix", _matrix(options, name, "portable")),
            Command(f"{name} multi-item endpoint", _endpoint(options, workload, name, "multi")),
            Command(f"{name} load", _load(options, workload, name)),
        ),
        f"{name}-multi",
        (*base, *delimiter, "--disable-radix-cache"),
    )
    native = Command(f"{name} best-native matrix", _matrix(options, name, "best_native"))
    yield Phase((native,), f"{name}-native", (*base, *delimiter))
    serial = Command(f"{name} serial endpoint", _endpoint(options, workload, name, "serial"))
    yield Phase((serial,), f"{name}-serial", (*base, "--algorithm", "serial", "--disable-radix-cache"))
    yield Phase((Command(f"{name} combine", _combine(options, name)), Command(f"{name} gate", _gate(options, name))))


def _matrix(options: SelfCheckOptions, name: str, view: str) -> tuple[str, ...]:
    return (
        *("bench", "matrix", "--backend-name", name, "--base-url", _URL, "--evaluation-view", view),
        *("--workload-json", options.file("workload.json")),
        *("--client-chunk-sizes", ",".join(map(str, options.client_chunk_sizes))),
        *("--timed-runs", str(options.timed_runs), "--timed-runs-confirm", str(options.timed_runs)),
        *("--output-json", options.file(f"{name}_{view}_matrix.json")),
        *("--output-markdown", options.file(f"{name}_{view}_matrix.md")),
    )


def _endpoint(options: SelfCheckOptions, workload: Workload, name: str, mode: str) -> tuple[str, ...]:
    return (
        *("validate", "endpoint", "--mode", mode, "--url", _URL, "--model", options.model),
        *("--labels", ",".join(map(str, workload.label_token_ids))),
        *("--delimiter", str(workload.delimiter_token_id)),
        *("--query-tokens", str(options.query_tokens), "--item-tokens", str(options.item_tokens)),
        *("--item-counts", "1,8,32", "--timed-runs", str(options.timed_runs)),
        *("--output-json", options.file(f"{name}_{mode}.json")),
    )


def _load(options: SelfCheckOptions, workload: Workload, name: str) -> tuple[str, ...]:
    return (
        *("bench", "load", "--base-url", _URL, "--mode", "closed", "--concurrency", "2", *_geometry(options)),
        *("--label-token-ids", ",".join(map(str, workload.label_token_ids))),
        *("--num-requests", "10", "--warmup-requests", "2"),
        *("--output-json", options.file(f"{name}_load.json")),
    )


def _combine(options: SelfCheckOptions, name: str) -> tuple[str, ...]:
    return (
        *("validate", "combine", "--multi-json", options.file(f"{name}_multi.json")),
        *("--serial-json", options.file(f"{name}_serial.json")),
        *("--output-multi-vs-serial-json", options.file(f"{name}_multi_vs_serial.json")),
        *("--output-jax-torch-parity-json", options.file(f"{name}_parity.json")),
    )


def _gate(options: SelfCheckOptions, name: str) -> tuple[str, ...]:
    return (
        *("validate", "gate", "--multi-vs-serial-json", options.file(f"{name}_multi_vs_serial.json")),
        *("--parity-json", options.file(f"{name}_parity.json"), "--min-speedup", str(options.min_speedup)),
        *("--output-json", options.file(f"{name}_gate.json")),
    )


def _last_commands(options: SelfCheckOptions) -> Iterator[Command]:
    own = () if options.model == EMBEDDED else ("--model", options.model)
    ab = (
        *("bench", "ab", "--compare", "algorithm", *own, *_geometry(options), "--dtype", options.dtype),
        *("--rounds", str(options.timed_runs), "--output-json", options.file("ab_algorithm.json")),
        *(("--server-args", shlex.join(options.server_flags)) if options.server_flags else ()),
    )
    yield Command("algorithms side by side", ab)
    if len(options.backends) == 2:
        views = [f"{name}_{view}" for view in ("portable", "best_native") for name in ("jax", "pytorch")]
        files = [
            argument
            for view in views
            for argument in (f"--{view.replace('_', '-')}-json", options.file(f"{view}_matrix.json"))
        ]
        outputs = ("--output-json", options.file("comparison.json"), "--output-markdown", options.file("comparison.md"))
        yield Command("comparison", ("bench", "compare", *files, *outputs))
        report = (
            *("bench", "report", "--comparison-json", options.file("comparison.json")),
            *("--multi-vs-serial-json", options.file("jax_multi_vs_serial.json")),
            *("--parity-json", options.file("jax_parity.json"), "--gate-json", options.file("jax_gate.json")),
            *("--ab-json", options.file("ab_algorithm.json")),
            *("--output-report", options.file("report.md"), "--output-html", options.file("report.html")),
        )
        yield Command("report", report)
    yield Command("check of all artifacts", ("bench", "check", "--all", str(options.output_dir)))
