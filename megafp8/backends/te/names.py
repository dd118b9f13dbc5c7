"""Collect Transformer Engine's names, which differ between its versions (2.4 to 2.20)."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megafp8.errors import ConfigError
from megafp8.specs.gpus import why_not_in_te
from megafp8.specs.te_versions import (
    NEWEST_TRIED,
    installed_version,
    release_of,
    why_not_version,
)

INSTALL = (
    'Install it (pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]==2.20.2", '
    "see docs/reference/backends.md), or use model.fp8_backend=native"
)


@dataclass(frozen=True)
class TeNames:
    """Hold everything that megafp8 uses of Transformer Engine.

    `forward_index` and `backward_index` say which
    column of a module's scaling tensors is which (GEMM1_INPUT, GRAD_OUTPUT1, …). `global_state` is
    the class FP8GlobalStateManager, whose `reduce_and_update_fp8_tensors` is the update of delayed
    scaling.
    """

    version: str
    recipe: Any  # the module transformer_engine.common.recipe
    transformer_layer: Callable[..., torch.nn.Module]
    forward_index: Any
    backward_index: Any
    global_state: Any
    extension: Any  # the compiled module transformer_engine_torch
    checkpoint: Callable[..., Any]  # recomputes a part of the model in its backward pass
    tensor_utils: Any  # the module transformer_engine.pytorch.tensor.utils
    float8: Any  # the module with Float8Tensor and its quantizers
    _autocast: Callable[..., AbstractContextManager[Any]]
    _autocast_is_new: bool
    _model_init: Callable[..., AbstractContextManager[Any]]

    def autocast(
        self, *, enabled: bool, recipe: object, group: object
    ) -> AbstractContextManager[Any]:
        """Return the FP8 region, a context at whose exit amaxes are reduced over `group`.

        For Transformer Engine a `group` of None means all ranks of the run, never one alone.
        """
        if self._autocast_is_new:
            return self._autocast(enabled=enabled, recipe=recipe, amax_reduction_group=group)
        return self._autocast(enabled=enabled, fp8_recipe=recipe, fp8_group=group)

    def cast_masters(
        self,
        weights: list[torch.Tensor],
        masters: list[torch.Tensor | None],
        begins: list[int | None],
        group: object,
    ) -> None:
        """Quantize flat parts of masters into FP8 weights, and agree on amaxes over `group`.

        A part begins at the element `begins` of its weight; None stands for a weight of which
        this rank has no part.
        """
        utils = self.tensor_utils
        cast = getattr(utils, "quantize_master_weights", None) or utils.cast_master_weights_to_fp8
        cast(weights, masters, begins, group)

    def initialize_user_buffers(
        self, tokens: int, width: int, tp_size: int, dtype: torch.dtype, *, in_fp8: list[bool]
    ) -> None:
        """Make the buffers of this process through which products and messages overlap.

        They hold `tokens` of all tensor-parallel ranks, of `width` numbers each. `in_fp8` says
        which layers there are: in FP8, in `dtype`, or both.
        """
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        modes = getattr(base, "UserBufferQuantizationMode", None)
        chosen: dict[str, Any] = {"use_fp8": any(in_fp8)}
        if modes is not None:
            chosen = {"quantization_modes": [modes.FP8 if fp8 else modes.NONE for fp8 in in_fp8]}
        elif len(in_fp8) > 1:
            raise ConfigError(
                "model.ub_tp_comm_overlap",
                True,
                f"Transformer Engine {self.version} has one kind of user buffers, and some layers "
                "are not in FP8",
                "Leave it out, or use a later version",
            )
        base.initialize_ub([tokens, width], tp_size, dtype=dtype, **chosen)

    def model_init(self, recipe: object) -> AbstractContextManager[Any]:
        """Return a context in which new modules keep their weights in FP8 alone."""
        return self._model_init(enabled=True, recipe=recipe)


def names_in(pytorch: Any, recipe: Any, extension: Any, version: str) -> TeNames:
    """Return the names as this version has them.

    Later versions have `autocast`, earlier ones `fp8_autocast`.
    """
    is_new = hasattr(pytorch, "autocast")
    init = getattr(pytorch, "quantized_model_init", None) or pytorch.fp8_model_init
    return TeNames(
        version=version,
        recipe=recipe,
        transformer_layer=pytorch.TransformerLayer,
        forward_index=extension.FP8FwdTensors,
        backward_index=extension.FP8BwdTensors,
        extension=extension,
        checkpoint=pytorch.checkpoint,
        tensor_utils=importlib.import_module("transformer_engine.pytorch.tensor.utils"),
        float8=importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor"),
        global_state=pytorch.module.base.FP8GlobalStateManager,
        _autocast=pytorch.autocast if is_new else pytorch.fp8_autocast,
        _autocast_is_new=is_new,
        _model_init=init,
    )


def kernels_on_cpu() -> ModuleType:
    """Return `on_cpu`, which runs Transformer Engine's Python over the kernels of `te_cpu`.

    Raises:
        ConfigError: The package te-on-cpu is not installed, or cannot be imported. On a GPU no run
            needs it.
    """
    try:
        return importlib.import_module("megafp8.backends.te.on_cpu")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "te_cpu":
            raise
        is_there = installed_version("te-on-cpu") or importlib.util.find_spec("te_cpu")
        why = f"cannot be imported ({_first_line(error)})" if is_there else "is not installed"
        raise ConfigError(
            "model.fp8_backend",
            "te",
            f"needs the package te-on-cpu where there is no GPU, and it {why}",
            "In a clone: pip install -e ./te_cpu; or set model.fp8_backend=native",
        ) from error


def import_te() -> TeNames:
    """Import Transformer Engine and return its names.

    torch is imported first, so that Transformer Engine finds its libraries. It calls two
    collectives by names that torch 2.13 warns about.
    """
    for older in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", rf".*{older}.*deprecated", FutureWarning)
    return names_in(
        importlib.import_module("transformer_engine.pytorch"),
        importlib.import_module("transformer_engine.common.recipe"),
        importlib.import_module("transformer_engine_torch"),
        importlib.metadata.version("transformer-engine"),
    )


def why_te_cannot(
    device: torch.device, recipe: str | None, power_2_scale: bool = True
) -> str | None:
    """Return why Transformer Engine cannot run a class of recipes here, or None where it can."""
    if (reason := why_not_installed(device)) is not None:
        return reason
    try:
        import_te()
    except Exception as error:  # its own checks are asserts; a broken package is a reason
        version = importlib.metadata.version("transformer-engine")
        return f"transformer-engine {version} cannot be loaded ({_first_line(error)}). {INSTALL}"
    capability = torch.cuda.get_device_capability(device)
    if recipe is None or (reason := why_not_in_te(capability, recipe, power_2_scale)) is None:
        return None
    return f"this GPU has compute capability {capability[0]}.{capability[1]}, and {reason}"


def why_not_installed(device: torch.device) -> str | None:
    """Return why Transformer Engine cannot run here, as far as it is known without importing it."""
    if device.type != "cuda":
        return "Transformer Engine runs on NVIDIA GPUs alone, and this run is on a CPU"
    if (version := installed_version()) is None:
        return f"the package transformer-engine is not installed. {INSTALL}"
    if (reason := why_not_version(version)) is not None:
        return f"transformer-engine {reason}. {INSTALL}"
    return None


def describe_version(version: str) -> str:
    """Return what runs on a GPU, for a run's header, and whether the version was tried."""
    newest = ".".join(map(str, NEWEST_TRIED))
    is_new = release_of(version) > NEWEST_TRIED
    untried = f" (newer than {newest}, the newest version that was tried)" if is_new else ""
    return f"Transformer Engine {version} layers{untried}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
