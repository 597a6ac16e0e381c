"""A score matrix before its first row: which workload, which server, which arguments; new, or one to go on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefixwise.bench.artifacts import (
    MATRIX_VERSION,
    ScoreMatrix,
    Workload,
    WorkloadRef,
    WorkloadRequest,
    WorkloadShape,
)
from prefixwise.bench.client import ScoreClient
from prefixwise.bench.files import now_utc, read_artifact, sha256_of
from prefixwise.bench.hardware import describe_hardware
from prefixwise.bench.matrix.rows import summarise
from prefixwise.bench.matrix.sweep import SweepOptions
from prefixwise.bench.server_config import contradictions, lasting_config, served_names, server_config
from prefixwise.bench.workload import checksum_key, request_checksum
from prefixwise.contract.errors import ArtifactError


def choose_request(workload: Workload, request_id: str | None) -> WorkloadRequest:
    """The first where no name is given. Raises ArtifactError, also where it is no longer what its checksum says."""
    found = {request.request_id: request for request in workload.requests}
    request = workload.requests[0] if request_id is None else found.get(request_id)
    if request is None:
        raise ArtifactError(f"the workload has no request {request_id!r}, it has {', '.join(found)}")
    recorded = workload.checksums.get(checksum_key(request.request_id))
    if recorded not in (None, request_checksum(request.model_dump())):
        raise ArtifactError(f"{request.request_id} does not fit its checksum {recorded}: the workload was changed")
    return request


def new_matrix(workload_path: Path, workload: Workload, request: WorkloadRequest, options: SweepOptions) -> ScoreMatrix:
    """Without rows; `describe_server` fills in the server."""
    return ScoreMatrix(
        schema_version=MATRIX_VERSION,
        generated_at_utc=now_utc(),
        backend=options.backend,
        evaluation_view=options.view,
        hardware={},
        server_config={},
        workload_ref=WorkloadRef(
            path=str(workload_path),
            sha256=sha256_of(workload_path),
            request_id=request.request_id,
            request_sha256=request_checksum(request.model_dump()),
        ),
        workload=WorkloadShape(
            model=workload.model,
            query_tokens=len(request.query_token_ids),
            num_items=len(request.items_token_ids),
            item_tokens=workload.item_tokens,
            label_token_ids=request.label_token_ids,
        ),
        results=[],
        confirm_results=[],
        summary=summarise([], [], confirms=False),
        notes=_notes_on_sizes(options.client_chunk_sizes, len(request.items_token_ids)),
        arguments=json.loads(json.dumps(asdict(options))),  # as they are read back
        complete=False,
    )


def describe_server(matrix: ScoreMatrix, options: SweepOptions, client: ScoreClient, info: Mapping[str, Any]) -> str:
    """Fill in what `info` says, and note where the caller says otherwise.

    Returns the name of the model for requests: some servers want none but their own.
    """
    served = served_names(client.get_json("/v1/models"))
    wanted = matrix.workload.model
    matrix.hardware = describe_hardware(info, options.hardware, options.usd_per_hour)
    matrix.server_config = server_config(info, options.declared, client.base_url)
    matrix.notes.extend(contradictions(info, options.declared, options.backend, wanted, served))
    return wanted if wanted in served or not served else served[0]


def rows_in(path: Path) -> str | None:
    """What would be lost if this file were written anew, in words; None where nothing would."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    try:
        old = read_artifact(path, ScoreMatrix)
    except ArtifactError:
        return "something that is no score matrix"
    count = len(old.results) + len(old.confirm_results)
    return f"{count} rows of {old.backend}, measured until {old.generated_at_utc}" if count else None


def resume_matrix(path: Path, fresh: ScoreMatrix) -> ScoreMatrix:
    """`fresh` with the rows of the file, or as it is where there is no file.

    Raises ArtifactError where the file is of another sweep, and says what differs.
    """
    if not path.exists():
        return fresh
    old = read_artifact(path, ScoreMatrix)
    before, now = _identity(old), _identity(fresh)
    differing = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    if differing:
        told = "; ".join(f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}" for key in differing[:5])
        raise ArtifactError(f"{path} is of another sweep and cannot be resumed: {told}")
    notes = list(dict.fromkeys([*old.notes, *fresh.notes]))
    rows = {"results": old.results, "confirm_results": old.confirm_results}
    return fresh.model_copy(update={**rows, "summary": old.summary, "notes": notes, "complete": old.complete})


def _identity(matrix: ScoreMatrix) -> dict[str, Any]:
    ref = matrix.workload_ref
    return {
        "workload sha256": ref.request_sha256 or ref.sha256,
        "request": ref.request_id,
        "backend": matrix.backend,
        "evaluation view": matrix.evaluation_view,
        **{f"argument {key}": value for key, value in (matrix.arguments or {}).items()},
        **{f"server's {key}": value for key, value in lasting_config(matrix.server_config).items()},
    }


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _notes_on_sizes(sizes: tuple[int, ...], num_items: int) -> list[str]:
    larger = [size for size in sizes if size > num_items]
    if not larger:
        return []
    return [f"chunk sizes {', '.join(map(str, larger))} are more than the {num_items} items: one chunk holds them all"]
