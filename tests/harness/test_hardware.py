"""Hardware, in the words of our server and of others."""

from __future__ import annotations

import os

from itemwise.harness.hardware import describe_hardware

OURS = {
    "version": "0.1.0",
    "versions": {"itemwise": "0.1.0", "torch": "2.8"},
    "memory": {"peak_host_bytes": 77},
    "configuration": {"device": "cpu (1 thread)", "dtype": "float32"},
    "devices": {"backend": "torch", "device": "cpu (1 thread)", "kind": "cpu", "dtype": "float32"},
}


def test_our_server() -> None:
    told = describe_hardware(OURS, "laptop", 0.5)
    client = told.pop("client")
    assert told == {
        "name": "laptop",
        "usd_per_hour": 0.5,
        "backend": "torch",
        "device": "cpu (1 thread)",
        "device_kind": "cpu",
        "dtype": "float32",
        "versions": {"itemwise": "0.1.0", "torch": "2.8"},
        "memory": {"peak_host_bytes": 77},
    }
    assert client["cpu_count"] == os.cpu_count()
    assert client["platform"]


def test_one_that_tells_everything_flat() -> None:
    told = describe_hardware({"version": "0.5.2", "device": "cuda", "dtype": "bfloat16"})
    assert {key: told[key] for key in told if key != "client"} == {
        "device": "cuda",
        "dtype": "bfloat16",
        "versions": {"server": "0.5.2"},
    }


def test_of_one_that_tells_nothing_only_the_client_is_known() -> None:
    assert set(describe_hardware({})) == {"client"}
