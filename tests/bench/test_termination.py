"""Signals as exceptions, and the few lines in which they wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from prefixwise.bench.termination import ended_by_signals, undisturbed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exit_with_the_usual_status_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as exited, ended_by_signals():
        os.kill(os.getpid(), number)
        signal.pause()
    assert exited.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(SystemExit) as exited, ended_by_signals():
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("all of the block")
        done.append("nothing after it")
    assert (exited.value.code, done) == (143, ["all of the block"])


def test_ctrl_c_waits_too_and_a_child_is_not_deaf() -> None:
    with pytest.raises(KeyboardInterrupt), undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM
