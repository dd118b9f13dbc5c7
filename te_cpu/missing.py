"""Names that the stand-in lacks: they can be imported and passed on, and using one is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_cpu.errors import MissingKernelError

# What leads to functions that are not here: the beginning of a name, and the setting.
SETTINGS = {
    "fused_attn": "cuDNN's attention (NVTE_FUSED_ATTN=1, or FP8 attention: fp8_dpa, fp8_mha, which "
    "NVTE_UnfusedDPA_Emulate_FP8=1 imitates in plain torch)",
    "fa_prepare": "flash attention (NVTE_FLASH_ATTN=1)",
    "thd_": "packed sequences (qkv_format='thd') with context parallelism",
    "fused_topk_with_score_function_qb": "balancing experts by quantiles (qb_histogram)",
    "group_quantize": "a GroupedTensor (mixture of experts)",
    "CommOverlap": "overlapping communication with products (ub_tp_comm_overlap)",
    "bulk_overlap": "overlapping communication with products (ub_tp_comm_overlap)",
    "mxfp8": "MXFP8 weights as the only copy, in parts (quantized_model_init)",
    "nvfp4": "NVFP4 weights as the only copy, in parts (quantized_model_init)",
    "init_nvshmem": "NVSHMEM",
    "Float8BlockScaleTensorFormat.COMPACT": "sequence parallelism with the blockwise recipe",
}


def missing(name: str, detail: str = "") -> MissingKernelError:
    """Return the error for `name`, with the setting that leads there where it is known."""
    reason = next((setting for start, setting in SETTINGS.items() if name.startswith(start)), "")
    led_by = f" It comes from {reason}." if reason else ""
    return MissingKernelError(
        f"transformer_engine_torch.{name}{detail}: the CPU stand-in for Transformer Engine's "
        f"kernels does not have it.{led_by} Leave that setting out, or run on an NVIDIA GPU"
    )


class Unusable:
    """Raise an error of its own for most of what Python can do with an object.

    A subclass says which error by its method `_error`, and allows what it must. Python asks the
    class of the second argument of `isinstance`, so that these raise the error too.
    """

    _error: Callable[[], MissingKernelError]

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise self._error()

    __call__ = __index__ = __bool__ = __iter__ = __len__ = __contains__ = _raise
    __getitem__ = __setitem__ = __delitem__ = __next__ = __enter__ = __int__ = __float__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __instancecheck__ = __subclasscheck__ = _raise


class Missing(Unusable):
    """Stand for a name of the compiled extension that is not supplied.

    Types are annotations only, so it takes part in unions and comparisons for equality.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def _error(self) -> MissingKernelError:
        return missing(self._name)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return type(self)(f"{self._name}.{key}")

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other._name == self._name

    def __hash__(self) -> int:
        return hash(self._name)


class MissingTriton(Missing):
    """Stand for a kernel in Triton, which runs on a GPU alone."""

    def _error(self) -> MissingKernelError:
        return MissingKernelError(
            f"Transformer Engine's Triton kernel {self._name}: the CPU stand-in for its kernels "
            "does not have it. Leave out what leads there, or run on an NVIDIA GPU"
        )


class ImportPhase:
    """Tell the placeholders of one import whether it is over."""

    is_over = False


class FromAbsentPackage(Unusable):
    """Stand for what a package that is not installed would have defined.

    Decorators and constructors run while Transformer Engine is imported, so a call gives another
    such object then, and the object is true and equal to itself. Later, each use is an error that
    names the package, as the launch of a kernel is at any time.
    """

    def __init__(self, name: str, phase: ImportPhase) -> None:
        self.__dict__.update(_name=name, _phase=phase)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse_later()
        return FromAbsentPackage(self._name, self._phase)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return FromAbsentPackage(f"{self._name}.{key}", self._phase)

    def __bool__(self) -> bool:
        self._refuse_later()
        return True

    def __eq__(self, other: object) -> bool:
        self._refuse_later()
        return self is other

    __hash__ = object.__hash__

    def _refuse_later(self) -> None:
        if self._phase.is_over:
            raise self._error()

    def _error(self) -> MissingKernelError:
        package = self._name.split(".")[0]
        return MissingKernelError(
            f"{self._name}: the package {package} is not installed. Install {package}"
        )
