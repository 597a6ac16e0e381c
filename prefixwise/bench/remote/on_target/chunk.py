"""One chunk size of a sweep, on the target: start a server, send the workload's requests, write a row."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefixwise._version import __version__
from prefixwise.bench.files import now_utc, read_artifact, write_artifact
from prefixwise.bench.kinds.ops import OPS_MATRIX_VERSION, OpsRow, OpsRunMetadata, OpsWorkload
from prefixwise.bench.kinds.workload import Workload
from prefixwise.bench.processes import ServerStartError, local_server
from prefixwise.bench.remote import folders
from prefixwise.bench.remote.on_target import machine, run_lock
from prefixwise.bench.remote.on_target.server_records import on_record
from prefixwise.bench.remote.spec import SweepSpec
from prefixwise.bench.rules import mean, percentile
from prefixwise.bench.run.workload import WorkloadOptions, make_workload
from prefixwise.bench.tokens import token_facts
from prefixwise.contract.errors import ArtifactError

if TYPE_CHECKING:  # the HTTP client is imported where a server is measured
    from prefixwise.bench.client import ScoreClient

Say = Callable[[str], None]


def begin_sweep(spec: SweepSpec, say: Say) -> dict[str, Any]:
    """Create the folder, or resume one of the same sweep. Raises ArtifactError, TargetError."""
    folder = Path(spec.folder).expanduser()
    with run_lock.held(spec, str(folder)):
        if not spec.new_folder and (folder / folders.METADATA).exists():
            _resume(spec, folder, say)
        else:
            folder = _begin_new(spec, folder, say)
        if folders.rows_in(folder):  # a killed run may have left rows without their summary
            folders.write_results(folder, spec, *_ran_on(spec, {}, folder))
        done = [row for size in spec.chunk_sizes if (row := folders.finished_row(folder, size)) is not None]
    return {"folder": str(folder), "done": [row.model_dump() for row in done]}


def _resume(spec: SweepSpec, folder: Path, say: Say) -> None:
    metadata = read_artifact(folder / folders.METADATA, OpsRunMetadata)
    other = _differences(metadata.spec, spec.identity)
    if other:
        raise ArtifactError(f"{folder} contains another sweep: {other}")
    say(f"resuming {folder}")
    sizes = list(dict.fromkeys((*(metadata.chunk_sizes or ()), *spec.chunk_sizes)))
    if sizes != metadata.chunk_sizes:
        metadata.chunk_sizes = sizes
        metadata.spec = {**(metadata.spec or {}), "chunk_sizes": sizes}
        write_artifact(folder / folders.METADATA, metadata)
    if folders.read_or_set_aside(folder / folders.WORKLOAD, Workload, say) is None:
        _write_workload(spec, folder, say)


def _begin_new(spec: SweepSpec, wanted: Path, say: Say) -> Path:
    """Create the folder; remove it again if the sweep cannot begin."""
    machine.check_disk(wanted)
    machine.check_port(spec.port)
    is_made = spec.new_folder or not wanted.exists()
    if not is_made and folders.rows_in(wanted):
        raise ArtifactError(f"{wanted} contains rows, but no {folders.METADATA} that names their sweep")
    folder = folders.make_new(wanted) if spec.new_folder else wanted
    try:
        folder.mkdir(parents=True, exist_ok=True)
        workload = _write_workload(spec, folder, say)
        write_artifact(folder / folders.METADATA, _metadata(spec, folder, workload))
    except BaseException:
        if is_made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _write_workload(spec: SweepSpec, folder: Path, say: Say) -> Workload:
    options = WorkloadOptions(spec.query_tokens, spec.num_items, spec.item_tokens)
    workload = make_workload(options, token_facts(spec.model))
    for note in workload.notes:
        say(f"note: {note}")
    write_artifact(folder / folders.WORKLOAD, workload)
    return workload


def _differences(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Between the fields that decide a row; folder, port and timeouts do not."""
    if before is None:
        return "its specification is missing"
    free = ("folder", "chunk_sizes", "port", "timeout_sec", "start_timeout_sec", "hardware")
    other = {key: value for key, value in now.items() if key not in free and before.get(key) != value}
    return "; ".join(f"{key} is {before.get(key)!r} there, {value!r} here" for key, value in other.items())


def _metadata(spec: SweepSpec, folder: Path, workload: Workload) -> OpsRunMetadata:
    config = {
        "model": spec.model,
        "multi_item_mask_impl": spec.mask,
        "multi_item_segment_fallback_threshold": spec.segment_fallback_threshold,
        "disable_radix_cache": True,
    }
    return OpsRunMetadata(
        schema_version=OPS_MATRIX_VERSION,
        run_id=folder.name,
        model=spec.model,
        backend=spec.backend,
        hardware=spec.hardware or None,
        workload=OpsWorkload(
            query_tokens=spec.query_tokens,
            num_items=spec.num_items,
            item_tokens=spec.item_tokens,
            label_token_ids=workload.label_token_ids,
        ),
        workload_ref=spec.workload_ref,
        server_config=config,
        chunk_sizes=list(spec.chunk_sizes),
        spec=spec.identity,
        timestamp_start=now_utc(),
        prefixwise=__version__,
    )


def measure_chunk(spec: SweepSpec, size: int, say: Say) -> OpsRow:
    """Measure one chunk size; write the row and the summary of all rows. A failure gives a row with the error."""
    folder = Path(spec.folder).expanduser()
    with run_lock.held(spec, str(folder)):
        return _measure_alone(spec, size, folder, say)


def _measure_alone(spec: SweepSpec, size: int, folder: Path, say: Say) -> OpsRow:
    workload = read_artifact(folder / folders.WORKLOAD, Workload)
    machine.check_disk(folder)
    machine.check_port(spec.port)
    with (folder / f"chunk_{size}.log").open("w", encoding="utf-8") as log:

        def log_line(line: str) -> None:
            say(line)
            print(now_utc(), line, file=log, flush=True)

        row, info = _measure(spec, size, workload, folder, log_line)
    write_artifact(folders.chunk_file(folder, size), row)
    folders.write_results(folder, spec, *_ran_on(spec, info, folder))
    return row


def _measure(
    spec: SweepSpec, size: int, workload: Workload, folder: Path, log_line: Say
) -> tuple[OpsRow, dict[str, Any]]:
    from prefixwise.bench.client import CallError, ScoreClient

    own_log = folder / f".server_{size}.log"
    try:
        with on_record(str(folder)) as record:
            log_line(f"chunk size {size}: starting the server")
            server = local_server(
                spec.flags_of(size),
                own_log,
                port=spec.port,
                env=machine.NO_KEY,
                on_start=record.begin,
                start_timeout_sec=spec.start_timeout_sec,
            )
            with server as running, ScoreClient(running.url, timeout_sec=spec.timeout_sec) as client:
                info = client.server_info()
                log_line(f"chunk size {size}: ready on {running.url}")
                try:
                    seconds = _seconds(client, spec, workload, log_line)
                except CallError as error:
                    died = machine.end_of(running.process_id, 2.0) if error.code is None else None
                    return _failed(size, died or str(error), error.reason, client.server_info(), log_line), info
                return _row(size, spec, seconds, client.server_info(), log_line), info
    except ServerStartError as error:
        return _failed(size, str(error), "start", {}, log_line), {}
    finally:
        _append(own_log, folder / "server.log", size)


def _seconds(client: ScoreClient, spec: SweepSpec, workload: Workload, log_line: Say) -> list[float]:
    """The seconds of every timed run: all items in one request, which the server splits into chunks."""
    request = workload.requests[0]
    body = {
        "query": request.query_token_ids,
        "items": request.items_token_ids,
        "label_token_ids": request.label_token_ids,
        "apply_softmax": request.apply_softmax,
        "item_first": request.item_first,
    }
    taken = []
    for run in range(spec.warmup_runs + spec.timed_runs):
        seconds = client.score(body).seconds
        kind = "warm-up" if run < spec.warmup_runs else "run"
        log_line(f"{kind} {run + 1}/{spec.warmup_runs + spec.timed_runs}: {seconds * 1000:.1f} ms")
        taken.append(seconds)
    return taken[spec.warmup_runs :]


def _row(size: int, spec: SweepSpec, seconds: list[float], info: Mapping[str, Any], log_line: Say) -> OpsRow:
    row = OpsRow(
        chunk_size=size,
        throughput_items_per_sec=spec.num_items / mean(seconds),
        latency_p50_ms=percentile(seconds, 50) * 1000,
        latency_p99_ms=percentile(seconds, 99) * 1000,
        memory_peak_mb=machine.peak_megabytes(info),
        status="ok",
        error=None,
        latencies_ms=[each * 1000 for each in seconds],
    )
    log_line(f"chunk size {size}: {row.throughput_items_per_sec:.1f} items/s")
    return row


def _failed(size: int, error: str, reason: str, info: Mapping[str, Any], log_line: Say) -> OpsRow:
    log_line(f"chunk size {size}: {error}")
    return OpsRow(
        chunk_size=size,
        throughput_items_per_sec=None,
        latency_p50_ms=None,
        latency_p99_ms=None,
        memory_peak_mb=machine.peak_megabytes(info),
        status="failed",
        error=error,
        failure_reason=reason,
    )


def _ran_on(spec: SweepSpec, info: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Backend and hardware as the server reports them, or as in the metadata if it did not start."""
    backend, hardware = machine.backend_and_hardware(info)
    path = folder / folders.METADATA
    metadata = read_artifact(path, OpsRunMetadata)
    if backend is None:
        return metadata.backend or spec.backend, metadata.hardware or spec.hardware or "unknown"
    metadata.backend, metadata.hardware = backend, spec.hardware or hardware
    metadata.timestamp_end = now_utc()
    write_artifact(path, metadata)
    return backend, metadata.hardware


def _append(own_log: Path, shared_log: Path, size: int) -> None:
    """Append this server's log to the common log."""
    if not own_log.exists():
        return
    with shared_log.open("a", encoding="utf-8") as shared:
        shared.write(f"# chunk size {size}\n{own_log.read_text(encoding='utf-8', errors='replace')}\n")
    own_log.unlink()
