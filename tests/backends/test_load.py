"""Which backend runs: what was asked for, else PyTorch on CPUs and a GPU, JAX on TPUs and several devices."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixwise import Scorer
from prefixwise.backends import load
from prefixwise.backends.fake import fake_logits
from prefixwise.backends.load import FAKE_STEP_VARIABLE, choose_backend, load_backend
from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import BackendOptions
from prefixwise.host import install_command
from prefixwise.models.sources import open_checkpoint

BOTH = ("jax", "torch")
ON_A_GPU = "PyTorch sees a GPU, where it starts in seconds and is about as fast as JAX"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with these packages, where JAX would run on this platform, and PyTorch has a GPU or none."""

    def set_up(installed: Collection[str] = BOTH, platform: str | None = "cpu", *, torch_gpu: bool = False) -> None:
        monkeypatch.setattr(load, "find_spec", lambda name: name if name in installed else None)
        monkeypatch.setattr(load, "_jax_platform", lambda device: platform)
        monkeypatch.setattr(load, "_torch_has_gpu", lambda device: torch_gpu)

    return set_up


class TestAuto:
    @pytest.mark.parametrize("platform", ["tpu", "gpu"])
    def test_jax_where_only_it_sees_an_accelerator(self, machine: Callable[..., None], platform: str) -> None:
        machine(platform=platform)
        assert choose_backend(BackendOptions()) == ("jax", f"JAX sees a {platform.upper()}")

    def test_pytorch_on_a_gpu_that_both_see(self, machine: Callable[..., None]) -> None:
        machine(platform="gpu", torch_gpu=True)
        assert choose_backend(BackendOptions()) == ("torch", ON_A_GPU)
        assert choose_backend(BackendOptions(attention="hopper")) == ("jax", "JAX sees a GPU")
        assert choose_backend(BackendOptions(tp_size=2))[0] == "jax"

    def test_pytorch_on_a_cpu(self, machine: Callable[..., None]) -> None:
        machine()
        reason = "JAX sees a CPU only, and PyTorch is faster there"
        assert choose_backend(BackendOptions()) == ("torch", reason)

    def test_pytorch_where_a_cpu_is_asked_for_beside_a_gpu(self, machine: Callable[..., None]) -> None:
        machine(platform="gpu")
        assert choose_backend(BackendOptions(device="cpu")) == ("torch", "PyTorch is faster on a CPU")

    def test_pytorch_where_jax_cannot_run(self, machine: Callable[..., None]) -> None:
        machine(platform=None)
        assert choose_backend(BackendOptions(device="cuda")) == ("torch", "JAX has no device 'cuda'")

    @pytest.mark.parametrize(("installed", "title"), [("jax", "JAX"), ("torch", "PyTorch")])
    @pytest.mark.parametrize("platform", ["cpu", "gpu"])
    def test_whatever_is_installed(
        self, machine: Callable[..., None], installed: str, title: str, platform: str
    ) -> None:
        machine([installed], platform)
        assert choose_backend(BackendOptions()) == (installed, f"{title} is installed, and the other is not")

    @pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}])
    def test_jax_for_several_devices(self, machine: Callable[..., None], sizes: dict[str, int]) -> None:
        machine()
        name, reason = choose_backend(BackendOptions(**sizes))  # type: ignore[arg-type]
        assert name == "jax"
        assert reason == "several devices are asked for, and PyTorch runs on one"

    def test_nothing_is_installed(self, machine: Callable[..., None]) -> None:
        machine([])
        with pytest.raises(BackendError) as caught:
            choose_backend(BackendOptions())
        for name in ("torch", "jax"):
            assert install_command(name) in str(caught.value)
            assert re.match(rf'pip install "{name}[<>=]', install_command(name))


class TestJaxPlatform:
    """What JAX itself says, beside PyTorch."""

    @pytest.fixture(autouse=True)
    def both(self) -> None:
        pytest.importorskip("torch")

    @pytest.mark.parametrize("device", ["cpu", "cpu:3"])
    def test_a_cpu(self, device: str) -> None:
        assert choose_backend(BackendOptions(device=device)) == ("torch", "PyTorch is faster on a CPU")

    @pytest.mark.parametrize("device", ["tpu", "toaster", "toaster:1"])
    def test_a_device_that_jax_does_not_see_is_left_to_pytorch(
        self, caplog: pytest.LogCaptureFixture, device: str
    ) -> None:
        with caplog.at_level(logging.INFO, "prefixwise"):
            assert choose_backend(BackendOptions(device=device)) == ("torch", f"JAX has no device '{device}'")
        assert "JAX cannot be used: " in caplog.text

    @pytest.mark.gpu
    def test_a_gpu(self) -> None:
        assert choose_backend(BackendOptions()) == ("torch", ON_A_GPU)
        assert choose_backend(BackendOptions(device="cuda:0")) == ("torch", ON_A_GPU)
        assert choose_backend(BackendOptions(device="cpu"))[0] == "torch"


class TestAskedFor:
    @pytest.mark.parametrize("platform", ["cpu", "gpu"])
    @pytest.mark.parametrize("name", BOTH)
    def test_it_is_taken_wherever_it_runs(self, machine: Callable[..., None], name: str, platform: str) -> None:
        machine(platform=platform)
        assert choose_backend(BackendOptions(backend=name)) == (name, "asked for")

    @pytest.mark.parametrize(("name", "title"), [("jax", "JAX"), ("torch", "PyTorch")])
    def test_it_is_not_installed(self, machine: Callable[..., None], name: str, title: str) -> None:
        machine([other for other in BOTH if other != name])
        with pytest.raises(BackendError) as caught:
            choose_backend(BackendOptions(backend=name))
        assert str(caught.value) == f"{title} is not installed; install it with: {install_command(name)}"

    @pytest.mark.parametrize("installed", [[], BOTH])
    def test_there_is_none_of_this_name(self, machine: Callable[..., None], installed: Collection[str]) -> None:
        machine(installed)
        with pytest.raises(BackendError, match=r"unknown backend 'tensorflow'; expected auto, jax or torch$"):
            choose_backend(BackendOptions(backend="tensorflow"))

    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_fp8_where_it_is_not_served(self, checkpoint_of: Callable[[str], Path], backend: str) -> None:
        options = BackendOptions(backend, device="cpu", dtype="bfloat16", quantization="fp8")
        refused = "quantization fp8 needs a CUDA device, got cpu; .* `prefixwise validate quantization`"
        with pytest.raises(BackendError, match=refused):
            load_backend(open_checkpoint(checkpoint_of("qwen3")), options)
        with pytest.raises(BackendError, match="unknown quantization 'int3'; expected fp8"):
            BackendOptions(backend, quantization="int3")

    @pytest.mark.parametrize("name", ["kv_cache_dtype", "prefix_attention_dtype"])
    @pytest.mark.parametrize(
        ("backend", "needs"),
        [("torch", "a CUDA device, got cpu"), ("jax", "backend torch on a GPU, got backend jax")],
    )
    def test_an_fp8_kv_cache_where_it_is_not_served(
        self, checkpoint_of: Callable[[str], Path], backend: str, needs: str, name: str
    ) -> None:
        asked: Any = {name: "fp8"}
        options = BackendOptions(backend, device="cpu", dtype="bfloat16", **asked)
        with pytest.raises(BackendError, match=f"^{name} fp8 needs {needs}; expected {name} auto$"):
            load_backend(open_checkpoint(checkpoint_of("qwen3")), options)

    def test_prefix_attention_in_fp8_over_a_kv_cache_in_fp8(self, checkpoint_of: Callable[[str], Path]) -> None:
        options = BackendOptions("torch", device="cpu", kv_cache_dtype="fp8_e4m3", prefix_attention_dtype="fp8")
        refused = "prefix_attention_dtype fp8 needs kv_cache_dtype auto, got fp8_e4m3: that cache's keys have scales"
        with pytest.raises(BackendError, match=refused):
            load_backend(open_checkpoint(checkpoint_of("qwen3")), options)

    @pytest.mark.parametrize("name", ["fp8_e4m3", "bf16", None])
    def test_there_is_no_prefix_attention_of_this_dtype(self, name: Any) -> None:
        with pytest.raises(BackendError, match=f"unknown prefix_attention_dtype {name!r}; expected auto or fp8"):
            BackendOptions(prefix_attention_dtype=name)

    @pytest.mark.parametrize("name", ["fp8_e5m2", "bf16", "int8", None])
    def test_there_is_no_kv_cache_of_this_dtype(self, name: Any) -> None:
        with pytest.raises(BackendError, match=f"unknown kv_cache_dtype {name!r}; expected auto, fp8 or fp8_e4m3"):
            BackendOptions(kv_cache_dtype=name)

    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_fp8_with_lora_adapters(self, checkpoint_of: Callable[[str], Path], backend: str) -> None:
        options = BackendOptions(backend, quantization="fp8", max_loras=1)
        with pytest.raises(BackendError, match="quantization fp8 has no LoRA adapters"):
            load_backend(open_checkpoint(checkpoint_of("qwen3")), options)

    def test_pytorch_on_several_devices(self, checkpoint_of: Callable[[str], Path]) -> None:
        checkpoint = open_checkpoint(checkpoint_of("qwen3"))
        with pytest.raises(BackendError, match="got tp_size=2 and dp_size=1; several devices need backend jax"):
            load_backend(checkpoint, BackendOptions(backend="torch", tp_size=2))


@pytest.mark.parametrize(
    ("options", "name", "reason"),
    [
        (BackendOptions(backend="torch", device="cpu", dtype="float32"), "torch", "asked for"),
        (BackendOptions(backend="jax", device="cpu", dtype="bfloat16"), "jax", "asked for"),
        (BackendOptions(device="cpu", dp_size=2), "jax", "several devices are asked for, and PyTorch runs on one"),
        (BackendOptions(device="cpu"), "torch", "PyTorch is faster on a CPU"),
    ],
)
def test_the_choice_and_its_reason_are_logged(
    checkpoint_of: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    options: BackendOptions,
    name: str,
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, "prefixwise"):
        backend = load_backend(open_checkpoint(checkpoint_of("qwen3")), options)
    backend.close()
    assert backend.info.name == name
    # Between the two, PyTorch says which dtype it takes on a CPU without bfloat16 units.
    chosen, *_, placed = (record.getMessage() for record in caplog.records if record.name == "prefixwise")
    assert chosen == f"backend {name}: {reason}"
    assert placed == f"backend {name} on {backend.info.device}, {backend.info.dtype}"


class TestFake:
    """`--backend fake`: a whole engine around arithmetic, to test everything but the model."""

    def test_its_scores_can_be_computed_by_hand(self) -> None:
        with Scorer(backend="fake") as scorer:
            result = scorer.score([5, 6, 7], [[8, 9], [10]], label_token_ids=[11, 12], score_mode="logit")
        for item, scores in zip(([8, 9], [10]), result.scores, strict=True):
            expected = fake_logits(np.array([5, 6, 7, *item], np.int32), np.array([11, 12], np.int32))
            assert scores == pytest.approx(expected.tolist())

    def test_what_concerns_weights_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        Scorer(backend="fake", quantization="fp8", kv_cache_dtype="fp8", prefix_attention_dtype="fp8").close()
        named = [message for message in caplog.messages if "no effect" in message]
        options = ("quantization", "kv_cache_dtype", "prefix_attention_dtype")
        assert named == [f"{each} has no effect on the fake backend" for each in options]

    def test_a_step_takes_as_long_as_the_environment_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FAKE_STEP_VARIABLE, "0.2")
        with Scorer(backend="fake") as scorer:
            begin = time.perf_counter()
            scorer.score([5], [[8]], label_token_ids=[11])
            assert time.perf_counter() - begin >= 0.2

    @pytest.mark.parametrize("given", ["-1", "nan", "soon"])
    def test_an_impossible_time_is_refused(self, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(FAKE_STEP_VARIABLE, given)
        with pytest.raises(
            BackendError, match=f"PREFIXWISE_FAKE_STEP_SECONDS must be a number of seconds .* got '{given}'"
        ):
            Scorer(backend="fake")
