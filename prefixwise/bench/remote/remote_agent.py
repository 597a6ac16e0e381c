"""The agent on a target, called from here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prefixwise.bench.remote.targets.base import OnLine, Target, TargetError


@dataclass(frozen=True)
class RemoteAgent:
    """One target, and the interpreter there that has prefixwise."""

    target: Target
    python: str

    @classmethod
    def on(cls, target: Target, python: str | None = None) -> RemoteAgent:
        return cls(target, python or target.default_python)

    def call(self, verb: str, *arguments: str, on_line: OnLine | None = None) -> dict[str, Any]:
        """Its answer. Raises TargetError with its own words, ConnectionLostError."""
        command = [self.python, "-m", "prefixwise.bench.remote.on_target.agent", verb, *arguments]
        done = self.target.run(command, None if on_line is None else _without_errors(on_line), heartbeat=True)
        if done.status != 0:
            raise TargetError(f"{self.target.name}: {self._explained(done.words)}")
        try:
            answer = json.loads(done.last_line)
        except ValueError:
            raise TargetError(f"{self.target.name}: expected a line of JSON, got {done.last_line[:200]!r}") from None
        if not isinstance(answer, dict):
            raise TargetError(f"{self.target.name}: expected a JSON object, got {done.last_line[:200]!r}")
        return answer

    def _explained(self, words: str) -> str:
        no_python = self.python.removeprefix("~/") in words and ("No such file" in words or "not found" in words)
        if not no_python and "No module named" not in words:
            return words
        return f"{words} (prefixwise ops install --target {self.target.name} puts prefixwise there as {self.python})"


def _without_errors(on_line: OnLine) -> OnLine:
    """What ends a call is told once, by the exception."""

    def hear(line: str) -> None:
        if not line.startswith("error:"):
            on_line(line)

    return hear
