"""What `validate self` runs: commands, the servers that they need, and which files they make and need.

workload
for each backend   multi-item server: matrix (portable), endpoint, load (closed loop, open loop)
                   the same with its own settings: matrix (best native)
                   serial server: endpoint
                   combine, gate
models, ab (algorithm, mask, chunk size, backend), compare, report, check
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from prefixwise.bench.self_check.options import ARTIFACT_NAMES, EMBEDDED, SelfCheckOptions

URL = "{url}"
WORKLOAD_FILE = "workload.json"
_ITEM_COUNTS = "1,8,32"


@dataclass(frozen=True)
class ModelTokens:
    """What the workload has chosen of the model's."""

    labels: tuple[int, ...]
    delimiter: int

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--labels", ",".join(map(str, self.labels)), "--delimiter", str(self.delimiter))


@dataclass(frozen=True)
class Command:
    """What stands behind `prefixwise`; `{url}` is the running server's."""

    title: str
    arguments: tuple[str, ...]
    makes: tuple[str, ...] = ()  # names of files: an earlier run's are removed first
    needs: tuple[str, ...] = ()  # without these it is not run
    welcome: tuple[tuple[str, str], ...] = ()  # flags and files that are given where they were made


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
    """The first: what its labels and delimiter are, the others follow."""
    arguments = ("bench", "workload", "--model", options.model, *options.geometry)
    return Command("workload", (*arguments, "--output", options.file(WORKLOAD_FILE)), (WORKLOAD_FILE,))


def num_steps(options: SelfCheckOptions) -> int:
    """All commands and server starts, for a progress bar; the tokens make no difference."""
    return 1 + sum(phase.num_steps for phase in phases(options, ModelTokens((), 0)))


def phases(options: SelfCheckOptions, tokens: ModelTokens) -> Iterator[Phase]:
    """All that follows the workload."""
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
        *("bench", "matrix", "--backend-name", name, "--base-url", URL, "--evaluation-view", view),
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
        *("bench", "load", "--base-url", URL, "--mode", mode, *pace, *options.geometry),
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
    welcome = [(flag, pattern.format(name)) for flag, pattern in of_backends for name in names]
    welcome += [("--ab-json", f"ab_{compare}.json") for compare in ("algorithm", "mask", "chunk_size", "backend")]
    welcome.append(("--model-matrix-json", "model_matrix.json"))
    return Command("report", arguments, makes, ("comparison.json",), tuple(welcome))
