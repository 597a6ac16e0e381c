"""`validate self`: every program of this room on servers of our own, as commands that anyone can run again.

workload
for each backend   multi-item server: matrix (portable), endpoint, load (closed loop, open loop)
                   the same with its own settings: matrix (best native)
                   serial server: endpoint
                   combine, gate
models, ab (algorithm, mask, chunk size, backend), compare, report, check

One server at a time, so that each has the machine to itself. A step that fails is recorded, and the run goes on as far
as it can. The verdict is written after every step.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from prefixwise.bench.files import now_utc, read_artifact, write_artifact
from prefixwise.bench.kinds.self_check import SELF_CHECK_VERSION, SelfCheck, SelfCheckStep
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.options import ARTIFACT_NAMES, EMBEDDED, SelfCheckOptions
from prefixwise.bench.processes import RunningServer, ServerStartError, local_server, run_logged

URL = "{url}"


WORKLOAD_FILE = "workload.json"


_ITEM_COUNTS = "1,8,32"


@dataclass(frozen=True)
class ModelTokens:
    """The labels and the delimiter of the workload."""

    labels: tuple[int, ...]
    delimiter: int

    @property
    def flags(self) -> tuple[str, ...]:
        labels = ",".join(map(str, self.labels))
        return ("--label-token-ids", labels, "--delimiter-token-id", str(self.delimiter))


@dataclass(frozen=True)
class Command:
    """The arguments after `prefixwise`; `{url}` is the running server's."""

    title: str
    arguments: tuple[str, ...]
    makes: tuple[str, ...] = ()  # names of files: an earlier run's are removed first
    needs: tuple[str, ...] = ()  # without these it is not run
    optional: tuple[tuple[str, str], ...] = ()  # flags and files that are given where they were made


@dataclass(frozen=True)
class Phase:
    """Commands that share a server, or need none."""

    commands: tuple[Command, ...]
    server: str | None = None  # its name
    flags: tuple[str, ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self.commands) + (self.server is not None)


def workload_command(options: SelfCheckOptions) -> Command:
    """The first command: the others use its labels and delimiter."""
    arguments = ("bench", "workload", "--model", options.model, *options.geometry)
    return Command("workload", (*arguments, "--output", options.file(WORKLOAD_FILE)), (WORKLOAD_FILE,))


def num_steps(options: SelfCheckOptions) -> int:
    """All commands and server starts, for a progress bar; the tokens make no difference."""
    return 1 + sum(phase.num_steps for phase in phases(options, ModelTokens((), 0)))


def phases(options: SelfCheckOptions, tokens: ModelTokens) -> Iterator[Phase]:
    """All phases after the workload."""
    for backend in options.backends:
        yield from _phases_of_backend(options, tokens, backend)
    yield Phase(tuple(_last_commands(options, tokens)))


def _phases_of_backend(options: SelfCheckOptions, tokens: ModelTokens, backend: str) -> Iterator[Phase]:
    name = ARTIFACT_NAMES[backend]
    base = (
        *("--backend", backend, "--dtype", options.dtype),
        *(() if options.model == EMBEDDED else ("--model-path", options.model)),
        *("--served-model-name", options.model),
        *options.server_flags,
    )
    delimiter = ("--multi-item-scoring-delimiter", str(tokens.delimiter))
    yield Phase(
        (
            _matrix(options, name, "portable"),
            _endpoint(options, tokens, name, "multi"),
            _load(options, tokens, name, "closed", ("--concurrency", "2")),
            _load(options, tokens, name, "open", ("--rate", "2")),
        ),
        f"{name}-multi",
        (*base, *delimiter, "--disable-radix-cache"),
    )
    yield Phase((_matrix(options, name, "best_native"),), f"{name}-native", (*base, *delimiter))
    serial = _endpoint(options, tokens, name, "serial")
    yield Phase((serial,), f"{name}-serial", (*base, "--algorithm", "serial", "--disable-radix-cache"))
    yield Phase((_combine(options, name), _gate(options, name)))


def _matrix(options: SelfCheckOptions, name: str, view: str) -> Command:
    stem = f"{name}_{view}_matrix"
    arguments = (
        *("bench", "matrix", "--backend-name", name, "--url", URL, "--evaluation-view", view),
        *("--workload-json", options.file(WORKLOAD_FILE)),
        *("--client-chunk-sizes", ",".join(map(str, options.client_chunk_sizes))),
        *("--timed-runs", str(options.timed_runs), "--timed-runs-confirm", str(options.timed_runs)),
        *("--output-json", options.file(f"{stem}.json"), "--output-markdown", options.file(f"{stem}.md")),
        "--overwrite",
    )
    title = f"{name} {view.replace('_', '-')} matrix"
    return Command(title, arguments, (f"{stem}.json", f"{stem}.md"), (WORKLOAD_FILE,))


def _endpoint(options: SelfCheckOptions, tokens: ModelTokens, name: str, mode: str) -> Command:
    arguments = (
        *("validate", "endpoint", "--mode", mode, "--url", URL, "--model", options.model),
        *tokens.flags,
        *("--query-tokens", str(options.query_tokens), "--item-tokens", str(options.item_tokens)),
        *("--item-counts", _ITEM_COUNTS, "--timed-runs", str(options.timed_runs)),
        *("--output-json", options.file(f"{name}_{mode}.json")),
    )
    kind = "multi-item" if mode == "multi" else mode
    return Command(f"{name} {kind} endpoint", arguments, (f"{name}_{mode}.json",))


def _load(options: SelfCheckOptions, tokens: ModelTokens, name: str, mode: str, pace: tuple[str, ...]) -> Command:
    made = f"{name}_{mode}_load.json"
    arguments = (
        *("bench", "load", "--url", URL, "--mode", mode, *pace, *options.geometry),
        *("--label-token-ids", ",".join(map(str, tokens.labels))),
        *("--num-requests", "10", "--warmup-requests", "2", "--p99-bound-ms", "60000"),
        *("--output-json", options.file(made)),
    )
    return Command(f"{name} {mode}-loop load", arguments, (made,))


def _combine(options: SelfCheckOptions, name: str) -> Command:
    needs = (f"{name}_multi.json", f"{name}_serial.json")
    makes = (f"{name}_multi_vs_serial.json", f"{name}_parity.json")
    arguments = (
        *("validate", "combine", "--multi-json", options.file(needs[0]), "--serial-json", options.file(needs[1])),
        *("--output-multi-vs-serial-json", options.file(makes[0])),
        *("--output-jax-torch-parity-json", options.file(makes[1])),
    )
    return Command(f"{name} combine", arguments, makes, needs)


def _gate(options: SelfCheckOptions, name: str) -> Command:
    needs = (f"{name}_multi_vs_serial.json", f"{name}_parity.json")
    arguments = (
        *("validate", "gate", "--multi-vs-serial-json", options.file(needs[0])),
        *("--parity-json", options.file(needs[1]), "--min-speedup", str(options.min_speedup)),
        *("--output-json", options.file(f"{name}_gate.json")),
    )
    return Command(f"{name} gate", arguments, (f"{name}_gate.json",), needs)


def _last_commands(options: SelfCheckOptions, tokens: ModelTokens) -> Iterator[Command]:
    yield _models(options, tokens)
    quickest = ("--backend", options.quickest_backend)
    yield _ab(options, "algorithm", (), quickest)
    yield _ab(options, "mask", (), quickest)
    yield _ab(options, "chunk-size", ("--variants", f"{max(1, options.num_items // 4)},0"), quickest)
    if options.compares_backends:
        yield _ab(options, "backend", (), ())
        yield _compare(options)
        yield _report(options)
    yield Command("check of all artifacts", ("bench", "check", "--all", str(options.output_dir)))


def _models(options: SelfCheckOptions, tokens: ModelTokens) -> Command:
    made = ("model_matrix.json", "model_matrix.md")
    flags = ("--backend", options.quickest_backend, "--dtype", options.dtype, *options.server_flags)
    arguments = (
        *("validate", "models", "--models", options.model, "--item-counts", _ITEM_COUNTS),
        *tokens.flags,
        *("--query-tokens", str(options.query_tokens), "--item-tokens", str(options.item_tokens)),
        *("--timed-runs", str(options.timed_runs), "--min-speedup", str(options.min_speedup)),
        *("--server-flag", shlex.join(flags)),
        *("--output-json", options.file(made[0]), "--output-markdown", options.file(made[1])),
    )
    return Command("model matrix", arguments, made)


def _ab(options: SelfCheckOptions, compare: str, more: tuple[str, ...], flags: tuple[str, ...]) -> Command:
    made = f"ab_{compare.replace('-', '_')}.json"
    own = () if options.model == EMBEDDED else ("--model", options.model)
    server_flags = (*flags, *options.server_flags)
    arguments = (
        *("bench", "ab", "--compare", compare, *own, *more, *options.geometry, "--dtype", options.dtype),
        *("--rounds", str(options.timed_runs)),
        *(("--server-args", shlex.join(server_flags)) if server_flags else ()),
        *("--output-json", options.file(made)),
    )
    return Command(f"side by side: {compare}", arguments, (made,))


def _compare(options: SelfCheckOptions) -> Command:
    views = [f"{name}_{view}" for view in ("portable", "best_native") for name in ARTIFACT_NAMES.values()]
    files = [
        argument
        for view in views
        for argument in (f"--{view.replace('_', '-')}-json", options.file(f"{view}_matrix.json"))
    ]
    makes = ("comparison.json", "comparison.md")
    outputs = ("--output-json", options.file(makes[0]), "--output-markdown", options.file(makes[1]))
    needs = tuple(f"{view}_matrix.json" for view in views)
    return Command("comparison", ("bench", "compare", *files, *outputs), makes, needs)


def _report(options: SelfCheckOptions) -> Command:
    makes = ("report.md", "report.html")
    arguments = (
        *("bench", "report", "--comparison-json", options.file("comparison.json")),
        *("--output-report", options.file(makes[0]), "--output-html", options.file(makes[1])),
    )
    of_backends = (
        ("--multi-vs-serial-json", "{}_multi_vs_serial.json"),
        ("--parity-json", "{}_parity.json"),
        ("--gate-json", "{}_gate.json"),
        ("--load-json", "{}_closed_load.json"),
        ("--load-json", "{}_open_load.json"),
    )
    names = ARTIFACT_NAMES.values()
    optional = [(flag, pattern.format(name)) for flag, pattern in of_backends for name in names]
    optional += [("--ab-json", f"ab_{compare}.json") for compare in ("algorithm", "mask", "chunk_size", "backend")]
    optional.append(("--model-matrix-json", "model_matrix.json"))
    return Command("report", arguments, makes, ("comparison.json",), tuple(optional))


SKIPPED = 3  # the status of a step that was not run


Serve = Callable[[Sequence[str], Path], AbstractContextManager[RunningServer]]


OnStep = Callable[[str], None]  # the step's title


class SelfCheckRun:
    """Runs the phases, and records the result of each command."""

    def __init__(self, options: SelfCheckOptions, on_step: OnStep, serve: Serve = local_server) -> None:
        self._options = options
        self._on_step = on_step
        self._serve = serve
        self._steps: list[SelfCheckStep] = []

    def __call__(self) -> SelfCheck:
        """The verdict, which is also written beside the artifacts."""
        options = self._options
        options.output_dir.mkdir(parents=True, exist_ok=True)
        self._run(workload_command(options), None)
        if self._steps[-1].status == 0:
            workload = read_artifact(Path(options.file(WORKLOAD_FILE)), Workload)
            tokens = ModelTokens(tuple(workload.label_token_ids), workload.delimiter_token_id)
            for phase in phases(options, tokens):
                self._run_phase(phase)
        return self._write(complete=True)

    def _run_phase(self, phase: Phase) -> None:
        if phase.server is None:
            for command in phase.commands:
                self._run(command, None)
            return
        title = f"{phase.server} server"
        line = shlex.join(["prefixwise", "serve", *phase.flags])
        self._on_step(title)
        begin = perf_counter()
        try:
            with self._serve(phase.flags, self._options.output_dir / "logs" / f"{phase.server}.server.log") as running:
                self._record(title, line, 0, perf_counter() - begin)
                for command in phase.commands:
                    self._run(command, running, line)
        except ServerStartError as error:
            self._record(title, line, 1, perf_counter() - begin, str(error))
            for command in phase.commands:
                self._skip(command, f"{title} did not start", line)

    def _run(self, command: Command, server: RunningServer | None, server_line: str | None = None) -> None:
        missing = [name for name in command.needs if not (self._options.output_dir / name).exists()]
        if missing:
            self._skip(command, f"there is no {', '.join(missing)}", server_line)
            return
        self._on_step(command.title)
        self._remove_what_it_makes(command)
        arguments = self._arguments(command, "" if server is None else server.url)
        log = self._options.output_dir / "logs" / f"{command.title.replace(' ', '-').replace(':', '')}.log"
        begin = perf_counter()
        status = run_logged(arguments, log)
        detail = None if status == 0 else _last_lines(log)
        line = shlex.join(["prefixwise", *arguments])
        self._record(command.title, line, status, perf_counter() - begin, detail, server_line)

    def _skip(self, command: Command, reason: str, server_line: str | None) -> None:
        self._on_step(command.title)
        self._remove_what_it_makes(command)
        line = shlex.join(["prefixwise", *self._arguments(command, URL)])
        self._record(command.title, line, SKIPPED, 0.0, f"not run: {reason}", server_line)

    def _remove_what_it_makes(self, command: Command) -> None:
        """Remove the outputs of an earlier run."""
        for name in command.makes:
            (self._options.output_dir / name).unlink(missing_ok=True)

    def _arguments(self, command: Command, url: str) -> list[str]:
        given = [argument.replace(URL, url) for argument in command.arguments]
        made = [(flag, name) for flag, name in command.optional if (self._options.output_dir / name).exists()]
        return given + [word for flag, name in made for word in (flag, self._options.file(name))]

    def _record(
        self,
        title: str,
        line: str,
        status: int,
        seconds: float,
        detail: str | None = None,
        server_line: str | None = None,
    ) -> None:
        step = SelfCheckStep(
            title=title, command=line, status=status, seconds=round(seconds, 3), detail=detail, server=server_line
        )
        self._steps.append(step)
        self._write(complete=False)

    def _write(self, *, complete: bool) -> SelfCheck:
        verdict = SelfCheck(
            schema_version=SELF_CHECK_VERSION,
            generated_at_utc=now_utc(),
            model=self._options.model,
            backends=list(self._options.backends),
            steps=self._steps,
            all_pass=complete and all(step.status == 0 for step in self._steps),
            complete=complete,
        )
        write_artifact(self._options.output_dir / "self_check.json", verdict)
        return verdict


def _last_lines(log: Path) -> str:
    """Of its error, where it has one; the line of JSON behind it says the same for programs."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    reported = [line for line in lines if line.startswith(("error:", "fail")) or " fail" in line]
    return " / ".join((reported or lines)[-3:]) or "it said nothing"
