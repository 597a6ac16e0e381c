"""Fixtures of the server's room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.app_client import AppClient, app_client


@pytest.fixture(scope="module")
def client() -> Iterator[AppClient]:
    """A ready server on the fake backend, without tokenizer, key or limits of its own."""
    with app_client() as made:
        yield made
