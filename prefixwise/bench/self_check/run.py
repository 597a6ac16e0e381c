"""Runs what `validate self` is made of, as commands that anyone can run again.

One server at a time, so that each has the machine to itself. A step that fails is recorded, and the others go on as far
as they can. The verdict is written after every step.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter

from prefixwise.bench.artifacts import SELF_CHECK_VERSION, SelfCheck, SelfCheckStep, Workload
from prefixwise.bench.files import now_utc, read_artifact, write_artifact
from prefixwise.bench.processes import run_logged
from prefixwise.bench.self_check.commands import (
    URL,
    WORKLOAD_FILE,
    Command,
    ModelTokens,
    Phase,
    phases,
    workload_command,
)
from prefixwise.bench.self_check.options import SelfCheckOptions
from prefixwise.bench.servers import RunningServer, ServerStartError, local_server

SKIPPED = 3  # the status of a step that was not run

Serve = Callable[[Sequence[str], Path], AbstractContextManager[RunningServer]]
OnStep = Callable[[str], None]  # the step's title


class SelfCheckRun:
    """Runs the phases, and keeps what became of each command."""

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
        detail = None if status == 0 else _last_words(log)
        line = shlex.join(["prefixwise", *arguments])
        self._record(command.title, line, status, perf_counter() - begin, detail, server_line)

    def _skip(self, command: Command, reason: str, server_line: str | None) -> None:
        self._on_step(command.title)
        self._remove_what_it_makes(command)
        line = shlex.join(["prefixwise", *self._arguments(command, URL)])
        self._record(command.title, line, SKIPPED, 0.0, f"not run: {reason}", server_line)

    def _remove_what_it_makes(self, command: Command) -> None:
        """What an earlier run left must not be taken for this one's."""
        for name in command.makes:
            (self._options.output_dir / name).unlink(missing_ok=True)

    def _arguments(self, command: Command, url: str) -> list[str]:
        given = [argument.replace(URL, url) for argument in command.arguments]
        made = [(flag, name) for flag, name in command.welcome if (self._options.output_dir / name).exists()]
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


def _last_words(log: Path) -> str:
    """Of its error, where it has one; the line of JSON behind it says the same for programs."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    told = [line for line in lines if line.startswith(("error:", "fail")) or " fail" in line]
    return " / ".join((told or lines)[-3:]) or "it said nothing"
