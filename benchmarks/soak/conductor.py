"""The run: reference, traffic, one act after the other, a quiet end.

An act is a fault that the server survives, or an end of its process, by a signal or by a fault that is fatal.
Before each fault of the first kind traffic stops, and an idle sample is taken.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.soak.cases import Case, make_cases, with_reference
from benchmarks.soak.recording import Disruption, Recording
from benchmarks.soak.supervisor import FLAGS, MAX_BODY, ServerEndedError, Supervisor
from benchmarks.soak.traffic import Traffic
from benchmarks.soak.wire import Connection, http_request

CHURN = 0.5  # of the time, in which processes end; one process has the rest
DEVICE_FAILED = 70  # exit status: the device cannot recover
END_SECONDS = 180.0  # for a process that must end
_STRIKE_SECONDS = 60.0  # for a fault to find its forward
_IDLE_SECONDS = 60.0  # for what disconnected clients have left
_SAMPLE_SECONDS = 2.0
_LEAST_GAP_SECONDS = 1.0  # of traffic between two acts, where a start takes long

_RESTART = ("503", "lost", "unreachable")

Act = tuple[float, str]  # seconds since traffic began, and what happens then


@dataclass(frozen=True)
class Fault:
    """A fault of the device: the arguments of `FaultyBackend.inject`, and what it excuses."""

    command: dict[str, Any]
    excuses: tuple[str, ...]
    is_fatal: bool = False


FAULTS = {
    "raise": Fault({"kind": "raise"}, ()),
    "raise at start": Fault({"kind": "raise", "at": "start"}, ()),
    "BaseException": Fault({"kind": "exit"}, ()),
    "NaN": Fault({"kind": "nan"}, ("500",)),
    "wrong shape": Fault({"kind": "shape"}, ()),
    "out of memory": Fault({"kind": "out_of_memory"}, ()),
    "sticky error": Fault({"kind": "raise", "times": None}, ("500", *_RESTART), is_fatal=True),
    "hang": Fault({"kind": "hang"}, _RESTART, is_fatal=True),
}
SURVIVED = tuple(name for name, fault in FAULTS.items() if not fault.is_fatal)
ENDS = ("SIGTERM", "sticky error", "SIGKILL", "hang", "damaged model")


def make_plan(seconds: float, seed: int) -> list[Act]:
    """When each act begins. Ends in the first part of the time only, each kind as often as any other."""
    rng = random.Random(seed)
    gap = max(6.0, min(60.0, seconds / 36))
    survived, ends = _in_turn(SURVIVED, rng), _in_turn(ENDS, rng)
    times = [gap * number for number in range(1, int(seconds / gap))]
    return [
        (at, next(ends) if number % 2 and at < CHURN * seconds else next(survived)) for number, at in enumerate(times)
    ]


def _in_turn(names: tuple[str, ...], rng: random.Random) -> itertools.cycle[str]:
    return itertools.cycle(rng.sample(names, len(names)))


class Conductor:
    """One run. Everything that happens goes to the recording."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        recording: Recording,
        report: Callable[[str], None],
        flags: Sequence[str] = FLAGS,
    ) -> None:
        """`flags`: of the server."""
        self._begin = time.monotonic()
        self._recording = recording
        self._report = report
        self._server = Supervisor(folder, model, recording, self._clock, flags)

    def _clock(self) -> float:
        return round(time.monotonic() - self._begin, 4)

    async def run(
        self, seconds: float, *, seed: int, clients: int, pause: float, num_mixed: int, plan: Sequence[Act]
    ) -> None:
        """All of it. Raises ServerEndedError where the server cannot be started."""
        self._report("computing the reference")
        try:
            await self._server.start()
            cases = await self._make_cases(seed, num_mixed)
            self._recording.reference_items = sum(len(case.expected) for case in cases)
            self._traffic = Traffic(self._server.port, cases, self._recording, self._clock, max_body=MAX_BODY)
            async with asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(self._traffic.run(f"{seed}/{n}", pause)) for n in range(clients)]
                started.append(tasks.create_task(self._sample()))
                await self._perform(plan, seconds)
                for task in started:
                    task.cancel()
            await self._end()
        finally:
            self._server.close()
            self._recording.seconds = self._clock()

    async def _perform(self, plan: Sequence[Act], seconds: float) -> None:
        begin = self._clock()
        for at, name in plan:
            await asyncio.sleep(max(_LEAST_GAP_SECONDS, begin + at - self._clock()))
            self._report(f"{self._clock():,.0f} s: {name}; {len(self._recording.exchanges):,} requests so far")
            if name in SURVIVED:
                await self._rest()
            await self._disrupt(name)
        await asyncio.sleep(begin + seconds - self._clock())
        await self._rest(is_last=True)
        await asyncio.sleep(min(60.0, seconds / 20))

    async def _make_cases(self, seed: int, num_mixed: int) -> list[Case]:
        """With their reference, which has no other traffic."""
        connection = Connection(self._server.port)

        async def ask(path: str, body: dict[str, Any]) -> Any:
            status, content = await connection.ask(http_request("POST", path, orjson.dumps(body)))
            if status != 200:
                raise ServerEndedError(f"the reference needs status 200, got {status}: {content[:500]!r}")
            return orjson.loads(content)

        try:
            return await with_reference(make_cases(seed, num_mixed), ask)
        finally:
            await connection.close()

    async def _sample(self) -> None:
        while True:
            await self._server.sample()
            await asyncio.sleep(_SAMPLE_SECONDS)

    async def _rest(self, *, is_last: bool = False) -> None:
        """Stop traffic, wait until the server has nothing to do, take a sample, and go on."""
        await self._traffic.stop()
        until = self._clock() + _IDLE_SECONDS
        while self._clock() < until:
            stats = await self._server.stats()
            if stats is None:
                break
            if not stats["running_requests"] + stats["waiting_requests"] + stats["used_blocks"]:
                break
            await asyncio.sleep(0.1)
        await self._server.sample(is_idle=True)
        if not is_last:
            self._traffic.resume()

    async def _disrupt(self, name: str) -> None:
        """Perform the act, and record what it excuses until the server is well again."""
        fault = FAULTS.get(name)
        begin = self._clock()
        excuses = _RESTART if fault is None else fault.excuses
        disruption = Disruption(name, begin, math.inf, excuses, spares_earlier=name in ("SIGTERM", "damaged model"))
        self._recording.disruptions.append(disruption)
        try:
            if fault is None:
                await self._end_process(disruption)
            else:
                await self._inject(fault, disruption)
        except OSError as error:
            disruption.failure = f"the server took no command: {error}"
        if not self._server.is_running:
            await self._server.start()
            disruption.found += f"; ready again after {self._clock() - begin:.1f} s"
        disruption.end = self._clock()

    async def _end_process(self, disruption: Disruption) -> None:
        """By a signal."""
        number = signal.SIGKILL if disruption.kind == "SIGKILL" else signal.SIGTERM
        self._server.signal(number)
        await self._expect_end(disruption, -number if number == signal.SIGKILL else 0)
        if disruption.kind == "damaged model":
            status, log = await self._server.start_damaged()
            error = next((line for line in log.splitlines() if line.startswith("error: ")), "")
            disruption.found += f"; with a damaged model: status {status}"
            if status != 1 or ".safetensors" not in error:
                disruption.failure = f"expected status 1 and an error that names the file, got {status}: {log}"

    async def _inject(self, fault: Fault, disruption: Disruption) -> None:
        before = self._server.inject()
        self._server.inject(**fault.command)
        if fault.is_fatal:
            await self._expect_end(disruption, DEVICE_FAILED)
            return
        kind, until = fault.command["kind"], self._clock() + _STRIKE_SECONDS
        while self._server.inject().get(kind, 0) == before.get(kind, 0):
            if self._clock() > until:
                disruption.failure = f"no forward was struck within {_STRIKE_SECONDS:g} s"
                break
            await asyncio.sleep(0.05)
        self._server.inject(clear=True)
        try:
            await asyncio.wait_for(self._until_served(), _STRIKE_SECONDS)
            disruption.found = f"struck and served again after {self._clock() - disruption.begin:.1f} s"
        except TimeoutError:
            disruption.failure = f"nothing was scored within {_STRIKE_SECONDS:g} s after the fault"

    async def _until_served(self) -> None:
        """Until a request that began after the fault was answered with status 200."""
        begin = self._clock()
        while not any(each.begin > begin and each.status == 200 for each in self._recording.exchanges[-50:]):
            await asyncio.sleep(0.05)

    async def _expect_end(self, disruption: Disruption, expected: int) -> None:
        status = await self._server.wait_until_ended(END_SECONDS)
        seconds = self._clock() - disruption.begin
        disruption.found = f"exit status {status} after {seconds:.1f} s"
        if status != expected:
            got = f"still running after {seconds:.0f} s" if status is None else f"{status}"
            disruption.failure = f"expected exit status {expected}, got {got}: {self._server.end_of_log()}"
        if status is None:
            self._server.signal(signal.SIGKILL)
            await self._server.wait_until_ended(END_SECONDS)

    async def _end(self) -> None:
        """After a quiet time: what is left, and a shutdown."""
        await self._server.sample(is_idle=True)
        begin = self._clock()
        disruption = Disruption("SIGTERM", begin, begin, _RESTART, spares_earlier=True)
        self._recording.disruptions.append(disruption)
        self._server.signal(signal.SIGTERM)
        await self._expect_end(disruption, 0)
        disruption.end = self._clock()
