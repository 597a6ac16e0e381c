"""The self-check: every step of `validate self`, and how it ended."""

from __future__ import annotations

from typing import Literal

from prefixwise.bench.kinds.base import Artifact
from prefixwise.bench.kinds.findings import Findings
from prefixwise.bench.render.document import NONE, Cell, Report, Section, table
from prefixwise.bench.render.numbers import milliseconds

SELF_CHECK_VERSION: Literal["score_self_check_v1"] = "score_self_check_v1"


class SelfCheckStep(Artifact):
    """One command, and how it ended."""

    title: str
    command: str
    status: int  # of the process; 0: done, 3: not run, as it lacked something
    seconds: float
    detail: str | None
    server: str | None = None  # the command line of the server that it was about


class SelfCheck(Artifact):
    """`self_check.json`: everything above on this machine's own servers."""

    schema_version: Literal["score_self_check_v1"]
    generated_at_utc: str
    model: str
    backends: list[str]
    steps: list[SelfCheckStep]
    all_pass: bool
    complete: bool = True  # False: steps are still to come, or it was cut short


def check_self_check(verdict: SelfCheck, found: Findings) -> None:
    """A self-check cannot pass where a command failed."""
    failed = [step.title for step in verdict.steps if step.status != 0]
    if verdict.all_pass and (failed or not verdict.steps):
        found.fail("all_pass", f"false, by its steps: {', '.join(failed) or 'there are none'}", True)
    if not verdict.complete:
        found.warn("complete", "all steps", False)
    for index, step in enumerate(verdict.steps):
        if step.status != 0:
            found.warn(f"steps[{index}].status", "0", f"{step.status}: {step.detail}")


_ENDINGS = {0: Cell("done", "good"), 3: Cell("not run", "open")}


def self_check_report(check: SelfCheck, name: str = "") -> Report:
    """The report of the steps."""
    failed = [step.title for step in check.steps if step.status not in _ENDINGS]
    skipped = [step.title for step in check.steps if step.status == 3]
    phrase = [
        f"{len(check.steps)} steps on {', '.join(check.backends)}, model {check.model}.",
        *([f"Failed: {', '.join(failed)}."] if failed else []),
        *([f"Not run, for lack of something: {', '.join(skipped)}."] if skipped else []),
        *([] if check.complete else ["It was cut short, or goes on."]),
        *(["Every step that was run is done."] if check.all_pass and not failed else []),
    ]
    header = ("step", "ended", "took", "command", "remark")
    steps = table("Every step", header, list(map(_step, check.steps)), numeric=False)
    passed = False if failed or not check.all_pass else None if skipped or not check.complete else True
    return Report("Self-check", check.generated_at_utc[:10], passed, tuple(phrase), (), (Section("Steps", steps),))


def _step(step: SelfCheckStep) -> tuple[Cell | str, ...]:
    ending = _ENDINGS.get(step.status, Cell(f"failed ({step.status})", "bad"))
    return step.title, ending, milliseconds(1000 * step.seconds), Cell(step.command, "code"), step.detail or NONE
