"""The host: the same answers from /proc and, where there is none, from the portable ways."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from prefixwise import host
from prefixwise.host import (
    cpu_features,
    cpu_name,
    has_accelerator,
    install_command,
    num_cores,
    num_open_files,
    peak_memory_bytes,
    process_start,
    raise_file_limit,
    replacing,
    this_boot,
)
from tests.bench.test_processes import is_running, wait_for

NEOVERSE = """processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes asimdhp cpuid asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd0c
"""
XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor @ 2.50GHz\nflags\t\t: fpu amx_bf16 avx512_bf16\n"

# A parent that starts a child, which ends with it; `{proc}` is where the child looks for /proc.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, signal
from pathlib import Path
from prefixwise import host
host.PROC = Path("{proc}")
host.end_with_parent(os.getppid())
print("watching", flush=True)
signal.pause()
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture(params=["/proc", "portable"])
def proc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = Path("/proc") if request.param == "/proc" else tmp_path / "none"
    monkeypatch.setattr(host, "PROC", path)
    yield path


def cpuinfo(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "cpuinfo").write_text(text, encoding="utf-8")
    monkeypatch.setattr(host, "PROC", folder)


def test_the_processor_has_a_name(proc: Path) -> None:
    assert cpu_name()


def test_a_xeon_is_named_by_its_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo(monkeypatch, tmp_path, XEON)
    assert cpu_name() == "Intel(R) Xeon(R) Processor @ 2.50GHz"
    assert cpu_features() == {"fpu", "amx_bf16", "avx512_bf16"}


@pytest.mark.parametrize("lscpu", ["Architecture: aarch64\nModel name:  Neoverse-N1\n", ""])
def test_an_arm_processor_is_named_by_lscpu_or_by_its_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lscpu: str
) -> None:
    cpuinfo(monkeypatch, tmp_path, NEOVERSE)
    monkeypatch.setattr(host, "_output", lambda *command: lscpu if command == ("lscpu",) else "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_name() == ("Neoverse-N1" if lscpu else "aarch64 implementer 0x41 part 0xd0c")
    assert {"asimdhp", "asimddp"} <= cpu_features()


def test_a_program_that_is_not_there_says_nothing() -> None:
    assert host._output("prefixwise-has-no-such-program") == ""


def test_a_process_is_known_by_its_start(proc: Path) -> None:
    own = process_start(os.getpid())
    assert own is not None and own == process_start(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        assert process_start(child.pid) is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_start(child.pid) is None, "a zombie"
    assert process_start(child.pid) is None


def test_this_boot_is_one(proc: Path) -> None:
    assert this_boot() == this_boot() != ""


def test_memory_is_counted_in_bytes() -> None:
    assert peak_memory_bytes() > 10 << 20


@pytest.mark.parametrize("proc_path", ["/proc", "/nowhere"])
def test_a_child_ends_with_its_parent(proc_path: str) -> None:
    code = PARENT.replace("{proc}", proc_path)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: None if is_running(child) else 1)


class TestReplacing:
    def test_a_file_has_its_name_only_when_it_is_complete(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "file"
        with replacing(path) as temporary:
            temporary.write_text("content", encoding="utf-8")
            assert temporary.parent == path.parent
            assert not path.exists()
        assert path.read_text(encoding="utf-8") == "content"
        assert list(path.parent.iterdir()) == [path]

    def test_a_failure_leaves_the_old_file_and_nothing_else(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_text("old", encoding="utf-8")
        with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
            temporary.write_text("new", encoding="utf-8")
            raise KeyboardInterrupt
        assert path.read_text(encoding="utf-8") == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_the_temporary_file_may_be_in_another_folder(self, tmp_path: Path) -> None:
        with replacing(tmp_path / "file", tmp_path / "work") as temporary:
            temporary.write_bytes(b"x")
            assert temporary.parent == tmp_path / "work"
        assert (tmp_path / "file").read_bytes() == b"x"
        assert list((tmp_path / "work").iterdir()) == []


class TestInstallCommand:
    REQUIREMENTS = (
        "numpy>=1.26",
        'starlette>=0.46; extra == "server"',
        "uvloop>=0.21; sys_platform != \"win32\" and extra == 'server'",
        'pyarrow>=17; extra == "batch"',
        'prefixwise[batch]; extra == "cluster"',
        'ray[data,serve]>=2.55; extra == "cluster"',
    )

    @pytest.mark.parametrize(
        ("extra", "packages"),
        [
            ("server", """"starlette>=0.46" "uvloop>=0.21; sys_platform != 'win32'\""""),
            ("cluster", '"pyarrow>=17" "ray[data,serve]>=2.55"'),
        ],
    )
    def test_it_names_the_packages_of_an_extra(
        self, monkeypatch: pytest.MonkeyPatch, extra: str, packages: str
    ) -> None:
        monkeypatch.setattr("importlib.metadata.requires", lambda name: list(self.REQUIREMENTS))
        assert install_command(extra) == f"pip install {packages}"

    @pytest.mark.parametrize("extra", ["torch", "jax", "server", "harness", "batch", "cluster", "tpu-aot"])
    def test_it_never_asks_an_index_for_us(self, extra: str) -> None:
        command = install_command(extra)
        assert command.startswith('pip install "') and "prefixwise" not in command

    def test_a_checkout_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def requires(name: str) -> list[str]:
            raise PackageNotFoundError(name)

        monkeypatch.setattr("importlib.metadata.requires", requires)
        assert install_command("server") == 'pip install -e ".[server]", in the checkout'


class TestFiles:
    @pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
    def test_open_files_are_counted(self, monkeypatch: pytest.MonkeyPatch, proc: str) -> None:
        monkeypatch.setattr(host, "PROC", Path(proc))
        before = num_open_files()
        with Path(os.devnull).open("rb"), Path(os.devnull).open("rb"):
            assert num_open_files() == before + 2

    @pytest.mark.parametrize(
        ("limits", "wanted", "allowed"),
        [
            ((1024, 4096), 2000, 2000),
            ((1024, 4096), 5000, 4096),
            ((1024, resource.RLIM_INFINITY), 5000, 5000),
            ((1024, 1024), 5000, 1024),
            ((4096, 4096), 2000, 4096),
            ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2000, 2000),
        ],
    )
    def test_their_limit_is_raised_as_far_as_the_host_allows(
        self, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, allowed: int
    ) -> None:
        now = {resource.RLIMIT_NOFILE: limits}
        monkeypatch.setattr(resource, "getrlimit", now.__getitem__)
        monkeypatch.setattr(resource, "setrlimit", now.__setitem__)
        assert raise_file_limit(wanted) == allowed
        assert now[resource.RLIMIT_NOFILE] in (limits, (allowed, limits[1]))


def test_the_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 7}, raising=False)
    assert num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert num_cores() == 6


@pytest.mark.parametrize(
    ("file", "environment", "expected"),
    [
        ("nvidia0", {}, True),
        ("accel3", {}, True),
        ("vfio/0", {}, True),
        ("nvidiactl", {}, False),  # of the driver, also without a device
        ("vfio/vfio", {}, False),
        ("nvidia0", {"CUDA_VISIBLE_DEVICES": ""}, False),
        ("nvidia0", {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("nvidia0", {"CUDA_VISIBLE_DEVICES": "1"}, True),
        ("nvidia0", {"JAX_PLATFORMS": "cpu"}, False),
    ],
)
def test_an_accelerator_has_a_device_file_and_is_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, environment: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(host, "DEVICES", tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert has_accelerator() is expected
