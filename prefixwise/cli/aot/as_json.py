"""Reports of programs as plain JSON: sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from prefixwise._version import __version__

if TYPE_CHECKING:
    from prefixwise.aot.ahead_of_time import AotRun, LargestChunk
    from prefixwise.backends.jax.aot.report import ProgramReport


def run_json(run: AotRun, reports: list[ProgramReport], largest: LargestChunk | None) -> dict[str, Any]:
    """All of one run."""
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
        "estimate": estimate_json(run, reports),
        "versions": versions(),
    }


def slice_json(run: AotRun) -> dict[str, Any]:
    """The devices, and what is on them before a program runs."""
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


def program_json(report: ProgramReport) -> dict[str, Any]:
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


def estimate_json(run: AotRun, reports: list[ProgramReport]) -> dict[str, Any] | None:
    """Of the whole request; None where a rate is not published."""
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
    """Of what compiled them."""
    return {"prefixwise": __version__, **{package: version(package) for package in ("jax", "jaxlib", "libtpu")}}
