from __future__ import annotations

import pytest

from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.choose import default_target, open_target
from prefixwise.bench.remote.targets.gcloud import GcloudGpuTarget, GcloudTpuTarget
from prefixwise.bench.remote.targets.local import LocalTarget
from prefixwise.bench.remote.targets.ssh import SshTarget

ENVIRONMENT = {
    "PROJECT": "my-project",
    "TPU_NAME": "mi-tpu-v6e1",
    "TPU_ZONE": "us-east5-b",
    "GPU_NAME": "mi-g4",
    "GPU_ZONE": "us-east5-c",
}


def test_local_and_ssh_need_no_environment() -> None:
    assert isinstance(open_target("local", {}), LocalTarget)
    assert open_target("ssh://me@host:2222", {}) == SshTarget("host", "me", 2222)


def test_each_kind_of_gcloud_takes_its_own_zone() -> None:
    assert open_target("gcloud-tpu://a", ENVIRONMENT) == GcloudTpuTarget("a", "my-project", "us-east5-b")
    assert open_target("gcloud-gpu://a", ENVIRONMENT) == GcloudGpuTarget("a", "my-project", "us-east5-c")


@pytest.mark.parametrize(
    ("text", "name"), [("gcloud-tpu://", "gcloud-tpu://mi-tpu-v6e1"), ("gcloud-gpu://", "gcloud-gpu://mi-g4")]
)
def test_an_empty_name_is_the_environments(text: str, name: str) -> None:
    assert open_target(text, ENVIRONMENT).name == name


def test_parameters_come_before_the_environment() -> None:
    target = open_target("gcloud-tpu://me@a", ENVIRONMENT, project="other", zone="europe-west4-a")
    assert target == GcloudTpuTarget("a", "other", "europe-west4-a", "me")
    assert target.name == "gcloud-tpu://me@a"


def test_where_none_is_given_it_is_the_environments_tpu_or_this_machine() -> None:
    assert default_target(ENVIRONMENT) == "gcloud-tpu://mi-tpu-v6e1"
    assert default_target({**ENVIRONMENT, "TPU_NAME": ""}) == default_target({}) == "local"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("gcloud-tpu://", "TPU_NAME"),
        ("gcloud-gpu://", "GPU_NAME"),
        ("gcloud-tpu://a", "PROJECT"),
        ("gcloud-tpu://a", "TPU_ZONE"),
        ("gcloud-gpu://a", "GPU_ZONE"),
    ],
)
@pytest.mark.parametrize("how", ["absent", "empty"])
def test_a_variable_that_is_missing_is_named(text: str, missing: str, how: str) -> None:
    environment = {**ENVIRONMENT, missing: ""}
    if how == "absent":
        del environment[missing]
    with pytest.raises(TargetError, match=rf"{text} needs {missing}\b"):
        open_target(text, environment)


@pytest.mark.parametrize("text", ["", "here", "local://", "gcloud-tpu", "gcloud://a", "http://host", "user@host"])
def test_what_is_no_target_is_told_what_would_be(text: str) -> None:
    with pytest.raises(TargetError) as caught:
        open_target(text, ENVIRONMENT)
    for kind in ("local", "ssh://", "gcloud-tpu://", "gcloud-gpu://", repr(text)):
        assert kind in str(caught.value)


@pytest.mark.parametrize("name", ["-rf", "Upper", "a b", "a/b", "a:22", "x" * 64, "ends-", "--zone=x", "@a"])
def test_a_name_that_no_vm_can_have_is_refused(name: str) -> None:
    with pytest.raises(TargetError, match="must be like gcloud-gpu://my-vm"):
        open_target(f"gcloud-gpu://{name}", ENVIRONMENT)
