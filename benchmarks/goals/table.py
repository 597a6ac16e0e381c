"""Rows as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.text_rows import aligned

_HEADINGS = ("goal", "backend", "measured", "bound", "met", "TFLOP/s", "of GEMM", "")
_LEFT = (0, 1, 7)  # columns of words
_MET = {True: "yes", False: "NO", None: "-"}


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each, under headings; every column as wide as its widest cell."""
    return aligned([_HEADINGS, *(_cells(row) for row in rows)], left=_LEFT)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    unit = row["unit"]
    bound = "-" if row["goal"] is None else f"{'<=' if row['at_most'] else '>='} {amount(row['goal'], unit)}"
    share = row["fraction_of_gemm"]
    return (
        f"{row['name']}: {row['title']}",
        row["backend"],
        "?" if row["measured"] is None else f"{amount(row['measured'], unit)}{'' if unit == '%' else f' {unit}'}",
        bound,
        _MET[row["met"]],
        "-" if row["tflops"] is None else f"{row['tflops']:,.1f}",
        "-" if share is None else f"{100 * share:.1f} %",
        row["note"],
    )


def amount(value: float, unit: str) -> str:
    """A share as a percentage, few digits for large numbers."""
    if unit == "%":
        return f"{100 * value:.1f} %"
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def backend_line(backend: str, found: Mapping[str, Any]) -> str:
    """What a backend ran on, its GEMMs, and where the run's time went."""
    gemm = " and ".join(f"{rate / 1e12:,.1f} ({name})" for name, rate in found["gemm_flops"].items()) or "?"
    seconds = ", ".join(f"{name.replace('_', '-')} {value:g} s" for name, value in found["seconds"].items())
    title = f"{backend} {found['version']} on {found['device']}, {found['dtype']}"
    flags = "".join(f" {flag}" for flag in found.get("serve_flags") or ())
    programs = f"{found['programs']} programs compiled beforehand" if "programs" in found else f"serve{flags}"
    return f"{title}: GEMM {gemm} TFLOP/s; {seconds}; {programs}"
