"""The CUDA kernels in Triton's interpreter, and compiled for a GPU, on machines that have none.

Triton decides when it is imported whether kernels are interpreted, so those tests run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]
FILES = [
    str(Path(__file__).with_name(name))
    for name in ("test_fp8.py", "test_fp8_kv_cache.py", "test_fused_elementwise.py", "test_lora.py", "test_paged.py")
]


LONG = "TestRunner or (over_the_numbers and (48 or after))"  # the runner takes minutes


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("chosen", [f"not ({LONG})", pytest.param(LONG, marks=pytest.mark.slow)], ids=["daily", "long"])
def test_the_kernels_in_the_interpreter(chosen: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", "-k", chosen, *FILES]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("head_size", "num_keys", "has_scales"), [(128, 128, True), (256, 32, True), (32, 128, False), (256, 32, False)]
)
def test_prefix_attention_over_an_fp8_kv_cache_fits_a_multiprocessor(
    head_size: int, num_keys: int, has_scales: bool
) -> None:
    """Codes in flight, and the keys and values that they become; matrix products are those of bfloat16. Without scales
    values are no codes, and queries are multiplied by keys in FP8."""
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from prefixwise.backends.torch.cuda.attention import PagedAttention, prefix_tunings
    from prefixwise.backends.torch.cuda.attention_kernels import prefix_kernel

    (tuning,) = prefix_tunings(head_size, torch.device("cpu"))
    assert tuning.num_keys == num_keys
    attention = PagedAttention(num_heads=16, num_kv_heads=8, head_size=head_size, device=torch.device("cpu"))
    constants: dict[str, Any] = {"first_key_head": 0, "first_value_head": 0, "scale": 0.1, "softcap": 0.0}
    constants |= {"window": 0, "kind": 2}
    constants |= {"width": attention.tile_sizes.prefix, "num_keys": num_keys, "page_size": 128, "num_kv_heads": 8}
    constants |= {"group": 2, "padded_group": 2, "query_stride": 32 * head_size, "out_stride": 16 * head_size}
    constants["result_stride"] = 16 * head_size
    constants |= dict.fromkeys(("head_size", "padded_head_size"), head_size)
    names = prefix_kernel.arg_names
    box = f"[{num_keys}, {head_size}]"
    types = {"queries": "*bf16", "out": "*bf16", "result": "*fp8e4nv", "lse": "*fp32", "num_slots": "i32"}
    types |= dict.fromkeys(("keys", "values"), f"tensordesc<fp8e4nv{box}>")
    types |= dict.fromkeys(("key_scales", "value_scales"), "*u8")
    if not has_scales:
        types |= {"queries": "*fp8e4nv", "values": f"tensordesc<bf16{box}>"}
        constants |= dict.fromkeys(("key_scales", "value_scales", "num_slots"))
    types = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    source = ASTSource(
        prefix_kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].startswith("*")},
    )
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 << 10  # bytes, of Hopper
    assert "f32.bf16.bf16" in compiled.asm["ptx"]
    assert ("f32.e4m3.e4m3" in compiled.asm["ptx"]) == (not has_scales)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_tiles_of_self_attention_fit_a_multiprocessor() -> None:
    """The shared memory of Gemma-2-9B's, whose heads are wide, where pointers are aligned and loads are in flight."""
    import torch
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from prefixwise.backends.torch.cuda.attention import PagedAttention, self_attention_tuning
    from prefixwise.backends.torch.cuda.attention_kernels import self_attention_kernel

    tuning = self_attention_tuning(256, 2, torch.device("cpu"))
    attention = PagedAttention(num_heads=16, num_kv_heads=8, head_size=256, device=torch.device("cpu"))
    constants = {"scale": 0.1, "softcap": 72.0, "window": 4096, "kind": 1, "num_kv_heads": 8}
    constants |= {"width": attention.tile_sizes.wide, "group": 2, "padded_group": 2}
    constants |= {"out_stride": 16 * 256, **dict.fromkeys(("head_size", "padded_head_size"), 256)}
    names = self_attention_kernel.arg_names
    types = {"qkv": "*bf16", "out": "*bf16", "codes": "*fp8e4nv", "lse": "*fp32"}
    source = ASTSource(
        self_attention_kernel,
        {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name not in constants},
    )
    options = {"num_warps": tuning.num_warps, "num_stages": tuning.num_stages}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= 227 << 10  # bytes, of Hopper


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("result", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize(("group", "head_size", "scored"), [(2, 128, "bf16"), (3, 64, "bf16"), (2, 128, "fp8e4nv")])
def test_prefix_attention_on_hopper_adds_values_while_it_computes_a_softmax(
    group: int, head_size: int, scored: str, result: str
) -> None:
    """The assembler may move the wait for the values before the softmax: the result is the same, and slower."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from prefixwise.backends.torch.cuda.attention import HOPPER_TUNING, PagedAttention
    from prefixwise.backends.torch.cuda.hopper import hopper_prefix_kernel, row_box

    cpu = torch.device("cpu")
    attention = PagedAttention(
        num_heads=2 * group, num_kv_heads=2, head_size=head_size, device=cpu, prefix=HOPPER_TUNING
    )
    constants = {"first_key_head": 0, "first_value_head": 0, "scale": 0.1, "kind": 2, "page_size": 128}
    constants |= {"width": attention.tile_sizes.prefix, "num_buffers": HOPPER_TUNING.num_stages, "num_kv_heads": 2}
    constants |= {"group": group, "padded_group": triton.next_power_of_2(group), "result_stride": 2 * group * head_size}
    constants |= {"head_size": head_size, "padded_head_size": head_size}
    box = [HOPPER_TUNING.num_keys, head_size]
    rows = row_box(attention.tile_sizes.prefix, triton.next_power_of_2(group), head_size)
    types = {"result": f"*{result}", "lse": "*fp32"}
    for name, shape in {"keys": box, "values": box, "queries": rows, "outputs": rows}.items():
        is_fp8 = scored != "bf16" and name in ("keys", "queries")
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.float8e4nv if is_fp8 else gl.bfloat16)
        types[name] = f"tensordesc<{scored if is_fp8 else 'bf16'}{shape},{layout!r}>"
    names = hopper_prefix_kernel.arg_names
    types = {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names}
    source = GluonASTSource(
        hopper_prefix_kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if types[name].startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": HOPPER_TUNING.num_warps})
    assert compiled.metadata.shared <= 227 << 10  # bytes, of Hopper
    assert ("QGMMA" in compiled.asm["sass"]) == (scored != "bf16")
    # Waits until one product, or none, is left; and exponentials.
    marks = re.findall(r"DEPBAR\.LE gsb0, 0x([01])|MUFU\.(E)X2", compiled.asm["sass"])
    order = "".join(wait or "e" for wait, _ in marks)
    assert re.search(f"1e{{{64 * HOPPER_TUNING.num_keys // 128},}}0", order), order
