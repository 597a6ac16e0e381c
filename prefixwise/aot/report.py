"""A run as plain JSON (sizes in bytes, times in seconds), and as the lines and tables that people read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prefixwise._version import __version__

if TYPE_CHECKING:
    from prefixwise.aot.programs import ProgramReport
    from prefixwise.aot.run import AotRun, LargestChunk

Json = dict[str, Any]
Table = list[list[str]]  # the header, then one list of cells for each row

TEXT_COLUMNS = ("program", "result", "collectives")  # of `programs_table`; the other columns are numbers


def run_json(run: AotRun, reports: list[ProgramReport], largest: LargestChunk | None) -> Json:
    """The whole run."""
    return {
        "model": run.options.model,
        "slice": slice_json(run),
        "request": {
            name: getattr(run.options, name) for name in ("prefix_tokens", "items", "item_tokens", "chunk_size", "mask")
        },
        "algorithm": run.algorithm,
        "attention": run.backend.info.attention,
        "programs": [program_json(report) for report in reports],
        "largest_chunk": None if largest is None else {"items": largest.items, **asdict(largest.program)},
        "estimate": _estimate_json(run, reports),
        "versions": versions(),
    }


def slice_json(run: AotRun) -> Json:
    """The devices, and the KV cache that each of them holds."""
    info, mesh = run.backend.info, run.backend.assembly.mesh
    return {
        "topology": run.slice.name,
        "chip": run.slice.chip.title,
        "hbm_bytes": run.slice.chip.hbm_bytes,
        "dtype": info.dtype,
        "data": mesh.shape["data"],
        "tensor": mesh.shape["tensor"],
        "prefix_pool_bytes": info.num_kv_blocks * info.kv_block_bytes,
    }


def program_json(report: ProgramReport) -> Json:
    """One program."""
    compilation = report.compilation
    memory = compilation.memory
    return {
        "program": report.needed.title,
        "runs": report.needed.runs,
        "outcome": compilation.outcome,
        "reason": compilation.reason,
        "compile_seconds": round(compilation.seconds, 1),
        "hbm_bytes": None if memory is None else {**asdict(memory), "total": memory.total},
        "kernel_vmem_bytes": compilation.kernel_vmem_bytes,
        "collectives": compilation.collectives,
        "flops": report.needed.work.flops,
        "bytes_read": report.needed.work.bytes_read,
        "estimated_seconds": report.seconds_at_least,
    }


def _estimate_json(run: AotRun, reports: list[ProgramReport]) -> Json | None:
    """The whole request; None where a rate is not published."""
    times = [report.seconds_at_least for report in reports]
    known = [each for each in times if each is not None]
    if len(known) < len(times):
        return None
    return {
        "note": "an estimate from published rates, which no run can beat; nothing was run",
        "seconds": sum(known),
        "items_per_second": run.options.items / sum(known),
    }


def versions() -> dict[str, str]:
    """Versions of everything that compiled the programs."""
    return {"prefixwise": __version__, **{package: version(package) for package in ("jax", "jaxlib", "libtpu")}}


def run_title(body: Json) -> str:
    """One line that names the run of a `run_json`."""
    devices, request = body["slice"], body["request"]
    mesh = f"data {devices['data']} x tensor {devices['tensor']}"
    tokens = f"{request['prefix_tokens']} + {request['items']} x {request['item_tokens']} tokens"
    return f"{body['model']} in {devices['dtype']} on {devices['topology']} ({mesh}): {tokens}, {body['algorithm']}"


def programs_table(programs: Sequence[Json], hbm_bytes: int) -> Table:
    """One row per program; HBM is that of one chip."""
    header = ["program", "runs", "result", "arguments", "temporaries", "output", "of HBM", "VMEM"]
    rows = [
        [
            each["program"],
            str(each["runs"]),
            each["outcome"],
            *(_memory_part(each, name) for name in ("arguments", "temporaries", "output")),
            _memory_share(each, hbm_bytes),
            _binary_size(each["kernel_vmem_bytes"]),
            ", ".join(f"{number} {kind}" for kind, number in each["collectives"].items()) or "-",
            f"{each['flops'] / 1e12:.2f}",
            _milliseconds(each["estimated_seconds"]),
        ]
        for each in programs
    ]
    return [[*header, "collectives", "TFLOP", "estimate"], *rows]


def failure_lines(programs: Sequence[Json]) -> list[str]:
    """Why programs do not compile, one line each."""
    return [f"{each['program']}: {each['reason']}" for each in programs if each["reason"] is not None]


def largest_chunk_line(found: Json) -> str:
    """The most items that one forward can hold, and how that was found."""
    how = f"found by compiling {found['num_compiled']} program{'s' * (found['num_compiled'] > 1)}"
    if not found["num_tokens"]:
        return f"largest chunk: none fits ({how}): {found['reason']}"
    why = "the longest program that a server has" if found["reason"] is None else f"then: {found['reason']}"
    return f"largest chunk: {found['items']} items, {found['num_tokens']} tokens in one forward ({how}; {why})"


def estimate_line(found: Json | None) -> str:
    """The time of the whole request."""
    if found is None:
        return "no estimate: the chip's rate in this dtype is not published"
    time, rate = _milliseconds(found["seconds"]), f"{found['items_per_second']:,.0f} items/s"
    return f"estimate: {time} for the request, {rate}, if only FLOPs and HBM took time: {found['note']}"


def _binary_size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def _memory_part(program: Json, name: str) -> str:
    return _binary_size(None if program["hbm_bytes"] is None else program["hbm_bytes"][name])


def _memory_share(program: Json, hbm_bytes: int) -> str:
    found = program["hbm_bytes"]
    return "-" if found is None else f"{100 * found['total'] / hbm_bytes:.0f} %"
