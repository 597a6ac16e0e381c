"""One client process of several: `python -m prefixwise.bench.run.load_worker`, started by `load_processes`.

It gets messages through stdin and answers through stdout: a line of JSON, and behind it the float64 numbers that the
line announces. First what to send to whom, then for every phase its share, the moment when the phase begins, and
perhaps a word to stop. Stdin is its lifeline: it ends when that closes. An exception ends it with its traceback and a
status.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from prefixwise.bench.geometry import RequestMaker
from prefixwise.bench.kinds.load import LoadGeometry
from prefixwise.bench.run.load_driver import LoadDriver, LoadTarget, PhaseLength, Schedule, fine_event_loop
from prefixwise.bench.run.load_stats import Call, ClientUse

_NUMBERS = "num_numbers"
_LINE_BYTES = 1 << 20  # the longest

_NOTHING = ClientUse([], 0.0, 0.0)


class Message(NamedTuple):
    """Fields by name, and numbers."""

    fields: dict[str, Any]
    numbers: tuple[float, ...] = ()

    def encode(self) -> bytes:
        line = json.dumps({**self.fields, _NUMBERS: len(self.numbers)}) + "\n"
        return line.encode() + np.array(self.numbers, np.float64).tobytes()


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """None where the other side has closed."""
    try:
        fields = json.loads(await reader.readuntil(b"\n"))
        numbers = np.frombuffer(await reader.readexactly(8 * fields.pop(_NUMBERS)), np.float64)
    except asyncio.IncompleteReadError:
        return None
    return Message(fields, tuple(numbers.tolist()))


def settings_message(target: LoadTarget, maker: RequestMaker) -> Message:
    """The first message to a client process: the server, and what makes its requests."""
    geometry = maker.geometry.model_dump()
    made_of = {"geometry": geometry, "seed": maker.seed, "delimiter": maker.delimiter}
    return Message({"target": asdict(target), "maker": made_of})


def report_message(use: ClientUse) -> Message:
    """What it did in a phase."""
    failures = sorted({call.failure for call in use.calls if call.failure is not None})
    places = {failure: place for place, failure in enumerate(failures)}
    rows = [(*call[:3], places[call.failure] if call.failure is not None else -1) for call in use.calls]
    fields = {"failures": failures, "cpu_sec": use.cpu_sec, "wall_sec": use.wall_sec}
    return Message(fields, tuple(number for row in rows for number in row))


def read_report(message: Message) -> ClientUse:
    """The same on the other side."""
    failures: list[str | None] = [*message.fields["failures"], None]  # None is at -1
    rows = zip(*(message.numbers[column::4] for column in range(4)), strict=True)
    calls = [Call(intended, sent, done, failures[int(place)]) for intended, sent, done, place in rows]
    return ClientUse(calls, message.fields["cpu_sec"], message.fields["wall_sec"])


class _ParentGoneError(Exception):
    """Nobody waits for the phase any more."""


class _Worker:
    """Runs the phases that it is told to."""

    def __init__(self, driver: LoadDriver, messages: asyncio.Queue[Message | None]) -> None:
        self._driver = driver
        self._messages = messages

    async def run(self) -> None:
        """Until stdin closes. Raises _ParentGoneError where that is within a phase."""
        while (message := await self._messages.get()) is not None:
            if "stop" not in message.fields:  # that one came too late: the phase was over
                await self._run_phase(message)

    async def _run_phase(self, order: Message) -> None:
        _answer(Message({"is_prepared": True}))
        start = await self._next_message()
        if "stop" in start.fields:
            _answer(report_message(_NOTHING))
            return
        phase = asyncio.create_task(self._send(order, start.fields["begin"]))
        interrupt = asyncio.create_task(self._next_message())
        await asyncio.wait({phase, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        for task in (phase, interrupt):
            task.cancel()
        outcome, stop = await asyncio.gather(phase, interrupt, return_exceptions=True)
        for each in (outcome, stop):
            if isinstance(each, Exception):
                raise each
        _answer(report_message(self._use(outcome)))

    def _use(self, outcome: list[Call] | BaseException) -> ClientUse:
        """With the calls in the order of the schedule; of a phase that was stopped, in the order of their ends."""
        (use,) = self._driver.clients or [_NOTHING]
        return replace(use, calls=outcome) if isinstance(outcome, list) else use

    async def _next_message(self) -> Message:
        message = await self._messages.get()
        if message is None:
            raise _ParentGoneError
        return message

    async def _send(self, order: Message, begin: float) -> list[Call]:
        fields = order.fields
        self._driver.numbers = count(fields["first"], fields["step"])
        if fields["mode"] == "open":
            return await self._driver.run_open(Schedule(order.numbers, 0.0), begin)
        length = PhaseLength(fields["seconds"], fields["requests"])
        return await self._driver.run_closed(fields["concurrency"], length, begin)


def _answer(message: Message) -> None:
    sys.stdout.buffer.write(message.encode())
    sys.stdout.buffer.flush()


async def _read_stdin(messages: asyncio.Queue[Message | None]) -> None:
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    message: Message | None = Message({})
    while message is not None:
        message = await read_message(reader)
        messages.put_nowait(message)


async def _work() -> None:
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    reading = asyncio.create_task(_read_stdin(messages))
    settings = await messages.get()
    if settings is not None:
        made_of = settings.fields["maker"]
        maker = RequestMaker(LoadGeometry(**made_of["geometry"]), made_of["seed"], delimiter=made_of["delimiter"])
        async with LoadDriver(LoadTarget(**settings.fields["target"]), maker) as driver:
            _answer(Message({"clock": perf_counter()}))
            await _Worker(driver, messages).run()
    await reading


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=fine_event_loop) as runner:
        try:
            runner.run(_work())
        except (_ParentGoneError, BrokenPipeError):
            sys.exit(1)
