"""Where no hosts can be made, every test of them is skipped, with the reason."""

from __future__ import annotations

import pytest

from tests.hosts.network import reason_not_allowed


@pytest.fixture(autouse=True, scope="package")
def allowed() -> None:
    reason = reason_not_allowed()
    if reason is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
