"""Batch jobs on a real S3 server (moto's, behind a proxy that fails on demand): the bytes of a local job, multipart
uploads, retries, and nothing half-written after a failure or a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import pytest

from prefixwise.batch import storage
from prefixwise.batch.job import BatchJob, JobFiles
from prefixwise.contract.errors import BatchError
from prefixwise.engine.engine import ScoringEngine
from tests.batch.flaky_proxy import Fault, FlakyProxy, flaky_proxy
from tests.batch.inputs import rows, write_jsonl
from tests.batch.test_job import BAD, FRESH, RESUME, run, score, started

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

PART_BYTES = 5 * 2**20  # the least that S3 takes
CONTENT = bytes(range(256)) * (11 * 2**20 // 256)  # three parts, the last one smaller


@pytest.fixture(scope="module")
def store() -> Iterator[FlakyProxy]:
    """An S3 server, and the settings by which fsspec finds it. Processes that a test starts have them, too."""
    import fsspec.config

    patch = pytest.MonkeyPatch()
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    with flaky_proxy(port) as proxy:
        for name, value in (("ACCESS_KEY_ID", "k"), ("SECRET_ACCESS_KEY", "s"), ("DEFAULT_REGION", "us-east-1")):
            patch.setenv(f"AWS_{name}", value)
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # each more waits longer
        patch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        patch.setenv("FSSPEC_S3", f'{{"default_block_size": {PART_BYTES}}}')
        patch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART_BYTES})
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
    patch.undo()


@pytest.fixture
def bucket(store: FlakyProxy) -> Iterator[str]:
    name = f"b-{uuid4().hex[:8]}"
    system = s3fs.S3FileSystem()
    system.mkdir(name)
    yield f"s3://{name}"
    store.plan = lambda method, path: None
    assert pending(f"s3://{name}") == []


def pending(bucket: str) -> list[str]:
    """Keys of uploads that are neither completed nor aborted."""
    listed = s3fs.S3FileSystem().list_multipart_uploads(bucket.removeprefix("s3://"))
    return [each["Key"] for each in listed]


def write_all(file: IO[bytes]) -> None:
    """As a job does: in small pieces."""
    for begin in range(0, len(CONTENT), 2**20):
        file.write(CONTENT[begin : begin + 2**20])


def keys(bucket: str) -> list[str]:
    system = s3fs.S3FileSystem()
    system.invalidate_cache()
    return [each.partition("/")[2] for each in system.find(bucket)]


def failing_first(proxy: FlakyProxy, fault: Fault, method: str, part: str, times: int) -> None:
    """The first requests like this fail."""
    number = count()
    proxy.faults.clear()
    proxy.plan = lambda sent, path: fault if sent == method and part in path and next(number) < times else None


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_job_on_s3_writes_the_bytes_of_a_job_on_this_machine(
    bucket: str, tmp_path: Path, engine: ScoringEngine, name: str
) -> None:
    bodies: list[dict[str, Any]] = rows(22)
    bodies[5] = BAD
    (tmp_path / "in").mkdir()
    for number in range(2):
        path = write_jsonl(tmp_path / "in" / f"{number}.jsonl", bodies[number * 11 : number * 11 + 11])
        storage.write_file(f"{bucket}/in/{number}.jsonl", path.read_bytes())
    local = JobFiles(str(tmp_path / "in"), str(tmp_path / name))
    remote = JobFiles(f"{bucket}/in", f"{bucket}/{name}")
    assert run(local, engine) == run(remote, engine)
    for suffix in ("", ".errors.jsonl"):
        assert storage.read_bytes(remote.output + suffix) == Path(local.output + suffix).read_bytes()
    assert keys(bucket) == ["in/0.jsonl", "in/1.jsonl", name, f"{name}.errors.jsonl", f"{name}.job.json"]


def test_a_large_file_is_a_multipart_upload_that_nobody_sees_until_it_is_complete(bucket: str) -> None:
    url = f"{bucket}/large.bin"
    with storage.writing(url, f"{bucket}/work") as file:
        write_all(file)
        assert keys(bucket) == [] and pending(bucket) == ["large.bin"]
    assert storage.read_bytes(url) == CONTENT
    assert '-3\\"' in storage.find_file(url).version  # an ETag of three parts
    assert keys(bucket) == ["large.bin"]


def test_an_empty_file_is_one(bucket: str) -> None:
    with storage.writing(f"{bucket}/empty"):
        pass
    assert storage.read_bytes(f"{bucket}/empty") == b"" and keys(bucket) == ["empty"]


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_what_the_store_did_not_take_is_sent_again(store: FlakyProxy, bucket: str, fault: Fault) -> None:
    url = f"{bucket}/large.bin"
    failing_first(store, fault, "PUT", "partNumber=2", 1)
    with storage.writing(url) as file:
        write_all(file)
    assert store.faults == [fault]
    failing_first(store, fault, "PUT", "small", 1)
    storage.write_file(f"{bucket}/small", b"small")
    assert store.faults == [fault]
    failing_first(store, "half" if fault == "cut" else fault, "GET", "large.bin", 1)
    with storage.open_file(url) as opened:
        assert opened.read() == CONTENT
    assert len(store.faults) == 1
    assert storage.read_bytes(f"{bucket}/small") == b"small"


def test_an_upload_that_breaks_leaves_the_old_file_and_no_parts(store: FlakyProxy, bucket: str) -> None:
    url = f"{bucket}/large.bin"
    storage.write_file(url, b"old")
    failing_first(store, "500", "PUT", "partNumber=2", 1000)
    with pytest.raises(BatchError, match=r"s3://b-\w+/large\.bin: .*We broke"), storage.writing(url) as file:
        write_all(file)
    assert len(store.faults) > 1
    store.plan = lambda method, path: None
    with pytest.raises(KeyboardInterrupt), storage.writing(url) as file:
        write_all(file)
        raise KeyboardInterrupt
    assert storage.read_bytes(url) == b"old" and keys(bucket) == ["large.bin"]


def test_a_killed_upload_is_not_seen_and_the_next_run_aborts_it_and_goes_on(
    bucket: str, tmp_path: Path, engine: ScoringEngine
) -> None:
    files = JobFiles(str(write_jsonl(tmp_path / "in.jsonl", rows(22))), f"{bucket}/out.jsonl")
    list(score(started(files), engine))  # all parts are there, the output is not
    code = (
        "import os, signal, sys\nfrom prefixwise.batch.storage import writing\n"
        "with writing(sys.argv[1]) as file:\n"
        f"    file.write(bytes({2 * PART_BYTES + 1}))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, files.output], env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    assert pending(bucket) == ["out.jsonl"] and not storage.exists(files.output)
    again = started(files, RESUME)
    assert isinstance(again, BatchJob) and again.missing == []
    totals = again.finish()
    local = replace(files, output=str(tmp_path / "out.jsonl"))
    assert totals == run(local, engine, FRESH)
    assert storage.read_bytes(files.output) == Path(local.output).read_bytes()


def test_a_store_that_is_away_is_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(BatchError, match=r"s3://b/in\.jsonl: .*127\.0\.0\.1:9"):
        storage.find_files("s3://b/in.jsonl")
    s3fs.S3FileSystem.clear_instance_cache()
