"""What a run leaves: every request, disruption, process and sample. Verdicts and report are functions of it alone.

Times are seconds since the run began.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from prefixwise.bench.files import write_text

# `hung_up`: by the client, on purpose. `lost`: the server closed without a whole response. `unanswered`: the client
# gave up after `traffic.PATIENCE_SECONDS`, which no request may take.
Ending = Literal["answered", "hung_up", "lost", "unreachable", "unanswered"]


class Exchange(NamedTuple):
    """One request of a client, and how it ended."""

    kind: str
    begin: float
    end: float
    ending: Ending
    status: int  # 0: no response
    code: str  # of an error
    as_expected: bool  # the status, and of a 200 every bit
    detail: str = ""


class Sample(NamedTuple):
    """The server's process at one moment; blocks and requests are -1 where it did not answer."""

    time: float
    life: int
    rss: int  # bytes
    files: int
    threads: int
    cpu_seconds: float
    used_blocks: int
    pinned_blocks: int
    requests: int  # running and waiting
    is_idle: bool  # taken after traffic had stopped and all pins were released


@dataclass
class Life:
    """One process of the server."""

    number: int
    begin: float
    ready: float | None = None
    end: float | None = None
    status: int | None = None  # of its exit; negative: the signal that killed it


@dataclass
class Disruption:
    """A fault or a restart, from its beginning until the server was well again."""

    kind: str
    begin: float
    end: float
    excuses: tuple[str, ...]  # statuses and endings of requests in that time: "503", "lost", "unreachable"
    spares_earlier: bool = False  # requests from before the beginning must still get an answer: a drain
    found: str = ""  # what the server did
    failure: str = ""  # where it was not as documented

    @property
    def is_end(self) -> bool:
        """Did it end the process?"""
        return "unreachable" in self.excuses


@dataclass
class Recording:
    """A whole run."""

    command: str
    machine: str
    versions: str
    date: str
    seconds: float = 0.0
    num_begun: int = 0  # requests
    reference_items: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    disruptions: list[Disruption] = field(default_factory=list)

    def write(self, path: Path) -> None:
        write_text(path, f"{json.dumps(asdict(self))}\n")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """As `write` wrote it."""
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows: dict[str, Any] = {
            "exchanges": [Exchange(*each) for each in content.pop("exchanges")],
            "samples": [Sample(*each) for each in content.pop("samples")],
            "lives": [Life(**each) for each in content.pop("lives")],
            "disruptions": [
                Disruption(**{**each, "excuses": tuple(each["excuses"])}) for each in content.pop("disruptions")
            ],
        }
        return cls(**content, **rows)
