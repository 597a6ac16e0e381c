"""Runs one server, and `prefixwise bench matrix` against it, on the target.

A matrix names in its notes the flags that it was measured with. So an existing file can be identified: a complete one
is reused, an incomplete one is resumed, and one with other flags is an error.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefixwise.bench.files import read_artifact
from prefixwise.bench.kinds.score_matrix import ScoreMatrix
from prefixwise.bench.kinds.workload import Workload, checksum_key
from prefixwise.bench.processes import end_process, local_server
from prefixwise.bench.remote import folders
from prefixwise.bench.remote.on_target import machine, run_lock
from prefixwise.bench.remote.on_target.server_records import on_record
from prefixwise.bench.remote.spec import ClientMatrixSpec
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.with_parent import command_with_parent, parent_environment
from prefixwise.contract.errors import ArtifactError

Say = Callable[[str], None]
_MEASURED_BY = "measured by: "
_TRIES = 2  # a server that ends during the sweep is started once more: another process may have used up the memory


def run_client_matrix(spec: ClientMatrixSpec, say: Say) -> dict[str, Any]:
    """Measure the matrix, resuming an incomplete one. Raises TargetError, ArtifactError."""
    folder = Path(spec.folder).expanduser()
    with run_lock.held(spec, str(folder)):
        return _run_alone(spec, folder, say)


def _run_alone(spec: ClientMatrixSpec, folder: Path, say: Say) -> dict[str, Any]:
    output = folder / f"{spec.name}_matrix.json"
    request = request_sha256(read_artifact(folder / folders.CANONICAL_WORKLOAD, Workload))
    there = found_matrix(output, spec, request, say)
    if there is not None and is_done(there):
        say(f"{spec.name}: already measured")
        return _answer(output, there)
    machine.check_disk(folder)
    machine.check_port(spec.port)
    for attempt in range(_TRIES):
        ended = _measure(spec, folder, output, say)
        if ended is None:
            break
        say(f"{spec.name}: {ended}{', starting it again' if attempt + 1 < _TRIES else ''}")
    there = found_matrix(output, spec, request, say)
    if there is None or not there.complete:
        raise TargetError(f"{spec.name}: {_end_of(_log_of(folder, spec))}")
    return _answer(output, there)


def found_matrix(path: Path, spec: ClientMatrixSpec, request: str, say: Say) -> ScoreMatrix | None:
    """The existing matrix, complete or not; None if there is none. Raises ArtifactError if it is another run's.

    `request`: the checksum of its request.
    """
    matrix = folders.read_or_set_aside(path, ScoreMatrix, say)
    if matrix is None:
        return None
    known = matrix.workload_ref.request_sha256
    if known != request:
        raise ArtifactError(f"{path} is of another workload: its request has sha256 {known}, expected {request}")
    notes = [note for note in matrix.notes if note.startswith(_MEASURED_BY)]
    if notes != [measured_by(spec)]:
        before = "; ".join(notes) or "it does not name its flags"
        raise ArtifactError(f"{path} is of another run: {before}; expected {measured_by(spec)}")
    return matrix


def is_done(matrix: ScoreMatrix) -> bool:
    """True if it is complete with at least one successful row; a matrix of failures is measured again."""
    return matrix.complete and any(row.status == "ok" for row in matrix.results)


def measured_by(spec: ClientMatrixSpec) -> str:
    """The note with the flags of the server and of the matrix."""
    server, matrix = shlex.join(spec.server_flags), shlex.join(spec.matrix_flags)
    return f"{_MEASURED_BY}prefixwise serve {server}; prefixwise bench matrix {matrix}"


def request_sha256(workload: Workload) -> str:
    """The checksum of the measured request, which is the same when the workload is generated again."""
    return workload.checksums[checksum_key(workload.requests[0].request_id)]


def _answer(output: Path, matrix: ScoreMatrix) -> dict[str, Any]:
    succeeded = [row.client_chunk_size for row in matrix.results if row.status == "ok"]
    return {"matrix": str(output), "markdown": str(output.with_suffix(".md")), "sizes_ok": succeeded}


def _measure(spec: ClientMatrixSpec, folder: Path, output: Path, say: Say) -> str | None:
    """Measure into `output`. None, or how the server ended prematurely."""
    with on_record(str(folder)) as record:
        say(f"{spec.name}: starting the server")
        server = local_server(
            spec.server_flags,
            folder / "logs" / f"{spec.name}_server.log",
            port=spec.port,
            env=machine.NO_KEY,
            on_start=record.begin,
            start_timeout_sec=spec.start_timeout_sec,
        )
        with server as running:
            say(f"{spec.name}: ready on {running.url}")
            arguments = [
                *("bench", "matrix", "--url", running.url, "--resume"),
                *("--workload-json", str(folder / folders.CANONICAL_WORKLOAD), *spec.matrix_flags),
                *("--server-config-note", measured_by(spec)),
                *("--output-json", str(output), "--output-markdown", str(output.with_suffix(".md"))),
            ]
            _run_logged(arguments, _log_of(folder, spec), say)
            return machine.end_of(running.process_id)


def _log_of(folder: Path, spec: ClientMatrixSpec) -> Path:
    return folder / "logs" / f"{spec.name}_matrix.log"


def _run_logged(arguments: Sequence[str], log: Path, say: Say) -> int:
    """The status of `prefixwise ARGUMENTS`; stdout and stderr go to the log, stderr also to `say`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command_with_parent(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **parent_environment()},
        )
        assert process.stderr is not None
        try:
            for line in process.stderr:
                output.write(line)
                output.flush()
                with suppress(OSError):  # the caller is gone, which the agent notices itself
                    say(f"  {line.rstrip()}")
            return process.wait()
        except BaseException:
            end_process(process)
            raise
        finally:
            process.stderr.close()


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return " / ".join((errors or lines)[-3:]) or "bench matrix printed nothing"
