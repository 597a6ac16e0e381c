from __future__ import annotations

from pathlib import Path

from prefixwise.backends.jax.aot.hlo import array_shapes, count_collectives, kernel_vmem_bytes, read_dump

HLO = """
  %psum.1 = bf16[64,8]{1,0:T(8,128)} all-reduce(%a), replica_groups={{0,1}}
  %start = (f32[4], f32[8]) all-gather-start(%b), dimensions={0}
  %done = f32[8] all-gather-done(%start)
  %psum.2 = f32[64]{0} all-reduce(%psum.1)
  %k = bf16[64,4,2] custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"scoped_memory_configs":\
[{"memory_space":"1","offset":"50","size":"900"}],"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"120"}]}
  %f = f32[] fusion(%x), backend_config={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"800"}]}
"""


def test_collectives_are_counted_once_by_kind() -> None:
    assert count_collectives(HLO) == {"all-reduce": 2, "all-gather": 1}
    assert count_collectives("") == {}


def test_the_vmem_of_kernels_is_what_they_use_and_not_what_they_may() -> None:
    assert kernel_vmem_bytes(HLO) == 70
    assert kernel_vmem_bytes("%f = f32[] fusion(%x)") is None


def test_shapes_of_all_arrays() -> None:
    assert array_shapes(HLO) == {(64, 8), (4,), (8,), (64,), (64, 4, 2)}
    assert array_shapes("") == set()


def test_a_dump_is_of_the_program_and_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "module_0.jit_trunk.cl_1.after_codegen.txt").write_text("this")
    (tmp_path / "module_0.jit_trunk.cl_1.after_optimizations.txt").write_text("before")
    (tmp_path / "module_2.extracted.cl_1.after_codegen.txt").write_text("a part")
    assert read_dump(tmp_path) == "this"
