from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixwise.engine.engine import ScoringEngine
from tests.cli.fake_program import fake_engine


@pytest.fixture(scope="package")
def engine() -> Iterator[ScoringEngine]:
    made = fake_engine()
    yield made
    made.close()
