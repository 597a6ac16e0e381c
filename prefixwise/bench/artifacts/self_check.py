"""The self-check: every step, and how it ended."""

from __future__ import annotations

from typing import Literal

from prefixwise.bench.artifacts.base import Artifact

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
