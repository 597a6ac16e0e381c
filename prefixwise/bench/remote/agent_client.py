"""The agent on a target, called from here: its verbs, its answers, and the lock that a run holds on the target."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from prefixwise.bench.files import problems_of
from prefixwise.bench.kinds.ops import OpsRow
from prefixwise.bench.remote.targets.base import ConnectionLostError, OnLine, Target, TargetError


@dataclass(frozen=True)
class RemoteAgent:
    """The agent on one target, run by the interpreter there that has prefixwise."""

    target: Target
    python: str

    @classmethod
    def on(cls, target: Target, python: str | None = None) -> RemoteAgent:
        return cls(target, python or target.default_python)

    def call(self, verb: str, *arguments: str, on_line: OnLine | None = None) -> dict[str, Any]:
        """The agent's answer. Raises TargetError with its message, ConnectionLostError."""
        command = [self.python, "-m", "prefixwise.bench.remote.agent", verb, *arguments]
        done = self.target.run(command, None if on_line is None else _without_errors(on_line), heartbeat=True)
        if done.status != 0:
            raise TargetError(f"{self.target.name}: {self._explained(done.message)}")
        try:
            answer = json.loads(done.last_line)
        except ValueError:
            raise TargetError(f"{self.target.name}: expected a line of JSON, got {done.last_line[:200]!r}") from None
        if not isinstance(answer, dict):
            raise TargetError(f"{self.target.name}: expected a JSON object, got {done.last_line[:200]!r}")
        return answer

    def _explained(self, message: str) -> str:
        no_python = self.python.removeprefix("~/") in message and ("No such file" in message or "not found" in message)
        if not no_python and "No module named" not in message:
            return message
        return f"{message} (prefixwise ops install --target {self.target.name} installs prefixwise as {self.python})"


def _without_errors(on_line: OnLine) -> OnLine:
    """Drop `error:` lines: the exception reports them."""

    def filtered(line: str) -> None:
        if not line.startswith("error:"):
            on_line(line)

    return filtered


_REMEDY = "if the target has another version, run prefixwise ops install"


def answer_field(answer: Mapping[str, Any], name: str, who: str) -> Any:
    """One field of the agent's answer. Raises TargetError if it is missing: the agent may have another version."""
    if name not in answer:
        got = ", ".join(sorted(answer)) or "nothing"
        raise TargetError(f"{who}: expected {name} in the agent's answer, got {got} ({_REMEDY})")
    return answer[name]


def parse_row(answer: object, who: str) -> OpsRow:
    """The answer as a row. Raises TargetError."""
    try:
        return OpsRow.model_validate(answer)
    except ValidationError as error:
        raise TargetError(f"{who}: expected a row, got another answer: {problems_of(error)[0]} ({_REMEDY})") from None


def new_token() -> str:
    """A unique token of a run for the target's lock; it names the host and process of the caller."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@contextmanager
def released_after(agent: RemoteAgent, token: str) -> Iterator[None]:
    """Release the target's lock when the block ends. After a lost connection the target does so itself."""
    is_lost = False
    try:
        yield
    except ConnectionLostError:
        is_lost = True
        raise
    finally:
        if not is_lost:
            with suppress(TargetError):
                agent.call("release", "--token", token)
