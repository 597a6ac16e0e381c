"""The server's process: its checkpoint, its command line, its starts and ends, and what it uses."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from benchmarks.ports import free_port
from benchmarks.soak.launcher import command_faults
from benchmarks.soak.recording import Life, Recording, Sample
from benchmarks.soak.wire import Connection, LostError, UnreachableError, http_request
from prefixwise.bench.processes import end_process
from tests.checkpoints import add_tokenizer, make_hf_checkpoint

START_SECONDS = 300.0  # at most, on a busy machine
_POLL_SECONDS = 0.1
_LOG_LINES = 15  # of a server that failed

# Wide enough that GEMMs would give other bits at other row counts, were they not held to one.
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.05,
    "max_position_embeddings": 4096,
}
PROFILE = """format = 1
name = "soak"
description = "for a model of random weights"
relevance = "softmax"
labels = ["y", "n"]
instruction = "Is it?"

[prompt]
body = ["{instruction} {query}", " Document: {document}"]
after = [" Answer:"]
"""
MAX_BODY = 1 << 20
FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    f"--max-request-bytes={MAX_BODY}",
    "--max-queued-tokens=12000",
    "--prefix-cache-bytes=50000000",  # few enough blocks that prefixes are evicted
    "--shutdown-grace=60",
    "--watchdog-timeout=20",
    "--log-level=warning",
)


class ServerEndedError(Exception):
    """The server ended, or did not become ready; the message has the end of its log."""


def write_model(folder: Path) -> Path:
    """The checkpoint that the server serves, the same every time."""
    return add_tokenizer(make_hf_checkpoint(folder, "qwen3", **MODEL))


class Supervisor:
    """Starts the server, again and again, always on the same port."""

    def __init__(
        self, folder: Path, model: Path, recording: Recording, clock: Callable[[], float], flags: Sequence[str]
    ) -> None:
        """`folder`: for logs, sockets and a damaged copy of the model."""
        self.port = free_port()
        self._folder = folder
        self._model = model
        self._recording = recording
        self._clock = clock
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "profile.toml").write_text(PROFILE, encoding="utf-8")

    @property
    def life(self) -> Life:
        """The newest process."""
        return self._recording.lives[-1]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Return when the server is ready. Raises ServerEndedError."""
        number = len(self._recording.lives) + 1
        self._recording.lives.append(Life(number, self._clock()))
        self._process = self._spawn(self._model, self._log(number))
        until = self._clock() + START_SECONDS
        while await self._health() != 200:
            if not self.is_running or self._clock() > until:
                raise ServerEndedError(f"the server is not ready: {self.end_of_log()}")
            await asyncio.sleep(_POLL_SECONDS)
        self.life.ready = self._clock()

    async def start_damaged(self) -> tuple[int, str]:
        """Start with a checkpoint that lacks its last bytes: the exit status, and the log."""
        damaged, log = self._folder / "damaged", self._folder / "damaged.log"
        damaged.mkdir(exist_ok=True)
        for file in self._model.iterdir():
            content = file.read_bytes()
            (damaged / file.name).write_bytes(content[:-1000] if file.suffix == ".safetensors" else content)
        process = self._spawn(damaged, log)
        try:
            status = await asyncio.to_thread(process.wait, START_SECONDS)
        finally:
            end_process(process)
        return status, log.read_text(encoding="utf-8", errors="replace").strip()

    async def wait_until_ended(self, seconds: float) -> int | None:
        """Its exit status; None where it still runs then."""
        assert self._process is not None
        try:
            status = await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return None
        self.life.end, self.life.status = self._clock(), status
        return status

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def inject(self, **command: Any) -> dict[str, int]:
        """Pass a command to the faults of the running server. Raises OSError."""
        return command_faults(str(self._socket(self.life.number)), command)

    async def stats(self) -> dict[str, Any] | None:
        """The engine's statistics; None where it does not answer."""
        try:
            status, body = await asyncio.wait_for(
                Connection(self.port).ask(http_request("GET", "/server_info", headers={"Connection": "close"})), 10
            )
        except (UnreachableError, LostError, TimeoutError):
            return None
        found: dict[str, Any] | None = orjson.loads(body).get("stats") if status == 200 else None
        return found

    async def sample(self, *, is_idle: bool = False) -> Sample | None:
        """What the process uses now; None where there is none."""
        stats = await self.stats() or {}
        try:
            usage = usage_of(self._process.pid if self._process is not None else 0)
        except OSError:
            return None
        used, pinned = stats.get("used_blocks", -1), stats.get("pinned_blocks", -1)
        requests = stats["running_requests"] + stats["waiting_requests"] if stats else -1
        found = Sample(self._clock(), self.life.number, *usage, used, pinned, requests, is_idle)
        self._recording.samples.append(found)
        return found

    def end_of_log(self) -> str:
        """The last lines of the newest process."""
        text = self._log(self.life.number).read_text(encoding="utf-8", errors="replace")
        return " / ".join(text.strip().splitlines()[-_LOG_LINES:])

    def close(self) -> None:
        """Leave no process behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _spawn(self, model: Path, log: Path) -> subprocess.Popen[bytes]:
        number = len(self._recording.lives)
        command = [
            *(sys.executable, "-m", "benchmarks.soak.launcher", str(self._socket(number))),
            *("serve", f"--port={self.port}", f"--model-path={model}"),
            f"--profile={self._folder / 'profile.toml'}",
            *self._flags,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        environment.pop("PREFIXWISE_API_KEY", None)
        with log.open("wb") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def _log(self, number: int) -> Path:
        return self._folder / f"server-{number}.log"

    def _socket(self, number: int) -> Path:
        return self._folder / f"faults-{number}"

    async def _health(self) -> int:
        try:
            request = http_request("GET", "/health", headers={"Connection": "close"})
            return (await asyncio.wait_for(Connection(self.port).ask(request), 10))[0]
        except (UnreachableError, LostError, TimeoutError):
            return 0


def usage_of(process_id: int) -> tuple[int, int, int, float]:
    """Resident bytes, open files, threads, and processor seconds of a process. Raises OSError where it has ended."""
    folder = Path(f"/proc/{process_id}")
    facts = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    if "VmRSS" not in facts:
        raise ProcessLookupError(f"{process_id} has ended")
    times = (folder / "stat").read_text().rpartition(")")[2].split()
    cpu_seconds = (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    num_files = sum(1 for _ in (folder / "fd").iterdir())
    return int(facts["VmRSS"].split()[0]) * 1024, num_files, int(facts["Threads"]), cpu_seconds
