"""`FaultyBackend`: a backend around another one that fails when it is told to, at run time and from any thread.

faults = FaultyBackend(FakeBackend())
faults.inject("raise")                              the next forward raises
faults.inject("raise", times=None)                  every forward from now on: a sticky device error
faults.inject("hang")                               the next forward does not end before `release()`
faults.inject("shape", when=lambda batch: ...)      of the forwards that the test chooses
faults.inject("out_of_memory", above=1024)          every forward of more than 1,024 tokens, until `clear()`
faults.clear()                                      the device is well again
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from prefixwise.forward.backend import Backend, Program
from prefixwise.forward.batch import ForwardBatch, ForwardOutput, RunningForward

# raise           RuntimeError while the forward starts, or (`at="wait"`) while its outputs are waited for
# exit            SystemExit, which is no Exception, at the same places
# out_of_memory   MemoryError
# hang            the forward does not end before `release` or `clear`
# shape           one row of logits, or none where one was asked for
# dtype           logits of float64
# nan             logits that are NaN
Kind = Literal["raise", "exit", "out_of_memory", "hang", "shape", "dtype", "nan"]
Place = Literal["start", "wait"]
Chooses = Callable[[ForwardBatch], bool]

SECRET = "secret of the device"  # in every message; must not leave a server


@dataclass(eq=False)
class Fault:
    """A fault that waits for its forwards."""

    kind: Kind
    times: int | None = 1  # how many forwards it strikes; None: all, until `clear`
    at: Place = "wait"
    above: int = 0  # it strikes forwards of more tokens than this
    when: Chooses = lambda batch: True

    def strikes(self, batch: ForwardBatch) -> bool:
        needs_rows = self.kind in ("shape", "dtype", "nan") and not len(batch.score_tokens)
        return batch.num_tokens > self.above and not needs_rows and self.when(batch)


class FaultyBackend(Backend):
    """Passes everything on to `backend`, except for forwards that a fault strikes. One fault strikes a forward."""

    def __init__(self, backend: Backend, plan: Sequence[Fault] = ()) -> None:
        self.backend = backend
        self.config, self.info = backend.config, backend.info
        self.struck: Counter[Kind] = Counter()  # forwards, by the fault that struck them
        self.hangs = threading.Event()  # set while a forward hangs
        self._faults = list(plan)
        self._lock = threading.Lock()
        self._released = threading.Event()

    # For tests and programs, on any thread

    def inject(
        self, kind: Kind, *, times: int | None = 1, at: Place = "wait", above: int = 0, when: Chooses | None = None
    ) -> Fault:
        """Strike the next forwards. Out of memory above a number of tokens lasts until `clear`."""
        assert kind in get_args(Kind), kind
        if kind == "out_of_memory" and above:
            times = None
        fault = Fault(kind, times, at, above)
        if when is not None:
            fault.when = when
        with self._lock:
            self._faults.append(fault)
        return fault

    def release(self) -> None:
        """End the forwards that hang now. They give their outputs."""
        with self._lock:
            self._released.set()
            self._released = threading.Event()

    def clear(self) -> None:
        """No more faults, and nothing hangs."""
        with self._lock:
            self._faults.clear()
        self.release()

    # The backend

    def start(self, batch: ForwardBatch) -> RunningForward:
        fault = self._next(batch)
        if fault is not None and fault.at == "start":
            self._strike(fault.kind)
        running = self.backend.start(batch)
        if fault is None:
            return running

        def wait() -> ForwardOutput:
            output = running.wait()
            if fault.at == "wait":
                self._strike(fault.kind)
            return _falsified(fault.kind, output)

        return replace(running, wait=wait)

    def programs(self, *, max_dense_len: int, has_sequences: bool = True) -> Sequence[Program]:
        return self.backend.programs(max_dense_len=max_dense_len, has_sequences=has_sequences)

    def synchronize(self) -> None:
        self.backend.synchronize()

    def memory_stats(self) -> Mapping[str, int]:
        return self.backend.memory_stats()

    @property
    def num_compilations(self) -> int:
        return self.backend.num_compilations

    @property
    def is_compiling(self) -> bool:
        return self.backend.is_compiling

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self.backend.is_out_of_memory(error)

    def close(self) -> None:
        self.clear()
        self.backend.close()

    def _next(self, batch: ForwardBatch) -> Fault | None:
        """The fault that strikes this forward."""
        with self._lock:
            fault = next((each for each in self._faults if each.strikes(batch)), None)
            if fault is None:
                return None
            self.struck[fault.kind] += 1
            if fault.times is not None:
                fault.times -= 1
                if not fault.times:
                    self._faults.remove(fault)
            return fault

    def _strike(self, kind: Kind) -> None:
        if kind == "raise":
            raise RuntimeError(SECRET)
        if kind == "exit":
            raise SystemExit(SECRET)
        if kind == "out_of_memory":
            raise MemoryError(SECRET)
        if kind == "hang":
            with self._lock:
                released = self._released
            self.hangs.set()
            released.wait()
            self.hangs.clear()


def _falsified(kind: Kind, output: ForwardOutput) -> ForwardOutput:
    logits = output.label_logits
    if kind == "shape":
        return replace(output, label_logits=logits[: int(len(logits) > 1)])
    if kind == "dtype":
        return replace(output, label_logits=logits.astype(np.float64))
    if kind == "nan":
        return replace(output, label_logits=np.full_like(logits, np.nan))
    return output
