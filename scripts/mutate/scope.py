"""Say which files are mutated, and which tests must notice a change of each.

The first pattern that matches a file gives its tests, the quickest ones first: a mutant is killed
by the first failure. All tests are fast ones (no slow, gpu, slurm or hosts). Not mutated: Triton's
kernels, since its interpreter takes minutes for the tests of each; the Python of `parallel` that
starts ranks; and what moves weights, optimizer states and pipelines without FP8.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

CORE = ("fp8_numerics/test_cast", "fp8_numerics/test_gemm", "fp8/test_recipes", "fp8/test_linear")
RANKS = "parallel/test_fp8_linears"
FRONT_DOOR_FILES = ("conversion", "converted", "coverage", "recipe_settings", "state")
FRONT_DOOR = (
    *("fp8/test_recipe", "fp8/test_convert", "fp8/test_changed_weights", "fp8/test_overflow"),
    *("fp8/test_bits", "fp8/test_ranks"),
)
LOW_PRECISION = ("optim/test_masters", "optim/test_masters_ranks")
SCALED = ("fp8/test_scaled", "optim/test_scaled_adam")
IN_C = ("fp8/test_compile", "fp8_numerics/test_cast", *SCALED)
REAL_TE = tuple(
    f"backends/te/real_{name}"
    for name in ("layers", "calls", "attention", "training", "levels", "options")
)


def _fp8(*names: str) -> tuple[str, ...]:
    return tuple(f"fp8/{name}" for name in names)


TESTS: dict[str, tuple[str, ...]] = {
    **{
        f"fp8_numerics/{name}": ("fp8/test_blackwell",)
        for name in ("kernels/blocks*", "block_casts.py")
    },
    **{
        f"{folder}/{name}.py": (
            *_fp8("test_blackwell", "test_packed", "kernels/test_triton_blocks"),
        )
        for folder in ("fp8_numerics", "megafp8/fp8/recipes")
        for name in ("mxfp8", "nvfp4")
    },
    "fp8_numerics/conformance/check.py": ("fp8_numerics/test_conformance",),
    "fp8_numerics/cast.py": (*CORE, *_fp8("test_packed", "kernels/test_engine"), RANKS),
    "megafp8/fp8/recipes/rowwise.py": (
        *_fp8("test_recipes", "test_linear", "test_own_recipes", "kernels/test_engine"),
        RANKS,
    ),
    "fp8_numerics/kernels/draws_cpu.h": ("fp8/test_draws",),
    **{
        f"fp8_numerics/kernels/{name}.h": (*SCALED, "optim/test_partitions_elements")
        for name in ("scaled_*", "stored_cpu")
    },
    "fp8_numerics/kernels/*.[ch]": (*IN_C[1:], IN_C[0]),
    "fp8_numerics/kernels/compile.py": (*IN_C[:2], "fp8/kernels/test_cpu_levels"),
    "fp8_numerics/scaled_mm.py": ("ops/test_scaled_mm", *_fp8("kernels/test_engine")),
    "megafp8/fp8/engine.py": (
        "ops/test_scaled_mm",
        *_fp8("kernels/test_engine", "kernels/test_layer_counts"),
    ),
    "fp8_numerics/gemm.py": (
        "fp8_numerics/test_gemm",
        *_fp8("kernels/test_engine", "test_linear"),
    ),
    "fp8_numerics/addmm.py": ("fp8_numerics/test_addmm", "fp8_numerics/test_gemm"),
    "megafp8/fp8/scaling.py": (
        *_fp8("test_scaling", "test_traces", "kernels/test_engine"),
        RANKS,
        "train/test_fp8_events",
    ),
    "megafp8/fp8/health.py": ("fp8/test_health", "train/test_health"),
    "megafp8/fp8/scaled.py": (*SCALED, *LOW_PRECISION),
    "megafp8/fp8/weights.py": (
        *_fp8("test_weights", "test_linear"),
        RANKS,
        "train/test_fp8_events",
        *LOW_PRECISION,
    ),
    "megafp8/fp8/grad_sink.py": (*_fp8("test_weights", "test_linear"), "train/test_step", RANKS),
    "megafp8/fp8/linear.py": (*_fp8("test_linear", "test_recipes"), RANKS),
    "megafp8/fp8/quantizer.py": (
        *_fp8("test_linear", "test_recipes", "test_health"),
        RANKS,
    ),
    **{
        f"{name}.py": (
            *_fp8("test_recipes", "test_linear", "test_own_recipes", "test_blackwell"),
            RANKS,
        )
        for name in (
            *(f"megafp8/fp8/{name}" for name in ("build", "rule", "recipes/*")),
            "fp8_numerics/scales",
        )
    },
    **{
        f"megafp8/fp8/{name}.py": _fp8("test_probe", "test_check")
        for name in ("checker", "probe", "refute")
    },
    **{
        f"{name}.py": ("fp8/test_draws", "fp8/test_own_recipes")
        for name in ("megafp8/fp8/draws", "fp8_numerics/philox")
    },
    "megafp8/fp8/trainer.py": ("fp8/test_trainer",),
    **{f"megafp8/fp8/{name}.py": FRONT_DOOR for name in FRONT_DOOR_FILES},
    **{f"{folder}/*.py": (*CORE, RANKS) for folder in ("megafp8/fp8", "fp8_numerics")},
    "megafp8/parallel/sequence.py": (
        "parallel/test_pieces",
        RANKS,
        "parallel/test_sequence_parallel",
    ),
    "megafp8/parallel/tensor.py": ("parallel/test_pieces", RANKS, "parallel/test_tensor_parallel"),
    "megafp8/parallel/collectives.py": (
        "parallel/test_pieces",
        "parallel/test_mesh",
        RANKS,
        "parallel/test_data_parallel",
        "parallel/test_context_parallel",
    ),
    "megafp8/parallel/fsdp.py": ("parallel/test_fsdp_pieces", RANKS, "parallel/test_fsdp"),
    "megafp8/parallel/scaled_data.py": (
        *("optim/test_masters_ranks", "optim/test_partitions_tensors"),
    ),
    "megafp8/optim/partitions.py": (
        "optim/test_partitions_pieces",
        *("optim/test_partitions_tensors", "optim/test_partitions_elements"),
        "optim/test_masters_ranks",
    ),
    "megafp8/optim/masters.py": (
        "optim/test_partitions_pieces",
        *LOW_PRECISION,
        "parallel/test_fsdp",
    ),
    "megafp8/optim/scaled_adam.py": (
        "optim/test_kernel_trial",
        "optim/test_scaled_adam",
        *LOW_PRECISION,
    ),
    "te_cpu/*.py": ("te_cpu/test_kernels", "te_cpu/test_loading", *REAL_TE),
}
LEFT_OUT = (
    "*/__init__.py",
    "*/__main__.py",
    "*/triton_*.py",
    "megafp8/fp8/chain.py",
    "megafp8/fp8/fused.py",
    "megafp8/fp8/heads.py",
    "te_cpu/wheel.py",
)


def files(root: Path) -> list[str]:
    """Return the paths of the files that are mutated, relative to `root`, sorted."""
    found = {str(path.relative_to(root)) for pattern in TESTS for path in root.glob(pattern)}
    return sorted(f for f in found if not any(fnmatchcase(f, p) for p in LEFT_OUT))


def needs_own_process(test: str) -> bool:
    """Whether a file of tests loads Transformer Engine, which patches torch for the process."""
    return Path(test).name.startswith("real_")


def tests_of(file: str) -> tuple[str, ...]:
    """Return the files of tests that must notice a change of `file`, quickest first."""
    names = next(tests for pattern, tests in TESTS.items() if fnmatchcase(file, pattern))
    return tuple(f"tests/{name}.py" for name in names)
