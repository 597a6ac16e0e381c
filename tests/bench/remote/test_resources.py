from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefixwise.bench.remote import resources
from prefixwise.bench.remote.resources import Resource, ResourceOptions
from prefixwise.bench.remote.targets.base import TargetError
from prefixwise.bench.remote.targets.gcloud import GcloudGpuTarget, GcloudTpuTarget
from prefixwise.bench.remote.targets.local import LocalTarget
from tests.bench.remote.gcloud_stand_in import DENIED, GPU_MISSING, NO_QUOTA, REFUSED, TPU_MISSING, StandIn, stand_in

TPU = GcloudTpuTarget("vm", "p", "z")
GPU = GcloudGpuTarget("vm", "p", "z", "me")
PLACE = ["--zone=z", "--project=p", "--quiet"]
MACHINES = "https://www.googleapis.com/compute/v1/projects/p/zones/z/machineTypes"


@pytest.fixture
def gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return stand_in(tmp_path / "gcloud", monkeypatch)


def tpu(state: str) -> dict[str, object]:
    return {"output": json.dumps({"acceleratorType": "v6e-1", "state": state, "name": "projects/p/.../vm"})}


def gpu(status: str) -> dict[str, object]:
    return {"output": json.dumps({"machineType": f"{MACHINES}/g4-standard-48", "status": status})}


def failed(stderr: str) -> dict[str, object]:
    return {"status": 1, "stderr": stderr}


def test_a_tpu_is_created_as_documented() -> None:
    group = ["gcloud", "compute", "tpus", "tpu-vm"]
    made = resources.create_command(TPU, ResourceOptions())
    assert made == [*group, "create", "vm", *PLACE, "--accelerator-type=v6e-1", "--version=v2-alpha-tpuv6e"]
    chosen = resources.create_command(TPU, ResourceOptions(accelerator_type="v5p-8", runtime_version="v2-alpha-tpuv5"))
    assert chosen[-2:] == ["--accelerator-type=v5p-8", "--version=v2-alpha-tpuv5"]
    assert resources.describe_command(TPU) == [*group, "describe", "vm", *PLACE, "--format=json"]
    assert resources.delete_command(TPU) == [*group, "delete", "vm", *PLACE]


def test_a_gpu_is_created_as_documented_and_its_user_is_not_its_name() -> None:
    group = ["gcloud", "compute", "instances"]
    options = ResourceOptions(image_family="f", image_project="i", boot_disk_size="50GB")
    assert resources.create_command(GPU, options) == [
        *[*group, "create", "vm", *PLACE],
        "--machine-type=g4-standard-48",
        "--image-family=f",
        "--image-project=i",
        "--boot-disk-size=50GB",
        "--maintenance-policy=TERMINATE",
        "--boot-disk-type=hyperdisk-balanced",
    ]
    other = resources.create_command(GPU, ResourceOptions(machine_type="g2-standard-8", boot_disk_type=""))
    assert "--machine-type=g2-standard-8" in other
    assert not any(word.startswith("--boot-disk-type") for word in other)
    assert resources.describe_command(GPU) == [*group, "describe", "vm", *PLACE, "--format=json"]
    assert resources.delete_command(GPU) == [*group, "delete", "vm", *PLACE]


def test_what_there_is_is_described(gcloud: StandIn) -> None:
    gcloud.answer("describe", tpu("READY"), gpu("RUNNING"), failed(TPU_MISSING), failed(GPU_MISSING))
    assert resources.describe(TPU) == Resource("v6e-1", "READY")
    assert resources.describe(GPU) == Resource("g4-standard-48", "RUNNING")
    assert resources.describe(TPU) is None
    assert resources.describe(GPU) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (failed(DENIED), "Required 'compute.instances.get' permission"),
        (failed("ERROR: (gcloud.x) The resource 'projects/p' was not found"), "'projects/p' was not found"),
        (failed("ERROR: (gcloud.x) The resource 'projects/p/zones/z/instances/vm2' was not found"), "vm2"),
        ({"output": "[]"}, "expected a JSON object with a type and a state"),
        ({"output": "READY"}, "got 'READY'"),
        ({"output": "{}"}, "got '{}'"),
    ],
)
def test_what_cannot_be_told_is_not_taken_for_missing(answer: dict[str, object], words: str, gcloud: StandIn) -> None:
    gcloud.answer("describe", answer)
    with pytest.raises(TargetError, match=words):
        resources.ensure(GPU, ResourceOptions(), print)
    assert gcloud.verbs() == ["describe"], "nothing may be created on a guess"


def test_a_machine_that_is_not_there_is_made_and_waited_for(gcloud: StandIn) -> None:
    gcloud.answer("describe", failed(TPU_MISSING), tpu("CREATING"), tpu("READY"), tpu("READY"))
    gcloud.answer("ssh", {"status": 255, "stderr": REFUSED})
    said: list[str] = []
    assert resources.ensure(TPU, ResourceOptions(), said.append, pause_seconds=0)
    assert gcloud.verbs() == ["describe", "create", "describe", "describe", "ssh", "describe", "ssh"]
    assert said[0].startswith("gcloud compute tpus tpu-vm create vm --zone=z")
    assert "CREATING" in said[1]
    assert "Connection refused" in said[2]


def test_a_machine_that_there_is_is_said_and_not_made_again(gcloud: StandIn) -> None:
    gcloud.answer("describe", gpu("RUNNING"), gpu("RUNNING"))
    said: list[str] = []
    assert not resources.ensure(GPU, ResourceOptions(), said.append)
    assert "create" not in gcloud.verbs()
    assert said == ["gcloud-gpu://me@vm already exists (g4-standard-48, RUNNING) and is used as it is"]


@pytest.mark.parametrize("state", ["STOPPED", "PREEMPTED", "TERMINATED"])
def test_a_machine_that_is_down_is_an_error_at_once(state: str, gcloud: StandIn) -> None:
    gcloud.answer("describe", tpu(state), tpu(state))
    with pytest.raises(TargetError, match=f"exists but is {state}: start it, or delete it"):
        resources.ensure(TPU, ResourceOptions(), print)
    assert "create" not in gcloud.verbs()


def test_a_quota_that_is_not_there_fails_in_gclouds_words(gcloud: StandIn) -> None:
    gcloud.answer("describe", failed(GPU_MISSING))
    gcloud.answer("create", failed(NO_QUOTA))
    with pytest.raises(TargetError, match=r"cannot be created: .*Quota 'GPUS_ALL_REGIONS' exceeded\.  Limit: 0\.0"):
        resources.ensure(GPU, ResourceOptions(), print)
    assert gcloud.verbs() == ["describe", "create"]


def test_the_poll_times_out(gcloud: StandIn) -> None:
    gcloud.answer("describe", *[gpu("RUNNING")] * 9)
    gcloud.answer("ssh", *[{"status": 255, "stderr": REFUSED}] * 9)
    with pytest.raises(TargetError, match=r"did not answer within 0\.3 s: .*Connection refused"):
        resources.wait_until_answers(GPU, print, timeout_seconds=0.3, pause_seconds=0.2)
    assert 1 <= gcloud.verbs().count("ssh") <= 2


def test_waiting_is_of_no_use_without_permission_or_machine(gcloud: StandIn) -> None:
    gcloud.answer("describe", gpu("RUNNING"), failed(GPU_MISSING))
    gcloud.answer("ssh", failed(DENIED))
    with pytest.raises(TargetError, match="Required 'compute"):
        resources.wait_until_answers(GPU, print)
    with pytest.raises(TargetError, match=r"does not exist \(zone z, project p\)"):
        resources.wait_until_answers(GPU, print)


def test_deleting_is_said_and_done_once(gcloud: StandIn) -> None:
    gcloud.answer("delete", {"status": 0}, failed(GPU_MISSING), failed(DENIED))
    said: list[str] = []
    assert resources.delete(GPU, said.append)
    assert said == ["gcloud compute instances delete vm --zone=z --project=p --quiet"]
    assert not resources.delete(GPU, said.append)
    assert said[-1] == "gcloud-gpu://me@vm does not exist: nothing to delete"
    with pytest.raises(TargetError, match="cannot be deleted and may still cost money"):
        resources.delete(GPU, said.append)


def test_only_machines_of_gcloud_are_ours_to_make() -> None:
    assert resources.as_gcloud(TPU) is TPU
    with pytest.raises(TargetError, match="can be created or deleted, got local"):
        resources.as_gcloud(LocalTarget())
