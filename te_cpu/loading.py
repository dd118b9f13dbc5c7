"""Imports Transformer Engine's Python over the stand-in for its compiled extension."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from te_cpu import cuda, triton_functions, wheel
from te_cpu.errors import VersionError
from te_cpu.extension import make_extension
from te_cpu.missing import FromAbsentPackage, ImportPhase, missing
from te_cpu.torch_private import frame_of_caller
from te_cpu.versions import DEFAULT_VERSION, release_of
from te_cpu.wheel import EXTENSION, PACKAGE, Sources, loaded

NEEDED = ("einops", "packaging", "pydantic")
# The last one only keeps tensor-parallel layers from warning about the order of CUDA's queues.
LASTING = {"NVTE_TORCH_COMPILE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# Transformer Engine's own switches against looking for compiled libraries while it is imported.
WHILE_IMPORTING = {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none"}
# Imported at the top of files that are not needed here: kernels in Triton, export to ONNX.
OPTIONAL = (
    "triton",
    "triton.language",
    "triton.language.core",
    "triton.language.standard",
    "onnx",
    "onnxscript",
)


def describe() -> str:
    """Return what runs, for a run's header: "Transformer Engine 2.12.0, its own Python; …"."""
    sources = loaded()
    assert sources is not None, "load() comes first"
    unknown = "" if sources.is_known else " (a version that is not among the tried ones)"
    return (
        f"Transformer Engine {sources.version}{unknown}, its own Python; "
        "kernels emulated on the CPU"
    )


def lacking() -> list[str]:
    """Return which of the packages that every version needs are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def load(version: str = DEFAULT_VERSION) -> ModuleType:
    """Return `transformer_engine.pytorch` of `version`, on the CPU; each call returns one module.

    The path of a wheel (`….whl`) may be given in place of a version.

    Raises:
        VersionError: The version cannot be had, another one is imported already, or a package that
            it needs is missing.
    """
    if (already := loaded()) is not None:
        if already.version != wheel.version_of(version):
            reason = f"{already.version} is loaded in this process already"
            raise VersionError(PACKAGE, version, reason, "Use one version in a process")
        return importlib.import_module("transformer_engine.pytorch")
    if "transformer_engine" in sys.modules:
        reason = "an installed transformer_engine has been imported in this process already"
        raise VersionError(PACKAGE, version, reason, "Load the CPU's first, or in another process")
    if missing := lacking():
        names = " ".join(missing)
        raise VersionError(
            PACKAGE,
            version,
            f"its Python needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            "not installed",
            f"Run `pip install {names}`, or install te-on-cpu with what it needs",
        )
    sources = wheel.sources(version)
    try:
        return _import(sources)
    except (ImportError, AttributeError, AssertionError, TypeError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), "")
        reason = f"its Python cannot be loaded here ({type(error).__name__}: {first})"
        absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        lacks = "" if absent.startswith("transformer_engine") else absent.partition(".")[0]
        hint = f"Run `pip install {lacks}`, or use" if lacks else "Use"
        raise VersionError(PACKAGE, version, reason, f"{hint} {DEFAULT_VERSION}") from error


def _import(sources: Sources) -> ModuleType:
    """Import it; what the import changes in this process stays, but is undone where it fails."""
    with ExitStack() as undo:
        undo.callback(_set_environment(LASTING))
        folder = str(sources.folder)
        sys.path.insert(0, folder)  # its files ask importlib.metadata for their version
        undo.callback(sys.path.remove, folder)
        undo.callback(_forget_modules)
        cuda.install(undo)
        quiet = warnings.catch_warnings()
        with _environment(WHILE_IMPORTING), quiet, _optional_packages(), _no_compiled_functions():
            warnings.simplefilter("ignore")
            common: Any = importlib.import_module("transformer_engine.common")
            common.load_framework_extension = lambda framework: None
            sys.modules[EXTENSION] = make_extension(sources)
            imported = importlib.import_module("transformer_engine.pytorch")
        _supply_recipes()
        triton_functions.supply(release_of(sources.version))
        _let_storages_stay()
        _leave_out_flash_attention()
        _name_attention_in_fp8(imported)
        for owner in (imported, sys.modules["transformer_engine.pytorch.graph"]):
            owner.__dict__["make_graphed_callables"] = _refuse_graphs
        sys.path.remove(folder)
        sys.path.insert(1, folder)  # the first one is the program's own
        undo.pop_all()
    return imported


def _supply_recipes() -> None:
    """Let Transformer Engine's checks for MXFP8 and NVFP4 pass, whose kernels are here.

    The recipe that it chooses where none is given stays that of an H100.
    """
    for name in ("quantization", "fp8"):  # the name of the file since 2.9, and before
        module: Any = sys.modules.get(f"transformer_engine.pytorch.{name}")
        for check in ("check_mxfp8_support", "check_nvfp4_support"):
            if (real := getattr(module, check, None)) is not None:
                setattr(module, check, _passed_but_by_default(real))


def _let_storages_stay() -> None:
    """Give storages that are no tensors a method `to`, since their values are asked of "cuda".

    From 2.16 on Transformer Engine brings what is not on a GPU there before it dequantizes, and a
    GPU never has a storage for which that would be so.
    """
    for name in (
        "mxfp8_tensor_storage.MXFP8TensorStorage",
        "nvfp4_tensor_storage.NVFP4TensorStorage",
    ):
        file, _, kind = name.partition(".")
        module = sys.modules.get(f"transformer_engine.pytorch.tensor.storage.{file}")
        if (storage := getattr(module, kind, None)) is not None:
            storage.to = _method_to(storage)


def _method_to(storage: Any) -> Callable[..., Any]:
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_tensor = isinstance(self, torch.Tensor)
        return super(storage, self).to(*args, **kwargs) if is_tensor else self

    return to


def _leave_out_flash_attention() -> None:
    """Let attention run as plain torch operations, also where flash-attn is installed.

    No variable of the environment says so, since programs set these themselves; cuDNN's attention
    is left out by `get_fused_attn_backend`.
    """
    for name in ("attention.dot_product_attention.utils", "dot_product_attention.utils"):
        module = sys.modules.get(f"transformer_engine.pytorch.{name}")
        utilities: Any = getattr(module, "FlashAttentionUtils", None)
        for installed in ("is_installed", "v3_is_installed", "v4_is_installed"):
            if hasattr(utilities, installed):
                setattr(utilities, installed, False)


def _name_attention_in_fp8(te: Any) -> None:
    """Name the missing kernel where attention in FP8 finds none: only cuDNN's is left to it."""
    attention, state = te.DotProductAttention, te.module.base.FP8GlobalStateManager
    real = attention.forward

    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        recipe = state.get_fp8_recipe() if state.is_fp8_enabled() else None
        if not (getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)):
            return real(*args, **kwargs)
        try:
            return real(*args, **kwargs)
        except ValueError as error:
            if str(error).startswith("No dot product attention backend is available"):
                raise missing("fused_attn_fwd") from error
            raise

    attention.forward = forward


def _refuse_graphs(*args: Any, **kwargs: Any) -> None:
    """Refuse before layers are made ready for a graph: after an error they would stay without FP8.

    Raises:
        MissingKernelError: Always.
    """
    cuda.CUDAGraph()


def _passed_but_by_default(real: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
    def is_by_default() -> bool:
        return frame_of_caller(2).f_code.co_name == "get_default_fp8_recipe"  # type: ignore[no-any-return]

    torch.compiler.assume_constant_result(is_by_default)

    def check() -> tuple[bool, str]:
        return real() if is_by_default() else (True, "")

    return check


def _forget_modules() -> None:
    """Remove Transformer Engine's modules and the stand-in for its extension."""
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


@contextmanager
def _no_compiled_functions() -> Iterator[None]:
    """Leave functions as they are where `torch.jit.script` would compile them at import.

    Compiled functions change their roundings after a few calls, when they have been profiled, so a
    run that continues in a new process would not continue bit for bit.
    """
    script = torch.jit.script
    jit: Any = torch.jit
    jit.script = lambda function, *args, **kwargs: function
    try:
        yield
    finally:
        jit.script = script


def _set_environment(values: dict[str, str]) -> Callable[[], None]:
    """Set environment variables; the result sets them as they were before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    return undo


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    undo = _set_environment(values)
    try:
        yield
    finally:
        undo()


@contextmanager
def _optional_packages() -> Iterator[None]:
    """Put a placeholder into sys.modules for each missing package, while the context is open.

    The packages are those of OPTIONAL that are not installed; files that import one at their top
    load with its placeholder, whose attributes are `FromAbsentPackage`. The placeholders are
    removed at the end, so that no other code takes the packages for installed.
    """
    absent = {name.split(".")[0] for name in OPTIONAL}
    absent = {name for name in absent if importlib.util.find_spec(name) is None}
    made = [name for name in OPTIONAL if name.split(".")[0] in absent]
    phase = ImportPhase()
    for name in made:
        sys.modules[name] = _absent_package(name, phase)
    try:
        yield
    finally:
        phase.is_over = True
        for name in made:
            del sys.modules[name]


def _absent_package(name: str, phase: ImportPhase) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__["__version__"] = "0"
    module.__spec__ = ModuleSpec(name, None, is_package=True)

    def attribute(key: str) -> FromAbsentPackage:
        if key.startswith("__"):
            raise AttributeError(key)
        return FromAbsentPackage(f"{name}.{key}", phase)

    module.__dict__["__getattr__"] = attribute
    return module
