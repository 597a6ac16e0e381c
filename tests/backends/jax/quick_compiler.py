"""What a CPU's compiler is told where programs take longer to compile than to run."""

from __future__ import annotations

import jax

from prefixwise.backends.jax.programs import COMPILER_OPTIONS

FOR_USERS = COMPILER_OPTIONS["cpu"]
# A third of the time, to the same arithmetic in slower code.
QUICKLY: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later compilers have no such options
    QUICKLY |= {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
