from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from prefixwise.bench.kinds.registry import MODELED_KINDS, json_schema
from prefixwise.cli.bench.schema import bench_schema
from tests.cli.conftest import Ran
from tests.cli.verb_runner import run_verb

Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *args: run_verb(bench_schema, capsys, *args)


@pytest.mark.parametrize("kind", MODELED_KINDS, ids=lambda kind: kind.name)
def test_a_schema_is_printed_as_one_object(run: Run, kind: object) -> None:
    (found,) = [each for each in MODELED_KINDS if each is kind]
    ran = run(found.name)
    assert (ran.status, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert json.loads(ran.out) == json_schema(found)
    assert json.loads(ran.out)["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_without_a_name_all_are_listed(run: Run) -> None:
    ran = run()
    names = [kind.name for kind in MODELED_KINDS]
    assert json.loads(ran.out) == {"schemas": names}
    assert [line.split()[0] for line in ran.err.splitlines()] == names


def test_another_name_is_a_usage_error(run: Run) -> None:
    ran = run("matrix")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: no artifact is called 'matrix'; expected one of workload, ")
