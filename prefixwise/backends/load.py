"""Choosing and loading a backend. A framework is imported here, once its backend is chosen."""

from __future__ import annotations

import logging
import math
import os
from importlib.metadata import version
from importlib.util import find_spec

from prefixwise.contract.errors import BackendError
from prefixwise.forward.backend import Backend, BackendOptions
from prefixwise.host import install_command
from prefixwise.models.checkpoint import Checkpoint

log = logging.getLogger("prefixwise")

BACKENDS = ("jax", "torch")
FAKE = "fake"  # arithmetic instead of a model, to test and measure everything around the model
# Environment variables: how long each of its forwards takes, in all and for every token.
FAKE_STEP_VARIABLE = "PREFIXWISE_FAKE_STEP_SECONDS"
FAKE_TOKEN_VARIABLE = "PREFIXWISE_FAKE_TOKEN_SECONDS"
_TITLES = {"jax": "JAX", "torch": "PyTorch"}


def load_backend(checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    """Load the weights onto the device. Raises BackendError where the choice cannot run here."""
    name, reason = choose_backend(options)
    log.info("backend %s: %s", name, reason)
    if options.nnodes > 1 and name != "jax":
        raise BackendError(f"nnodes={options.nnodes} needs backend jax, got {name}")
    if options.nnodes > 1 and options.max_loras:
        raise BackendError(f"nnodes={options.nnodes} has no LoRA adapters, got max_loras={options.max_loras}")
    if options.quantization is not None and options.max_loras:
        raise BackendError(
            f"quantization {options.quantization} has no LoRA adapters; load the model without one of both"
        )
    backend = _LOADERS[name](checkpoint, options)
    log.info("backend %s on %s, %s", name, backend.info.device, backend.info.dtype)
    return backend


def choose_backend(options: BackendOptions) -> tuple[str, str]:
    """The backend's name, and the reason for it: PyTorch on CPUs and a GPU, JAX on TPUs and several devices."""
    if options.backend == FAKE:
        return FAKE, "asked for"
    if options.backend not in ("auto", *BACKENDS):
        raise BackendError(f"unknown backend {options.backend!r}; expected auto, {' or '.join(BACKENDS)}")
    installed = [name for name in BACKENDS if find_spec(name) is not None]
    if options.backend != "auto":
        if options.backend not in installed:
            raise BackendError(
                f"{_TITLES[options.backend]} is not installed; install it with: {install_command(options.backend)}"
            )
        return options.backend, "asked for"
    if not installed:
        raise BackendError(
            f"neither JAX nor PyTorch is installed; install one with: {install_command('torch')} "
            f"or {install_command('jax')}"
        )
    if len(installed) == 1:
        return installed[0], f"{_TITLES[installed[0]]} is installed, and the other is not"
    if options.tp_size * options.dp_size > 1:
        return "jax", "several devices are asked for, and PyTorch runs on one"
    if options.device.partition(":")[0] == "cpu":
        return "torch", "PyTorch is faster on a CPU"
    if options.attention is None and _torch_has_gpu(options.device):  # `attention` names one of JAX's
        return "torch", "PyTorch sees a GPU, where it starts in seconds and is about as fast as JAX"
    platform = _jax_platform(options.device)
    if platform == "cpu":
        return "torch", "JAX sees a CPU only, and PyTorch is faster there"
    if platform is None:
        return "torch", f"JAX has no device {options.device!r}"
    return "jax", f"JAX sees a {platform.upper()}"


def _torch_has_gpu(device: str) -> bool:
    """Would PyTorch run on a CUDA device? A build for CPUs is not imported to find out."""
    if device.partition(":")[0] not in ("auto", "cuda", "gpu") or version("torch").endswith("+cpu"):
        return False
    from prefixwise.backends.torch.devices import has_cuda

    return has_cuda()


def _jax_platform(device: str) -> str | None:
    """The platform that JAX would use: cpu, gpu or tpu; None where it cannot run."""
    from prefixwise.backends.jax.plugins import may_have_accelerator

    if device == "auto" and not may_have_accelerator():
        return "cpu"
    try:
        from prefixwise.backends.jax.devices import DeviceChoice

        return DeviceChoice.resolve(device).platform
    except (BackendError, ImportError) as error:
        log.info("JAX cannot be used: %s", error)
        return None


def _load_jax(checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    for name in ("kv_cache_dtype", "prefix_attention_dtype"):
        if getattr(options, name) != "auto":
            raise BackendError(
                f"{name} {getattr(options, name)} needs backend torch on a GPU, got backend jax; expected {name} auto"
            )
    from prefixwise.backends.jax.backend import JaxBackend

    if options.nnodes == 1 or options.node_rank:
        return JaxBackend(checkpoint, options)
    from prefixwise.backends.jax.lockstep import LeaderBackend

    return LeaderBackend(lambda: JaxBackend(checkpoint, options), options)


def _load_torch(checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    if options.tp_size != 1 or options.dp_size != 1:
        raise BackendError(
            "the torch backend runs on one device: expected tp_size=1 and dp_size=1, "
            f"got tp_size={options.tp_size} and dp_size={options.dp_size}; several devices need backend jax"
        )
    for name in ("attention", "compilation_cache_dir"):
        if getattr(options, name) is not None:
            log.warning("%s has no effect on the torch backend", name)
    from prefixwise.backends.torch.backend import TorchBackend

    return TorchBackend(
        checkpoint,
        dtype=options.dtype,
        device=options.device,
        batch_invariant=options.batch_invariant,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        prefix_attention_dtype=options.prefix_attention_dtype,
        token_budget=options.token_budget,
        prefix_cache_bytes=options.prefix_cache_bytes,
        weight_cache=options.weight_cache,
        is_coarse=options.warmup == "fast",
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
    )


def _load_fake(checkpoint: Checkpoint, options: BackendOptions) -> Backend:
    """With the vocabulary size and context length of the checkpoint, without its weights."""
    from prefixwise.backends.fake import FakeBackend

    for name, is_given in (
        ("quantization", options.quantization),
        ("kv_cache_dtype", options.kv_cache_dtype != "auto"),
        ("prefix_attention_dtype", options.prefix_attention_dtype != "auto"),
    ):
        if is_given:
            log.warning("%s has no effect on the fake backend", name)
    config = checkpoint.config
    return FakeBackend(
        config.vocab_size,
        config.max_context_len,
        seconds_per_forward=_seconds_of(FAKE_STEP_VARIABLE),
        seconds_per_token=_seconds_of(FAKE_TOKEN_VARIABLE),
    )


def _seconds_of(variable: str) -> float:
    given = os.environ.get(variable, "0")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BackendError(f"{variable} must be a number of seconds of 0 or more, got {given!r}")
    return seconds


_LOADERS = {"jax": _load_jax, "torch": _load_torch, FAKE: _load_fake}
