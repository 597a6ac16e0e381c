"""Runs a built image as production would, and checks it: `make image-check`, after `make image`.

Root file system read-only, the image's own user, no capabilities, no network, volumes for models and caches. The server
must become healthy, score a request and stop in time. The last line is JSON. Only docker or podman is needed, no Python
package.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

HARDENING = ("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "ld", "as", "make", "nvcc")
STOP_SECONDS = 45  # the server's grace period, and what it may take beyond
READY_SECONDS = 600

_WHICH = f"import shutil; print(*filter(shutil.which, {COMPILERS!r}))"
_WHO = "import os; print(os.getuid(), os.access('/', os.W_OK), os.access('/opt/prefixwise', os.W_OK))"
_SCORE = """
from urllib.request import Request, urlopen
import json
body = {"query": "Review: ", "items": ["I loved it.", "It broke."], "suffix": " Sentiment:",
        "labels": [" positive", " negative"], "apply_softmax": True}
request = Request("http://127.0.0.1:30000/v1/score", json.dumps(body).encode(), {"Content-Type": "application/json"})
print(json.dumps(json.load(urlopen(request))["scores"]))
"""


class CheckError(Exception):
    """The image is not what it must be. The message says what was expected and what it is."""


class Image:
    """An image of a container engine, which is a command such as `docker` or `podman`."""

    def __init__(self, engine: Sequence[str], name: str) -> None:
        self._engine = engine
        self.name = name

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the engine with these arguments, whatever its exit status is."""
        return subprocess.run([*self._engine, *arguments], capture_output=True, text=True)

    def output(self, *arguments: str) -> str:
        """What the engine prints. Raises CheckError if it fails."""
        ran = self.call(*arguments)
        if ran.returncode != 0:
            raise CheckError(f"{shlex.join([*self._engine, *arguments])} exits with {ran.returncode}: {ran.stderr}")
        return ran.stdout.strip()

    def configuration(self) -> dict[str, Any]:
        """The image's `Config`, with the health check, which docker and podman keep in different places."""
        (found,) = json.loads(self.output("image", "inspect", self.name))
        return {**found["Config"], "Healthcheck": found["Config"].get("Healthcheck") or found.get("Healthcheck")}


def expect(is_so: bool, expected: str, got: object) -> None:
    """Raises CheckError if it is not so."""
    if not is_so:
        raise CheckError(f"expected {expected}, got {got!r}")


def check_configuration(config: dict[str, Any]) -> list[str]:
    """Check what the image declares, and return the command of its health check."""
    user = config["User"].partition(":")[0]
    expect(user.isdigit() and int(user) > 0, "a numeric user that is not root", config["User"])
    expect(set(config["Volumes"]) == {"/models", "/cache"}, "volumes for models and caches", config["Volumes"])
    expect(set(config["ExposedPorts"]) == {"30000/tcp"}, "port 30000", config["ExposedPorts"])
    kind, *command = (config["Healthcheck"] or {"Test": [None]})["Test"]
    expect(kind == "CMD", "a health check that needs no shell", config["Healthcheck"])
    return [str(part) for part in command]


def wait_until_healthy(image: Image, container: str, command: Sequence[str]) -> None:
    """Run the image's health check in the container until it succeeds."""
    deadline = time.monotonic() + READY_SECONDS
    while image.call("exec", container, *command).returncode != 0:
        is_running = image.output("inspect", "--format", "{{.State.Running}}", container)
        if is_running != "true" or time.monotonic() > deadline:
            logs = image.call("logs", container)
            raise CheckError(f"the server does not become healthy:\n{logs.stdout}{logs.stderr}")
        time.sleep(1)


def check_running(image: Image, container: str, health_check: Sequence[str]) -> list[list[float]]:
    """Check the server in the container, and return the scores of a small request."""
    wait_until_healthy(image, container, health_check)
    who = image.output("exec", container, "python3", "-c", _WHO).split()
    expect(who[0] != "0" and who[1:] == ["False", "False"], "another user than root that may not write", who)
    scores: list[list[float]] = json.loads(image.output("exec", container, "python3", "-c", _SCORE))
    expect(len(scores) == 2 and all(abs(sum(row) - 1) < 1e-3 for row in scores), "two rows of probabilities", scores)
    expect(scores[0][0] > scores[1][0], "a higher score for the better review", scores)
    image.output("stop", "-t", str(STOP_SECONDS), container)
    status = image.output("inspect", "--format", "{{.State.ExitCode}}", container)
    expect(status == "0", "exit status 0 after SIGTERM", status)
    return scores


def check(image: Image, run_options: Sequence[str], serve_options: Sequence[str]) -> dict[str, Any]:
    """Every check, in order. Removes the container and its volumes."""
    health_check = check_configuration(image.configuration())
    options = [*HARDENING, *run_options]
    found = image.output("run", "--rm", *options, "--entrypoint=python3", image.name, "-c", _WHICH)
    expect(not found, "no compiler", found)
    container = f"prefixwise-check-{uuid.uuid4().hex[:8]}"
    started = time.monotonic()
    try:
        image.output("run", "--detach", "--name", container, *options, image.name, *serve_options)
        scores = check_running(image, container, health_check)
    finally:
        image.call("rm", "--force", "--volumes", container)
    return {"image": image.name, "scores": scores, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run a built image as production would, and check it.")
    parser.add_argument("image", help="for example prefixwise:cpu")
    parser.add_argument("--engine", default="docker", help="docker, podman, or one of them with its global options")
    parser.add_argument("--run-options", default="", help="more options of `run`, for example '--gpus all'")
    parser.add_argument("--serve-options", default="", help="options of `prefixwise serve`, for example a model")
    given = parser.parse_args()
    image = Image(shlex.split(given.engine), given.image)
    try:
        print(json.dumps(check(image, shlex.split(given.run_options), shlex.split(given.serve_options))))
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
