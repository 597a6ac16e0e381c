"""Hardware, in the words of our server and of others."""

from __future__ import annotations

import os

import pytest

from prefixwise.bench.server_facts import describe_hardware, hardware_name

OURS = {
    "version": "0.1.0",
    "versions": {"prefixwise": "0.1.0", "torch": "2.8"},
    "memory": {"peak_host_bytes": 77},
    "configuration": {"device": "cpu (1 thread)", "dtype": "float32"},
    "devices": {"backend": "torch", "device": "cpu (1 thread)", "kind": "cpu", "dtype": "float32"},
}


def test_our_server() -> None:
    reported = describe_hardware(OURS, "laptop", 0.5)
    client = reported.pop("client")
    assert reported == {
        "name": "laptop",
        "usd_per_hour": 0.5,
        "backend": "torch",
        "device": "cpu (1 thread)",
        "device_kind": "cpu",
        "dtype": "float32",
        "versions": {"prefixwise": "0.1.0", "torch": "2.8"},
        "memory": {"peak_host_bytes": 77},
    }
    assert client["cpu_count"] == os.cpu_count()
    assert client["platform"]


def test_one_that_tells_everything_flat() -> None:
    reported = describe_hardware({"version": "0.5.2", "device": "cuda", "dtype": "bfloat16"})
    assert {key: reported[key] for key in reported if key != "client"} == {
        "device": "cuda",
        "dtype": "bfloat16",
        "versions": {"server": "0.5.2"},
    }


def test_of_one_that_tells_nothing_only_the_client_is_known() -> None:
    assert set(describe_hardware({})) == {"client"}


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ({"device": "cpu", "device_kind": "cpu"}, "cpu"),
        ({"device": "cpu (2 threads)", "device_kind": "cpu"}, "cpu"),
        ({"device": "cpu (1 thread)"}, "cpu"),
        ({"device": "cuda:0 (NVIDIA H200)"}, "NVIDIA H200"),
        ({"device": "gpu (NVIDIA H200)"}, "NVIDIA H200"),
        ({"device": "2 x gpu (NVIDIA H200)"}, "2 x NVIDIA H200"),
        ({"device_kind": "tpu"}, "tpu"),
        ({"device": "some box, of others"}, "some box, of others"),
        ({"name": "G4", "device": "cpu"}, "G4"),
        ({}, None),
    ],
)
def test_the_same_hardware_has_one_name_in_the_words_of_either_backend(
    hardware: dict[str, object], name: str | None
) -> None:
    assert hardware_name(hardware) == name
