"""`prefixwise bench check`: are these files artifacts that anyone can rely on? Every complaint names its field."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefixwise.cli.bench_common import last_line
from prefixwise.cli.failures import FAILED, MISUSED, CommandError
from prefixwise.cli.output import say, visible

if TYPE_CHECKING:
    from prefixwise.bench.kinds.findings import Finding
    from prefixwise.bench.run.check import FileReport

# What a flag says about a file.
WORKLOAD_KINDS = ("workload",)
MATRIX_KINDS = ("score-matrix", "ops-matrix")
COMPARISON_KINDS = ("comparison",)

Files = list[Path] | None
More = Annotated[
    Files,
    typer.Argument(metavar="FILE|DIR", help="More for the flag before them, as a shell expands *; or alone, any kind."),
]
Target = tuple[Path, tuple[str, ...], bool]  # the expected kinds; False for a file that was found in a folder


def bench_check(
    more: More = None,
    workload: Annotated[Files, typer.Option(metavar="FILE", help="A canonical workload.")] = None,
    matrix: Annotated[Files, typer.Option(metavar="FILE", help="A score matrix or an ops matrix.")] = None,
    comparison: Annotated[Files, typer.Option(metavar="FILE", help="A comparison of two backends.")] = None,
    everything: Annotated[Files, typer.Option("--all", metavar="DIR", help="Every .json below a folder.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Warnings too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All findings in the JSON, and no lines for people.")] = False,
) -> None:
    """Check artifacts: their fields, and that their metrics follow from each other. Status 1 where one is invalid."""
    from prefixwise.bench.run.check import check_file

    flags = {WORKLOAD_KINDS: workload or [], MATRIX_KINDS: matrix or [], COMPARISON_KINDS: comparison or []}
    targets = list(_targets(flags, everything or [], more or []))
    reports = []
    for path, kinds, is_named in targets:
        reports.append(check_file(path, kinds, is_artifact=is_named))
        if not as_json:
            _report_findings(reports[-1], verbose)
    last_line(_json(reports, with_files=as_json), asked=as_json)
    if not all(report.is_valid for report in reports):
        raise typer.Exit(FAILED)


def _targets(
    flags: dict[tuple[str, ...], list[Path]], folders: Sequence[Path], more: Sequence[Path]
) -> Iterator[Target]:
    """Files and their expected kinds. Raises CommandError for a missing file, before any check."""
    from prefixwise.bench.run.check import json_files

    if not any(flags.values()) and not folders and not more:
        hint = "for example: prefixwise bench check --all reports/artifacts -v"
        raise CommandError(
            "expected --workload, --matrix, --comparison, --all or files, got none", hint=hint, status=MISUSED
        )
    files = [path for paths in flags.values() for path in paths]
    _check_that_all_exist([*files, *folders, *more])
    _check_that_none_is_a_folder(files)
    yield from ((path, kinds, True) for kinds, paths in flags.items() for path in paths)
    # Without a second flag there is no doubt which one the rest belongs to.
    given = [kinds for kinds, paths in flags.items() if paths]
    kinds_of_more = given[0] if len(given) == 1 and not folders else ()
    for path in (*folders, *more):
        if path.is_dir():
            yield from ((file, (), False) for file in json_files(path))
        else:
            yield path, kinds_of_more, True


def _check_that_all_exist(paths: Sequence[Path]) -> None:
    from prefixwise.bench.run.check import json_files

    for path in paths:
        if not path.exists():
            raise CommandError(f"no such file or folder: {visible(str(path))}", status=MISUSED)
        if path.is_dir() and next(json_files(path), None) is None:
            raise CommandError(f"{visible(str(path))} holds no .json file: expected artifacts", status=MISUSED)


def _check_that_none_is_a_folder(files: Sequence[Path]) -> None:
    for path in files:
        if path.is_dir():
            raise CommandError(
                f"expected a file, got a folder: {visible(str(path))}",
                hint="--all DIR checks every .json below a folder",
                status=MISUSED,
            )


def _report_findings(report: FileReport, verbose: bool) -> None:
    path = visible(str(report.path))
    if report.errors:
        say(f"invalid  {path}  {report.kind or 'unknown'}", style="red")
    else:
        say(f"{'ok' if report.kind else 'skipped':7}  {path}  {report.kind or 'no artifact'}")
    for error in report.errors:
        say(f"  error: {path}: {visible(str(error))}", style="red")
    for warning in report.warnings if verbose else ():
        say(f"  warning: {path}: {visible(str(warning))}", style="yellow")


def _json(reports: Sequence[FileReport], *, with_files: bool) -> dict[str, Any]:
    num_invalid = sum(not report.is_valid for report in reports)
    summary: dict[str, Any] = {
        "valid": num_invalid == 0,
        "num_files": len(reports),
        "num_invalid": num_invalid,
        "num_errors": sum(len(report.errors) for report in reports),
        "num_warnings": sum(len(report.warnings) for report in reports),
    }
    return {**summary, "files": [_file_json(report) for report in reports]} if with_files else summary


def _file_json(report: FileReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "kind": report.kind,
        "valid": report.is_valid,
        "errors": [_finding_json(each) for each in report.errors],
        "warnings": [_finding_json(each) for each in report.warnings],
    }


def _finding_json(finding: Finding) -> dict[str, str]:
    return {"field": finding.field, "expected": finding.expected, "got": finding.got}
