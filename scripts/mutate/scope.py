"""Say which files are mutated, and which tests must notice a change of each.

The first pattern that matches a file gives its tests, the quickest ones first: a mutant is killed
by the first failure. All tests are fast ones (no slow, gpu, slurm or hosts). Not mutated: Triton's
kernels, since its interpreter takes minutes for the tests of each; the Python of `parallel` that
starts ranks; and what moves weights, optimizer states and pipelines without FP8.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

PRECISION = ("test_cast", "test_gemm", "test_recipes", "test_linear")
RANKS = "parallel/test_fp8_linears"
FEW_BITS = ("optim/test_stored", "optim/test_stored_ranks")
SCALED = ("precision/test_scaled", "precision/test_grouped", "optim/test_scaled_adam")
IN_C = ("precision/test_compile", "precision/test_cast", *SCALED)


def _precision(*names: str) -> tuple[str, ...]:
    return tuple(f"precision/{name}" for name in names)


TESTS: dict[str, tuple[str, ...]] = {
    "megafp8/precision/kernels/grouped_*.h": (*SCALED[1:], *IN_C[:2]),
    "megafp8/precision/kernels/scaled_*.h": (*SCALED, *IN_C[:2]),
    "megafp8/precision/kernels/*.[ch]": (*IN_C[1:], IN_C[0]),
    "megafp8/precision/kernels/compile.py": (*IN_C[:2], "precision/kernels/test_cpu_levels"),
    "megafp8/precision/kernels/scaled_mm.py": _precision(
        "kernels/test_scaled_mm", "kernels/test_engine"
    ),
    "megafp8/precision/engine.py": _precision("kernels/test_engine", "kernels/test_layer_counts"),
    "megafp8/precision/gemm.py": _precision("test_gemm", "kernels/test_engine", "test_linear"),
    "megafp8/hardware/addmm.py": ("hardware/test_addmm", *_precision("test_gemm")),
    "megafp8/precision/scaling.py": (
        *_precision("test_scaling", "test_traces", "kernels/test_engine"),
        RANKS,
        "train/test_fp8_events",
    ),
    "megafp8/precision/health.py": ("precision/test_health", "train/test_health"),
    "megafp8/precision/scaled.py": (*SCALED, *FEW_BITS),
    "megafp8/precision/grouped.py": (*SCALED, *FEW_BITS),
    "megafp8/precision/weights.py": (
        "precision/test_linear",
        RANKS,
        "train/test_fp8_events",
        *FEW_BITS,
    ),
    "megafp8/precision/grad_sink.py": ("precision/test_linear", "train/test_step", RANKS),
    "megafp8/precision/linear.py": (*_precision("test_linear", "test_recipes"), RANKS),
    "megafp8/precision/quantizer.py": (
        *_precision("test_linear", "test_recipes", "test_health"),
        RANKS,
    ),
    "megafp8/precision/recipes/*.py": (*_precision("test_recipes", "test_linear"), RANKS),
    "megafp8/precision/*.py": (*_precision(*PRECISION), RANKS),
    **{f"megafp8/fp8/{name}.py": ("fp8/test_check",) for name in ("check", "probe", "refute")},
    "megafp8/fp8/trainer.py": ("fp8/test_trainer",),
    "megafp8/fp8/*.py": ("fp8/test_recipe", "fp8/test_convert", "fp8/test_bits", "fp8/test_ranks"),
    "megafp8/parallel/sequence.py": (
        "parallel/test_pieces",
        RANKS,
        "parallel/test_sequence_parallel",
    ),
    "megafp8/parallel/tensor.py": ("parallel/test_pieces", RANKS, "parallel/test_tensor_parallel"),
    "megafp8/parallel/collectives.py": (
        "parallel/test_mesh",
        RANKS,
        "parallel/test_data_parallel",
        "parallel/test_context_parallel",
    ),
    "megafp8/parallel/fsdp.py": (RANKS, "parallel/test_fsdp"),
    "megafp8/parallel/scaled_data.py": ("optim/test_stored_ranks", "optim/test_stored_zero"),
    "megafp8/optim/stored_zero.py": ("optim/test_stored_zero", "optim/test_stored_ranks"),
    "megafp8/optim/stored_split.py": ("optim/test_stored_split",),
    "megafp8/optim/stored_owned.py": ("optim/test_stored_zero", "optim/test_stored_split"),
    "megafp8/optim/stored.py": FEW_BITS,
    "megafp8/optim/scaled_adam.py": ("optim/test_scaled_adam", *FEW_BITS),
    "megafp8/te_cpu/*.py": (
        "te_cpu/test_kernels",
        "te_cpu/test_loading",
        "backends/te/test_real",
    ),
}
LEFT_OUT = (
    "*/__init__.py",
    "*/__main__.py",
    "*/triton_*.py",
    "megafp8/precision/chain.py",
    "megafp8/precision/fused.py",
    "megafp8/precision/heads.py",
    "megafp8/te_cpu/wheel.py",
)


def files(root: Path) -> list[str]:
    """Return the paths of the files that are mutated, relative to `root`, sorted."""
    found = {str(path.relative_to(root)) for pattern in TESTS for path in root.glob(pattern)}
    return sorted(f for f in found if not any(fnmatchcase(f, p) for p in LEFT_OUT))


def tests_of(file: str) -> tuple[str, ...]:
    """Return the files of tests that must notice a change of `file`, quickest first."""
    names = next(tests for pattern, tests in TESTS.items() if fnmatchcase(file, pattern))
    return tuple(f"tests/{name}.py" for name in names)
