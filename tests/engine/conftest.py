"""No test of the engine leaves a scheduler or its device's thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())  # scorers that tests of other rooms share stay for the whole run
    yield
    left = [
        thread for thread in threading.enumerate() if thread.name.startswith("prefixwise-") and thread not in before
    ]
    assert left == [], "close the engine"
