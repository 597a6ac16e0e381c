"""Reports of programs as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefixwise.cli.output import stdout_width, styled
from prefixwise.cli.text_table import Column, render_table, visible

if TYPE_CHECKING:
    from prefixwise.aot.ahead_of_time import AotRun


def run_text(run: AotRun, body: dict[str, Any]) -> str:
    """From what `as_json.run_json` made."""
    lines = [styled(_title(run, body["slice"]), "bold cyan")]
    lines.append(programs_table(body["programs"], run.slice.chip.hbm_bytes))
    for program in body["programs"]:
        if program["reason"] is not None:
            lines.append(f"{program['program']}: {visible(program['reason'])}\n")
    if body["largest_chunk"] is not None:
        lines.append(_largest(body["largest_chunk"]))
    return "\n".join([*lines, _estimate(body["estimate"])])


def _title(run: AotRun, devices: dict[str, Any]) -> str:
    mesh = f"data {devices['data']} x tensor {devices['tensor']}"
    request = f"{run.options.prefix_tokens} + {run.options.items} x {run.options.item_tokens} tokens, {run.algorithm}"
    return f"{run.options.model} in {devices['dtype']} on {devices['topology']} ({mesh}): {request}"


def programs_table(programs: Sequence[dict[str, Any]], hbm_bytes: int) -> str:
    """HBM is that of one chip."""
    columns = [
        Column("program", [each["program"] for each in programs]),
        Column("runs", [str(each["runs"]) for each in programs], align_right=True),
        Column("result", [each["outcome"] for each in programs]),
        Column("arguments", [_part(each, "arguments") for each in programs], align_right=True),
        Column("temporaries", [_part(each, "temporaries") for each in programs], align_right=True),
        Column("output", [_part(each, "output") for each in programs], align_right=True),
        Column("of HBM", [_share(each, hbm_bytes) for each in programs], align_right=True),
        Column("VMEM", [size(each["kernel_vmem_bytes"]) for each in programs], align_right=True),
        Column("collectives", [collectives(each["collectives"]) for each in programs]),
        Column("TFLOP", [f"{each['flops'] / 1e12:.2f}" for each in programs], align_right=True),
        Column("estimate", [milliseconds(each["estimated_seconds"]) for each in programs], align_right=True),
    ]
    return render_table(columns, stdout_width())


def size(num_bytes: int | None) -> str:
    """In binary units, as the compiler speaks of memory."""
    if num_bytes is None:
        return "-"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def collectives(found: dict[str, int]) -> str:
    """By kind; those of the loop over layers count once."""
    return ", ".join(f"{number} {kind}" for kind, number in found.items()) or "-"


def milliseconds(seconds: float | None) -> str:
    """Of an estimate."""
    return "-" if seconds is None else f"{1000 * seconds:.2f} ms"


def _part(program: dict[str, Any], name: str) -> str:
    return size(None if program["hbm_bytes"] is None else program["hbm_bytes"][name])


def _share(program: dict[str, Any], hbm_bytes: int) -> str:
    found = program["hbm_bytes"]
    return "-" if found is None else f"{100 * found['total'] / hbm_bytes:.0f} %"


def _largest(found: dict[str, Any]) -> str:
    how = f"found by compiling {found['num_compiled']} program{'s' * (found['num_compiled'] > 1)}"
    if not found["num_tokens"]:
        return f"largest chunk: none fits ({how}): {visible(found['reason'])}"
    why = "the longest program that a server has" if found["reason"] is None else f"then: {visible(found['reason'])}"
    return f"largest chunk: {found['items']} items, {found['num_tokens']} tokens in one forward ({how}; {why})"


def _estimate(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no estimate: the chip's rate in this dtype is not published\n"
    time, rate = milliseconds(found["seconds"]), f"{found['items_per_second']:,.0f} items/s"
    return f"estimate: {time} for the request, {rate}, if FLOPs and HBM were all: {found['note']}\n"
