"""No test of the engine leaves a scheduler or its device's thread behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("itemwise-")]
    assert left == [], "close the engine"
