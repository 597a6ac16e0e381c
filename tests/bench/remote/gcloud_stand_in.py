"""A `gcloud` first on PATH that writes down how it was called, and answers as configured.

Without a configured answer it runs on this machine: `ssh` runs the command with a home of its own, `scp` copies,
the rest says nothing. Error texts are those that gcloud prints.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = """#!{python} -IS
import json, os, shutil, subprocess, sys

folder, arguments = {folder!r}, sys.argv[1:]
with open(folder + "/calls", "a") as calls:
    print(json.dumps(arguments), file=calls)
verb = next(word for word in arguments if word in ("ssh", "scp", "create", "describe", "delete"))
with open(folder + "/answers") as file:
    answers = json.load(file)
answer = answers[verb].pop(0) if answers.get(verb) else {{}}
with open(folder + "/answers", "w") as file:
    json.dump(answers, file)
home = folder + "/home"

def place(path):
    return os.path.join(home, path.split(":", 1)[1]) if path.startswith("{instance}:") else path

def ssh():
    line = next(word for word in arguments if word.startswith("--command="))[len("--command="):]
    return subprocess.run(["sh", "-c", line], env={{**os.environ, "HOME": home}}).returncode

sys.stdout.write(answer.get("output", ""))
sys.stderr.write(answer.get("stderr", ""))
status = answer.get("status", 0)
if verb == "ssh" and answer.get("cut"):  # in mid-run, after which gcloud runs it again
    ssh()
    print("Retrying: SSH command error: [/usr/bin/ssh] exited with return code [255].", file=sys.stderr)
    status = ssh()
elif verb == "ssh" and not answer:
    status = ssh()
elif verb == "scp" and not answer:
    source, destination = map(place, [word for word in arguments[arguments.index("scp") + 1:] if word[:2] != "--"])
    if not os.path.exists(source):
        print("scp: " + source + ": No such file or directory", file=sys.stderr)
        print("ERROR: (gcloud.scp) [/usr/bin/scp] exited with return code [1].", file=sys.stderr)
        sys.exit(1)
    if os.path.isdir(destination):
        destination = os.path.join(destination, os.path.basename(source))
    (shutil.copytree if os.path.isdir(source) else shutil.copyfile)(source, destination)
sys.exit(status)
"""

REFUSED = """ssh: connect to host 203.0.113.7 port 22: Connection refused

Recommendation: To check for possible causes of SSH connectivity issues and get
recommendations, rerun the ssh command with the --troubleshoot option.

gcloud compute ssh vm --project=p --zone=z --troubleshoot

ERROR: (gcloud.compute.ssh) [/usr/bin/ssh] exited with return code [255].
"""
TPU_MISSING = """ERROR: (gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Resource \
'projects/p/locations/z/nodes/vm' was not found. This command is authenticated as me@example.com
- '@type': type.googleapis.com/google.rpc.ResourceInfo
"""
GPU_MISSING = """ERROR: (gcloud.compute.instances.describe) Could not fetch resource:
 - The resource 'projects/p/zones/z/instances/vm' was not found

"""
DENIED = """ERROR: (gcloud.compute.instances.describe) Could not fetch resource:
 - Required 'compute.instances.get' permission for 'projects/p/zones/z/instances/vm'

"""
NO_QUOTA = """ERROR: (gcloud.compute.instances.create) Could not fetch resource:
 - Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.

"""
NO_KEY_YET = """Waiting for SSH key to propagate.
ERROR: (gcloud.compute.ssh) Could not SSH into the instance.  It is possible that your SSH key has not propagated.
"""


@dataclass(frozen=True)
class StandIn:
    """One that is on PATH."""

    folder: Path

    @property
    def home(self) -> Path:
        """Of the machine that it plays."""
        return self.folder / "home"

    @property
    def calls(self) -> list[list[str]]:
        """Arguments, in the order in which they came."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        return [next(word for word in call if word in _VERBS) for call in self.calls]

    def answer(self, verb: str, *answers: dict[str, Any]) -> None:
        """The next calls of this verb, in turn: status, output, stderr; or cut."""
        path = self.folder / "answers"
        path.write_text(json.dumps({**json.loads(path.read_text()), verb: list(answers)}))


_VERBS = ("ssh", "scp", "create", "describe", "delete")


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, instance: str = "vm") -> StandIn:
    """On PATH until the test ends."""
    (folder / "bin").mkdir(parents=True)
    (folder / "home").mkdir()
    (folder / "answers").write_text("{}")
    program = folder / "bin" / "gcloud"
    program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder), instance=instance))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    return StandIn(folder)
