"""Keep the weights of Transformer Engine's layers in FP8 alone (`fp8_params`), in each layout.

    Replicated optimizer   a weight's own `copy_` quantizes its whole master (`TeBackend.stores`)
    ZeRO-1                 ranks have parts of masters, which Transformer Engine's function for
                           distributed optimizers quantizes (`TeFp8Weights`)
    FSDP                   ranks have rows of masters, cast before each gather (`TeGatheredFp8`)

In all three a master is rounded to the compute dtype first, and the ranks agree on the amax of
each whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megafp8.backends.te.layer import TeLayer, layers_in
from megafp8.backends.te.names import TeNames
from megafp8.backends.te.quantized import is_quantized
from megafp8.optim.fp8_weights import MasterPart
from megafp8.parallel.collectives import Axis
from megafp8.parallel.mesh import group_of

# Elements that one block of threads computes, as Transformer Engine calls its functions.
CHUNK = 2048 * 32
FORMATS = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}

Weights = Mapping[str, tuple[Any, int]]
"""By a weight's path: its module, and its column in the module's quantizers."""


def forget_staged_amax(param: torch.Tensor) -> None:
    """Set the staged amax of an FP8 weight to zero.

    Transformer Engine quantizes its own random weights when it makes a layer in FP8. With delayed
    scaling their amax waits for the next update, although these weights are never used.
    """
    amax = getattr(getattr(param, "_quantizer", None), "amax", None)
    if amax is not None:
        amax.zero_()


def fp8_weights(model: nn.Module) -> dict[nn.Parameter, TeLayer]:
    """Return the weights that Transformer Engine keeps in FP8, each with its layer."""
    return {
        param: layer
        for layer in layers_in(model)
        for param in layer.parameters()
        if is_quantized(param)
    }


class TeFp8Weights:
    """Keep Transformer Engine's weights in FP8 where each rank has parts of their masters."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = fp8_weights(model)
        self.params = list(self._layers)
        self._group: Any = None

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype of the weight's memory: bytes."""
        return torch.uint8

    def move(self, param: nn.Parameter, place: torch.Tensor) -> None:
        """Let the weight's row-wise bytes occupy `place`."""
        self._names(param).tensor_utils.replace_raw_data(param, place.view(param.shape))

    @torch.no_grad()
    def store(self, parts: Iterable[MasterPart], shards_of: Mapping[str, Axis]) -> None:
        """Quantize this rank's parts into the row-wise bytes, and agree on the amaxes.

        Transformer Engine's own function does both. It also drops the bytes in the other
        orientation, which the next forward pass makes again from those that were gathered.
        """
        if not self.params:
            return
        (shards,) = shards_of.values()  # there are no experts among them
        if shards.size == 1:
            for part in parts:
                part.param.copy_(part.master.view(part.param.shape).to(self._dtype(part.param)))
            return
        if self._group is None:
            self._group = group_of(shards)
        part_of = {part.param: part for part in parts}
        owned = [part_of.get(param) for param in self.params]
        self._names(self.params[0]).cast_masters(
            list(self.params),
            [None if part is None else part.master for part in owned],
            [None if part is None else part.begin for part in owned],
            self._group,
        )

    def _dtype(self, param: nn.Parameter) -> torch.dtype:
        return self._layers[param].dtype

    def _names(self, param: nn.Parameter) -> TeNames:
        return self._layers[param].region.names


class TeGatheredFp8:
    """Cast this rank's rows of a weight before FSDP gathers them as bytes.

    What is gathered becomes a quantized tensor of Transformer Engine, which its module multiplies
    as it is. The scale is the one that `agree_on_scale` has fixed, so that all gathers of a step
    have the same bits.
    """

    def __init__(
        self, names: TeNames, module: Any, column: int, compute_dtype: torch.dtype
    ) -> None:
        self.compute_dtype = compute_dtype
        self._names, self._module, self._column = names, module, column
        self._cast: Any = None  # a quantizer whose scale nothing else changes
        self._transposed_IO = torch.empty(0)

    def _quantizer(self) -> Any:
        return self._module.quantizers["scaling_fwd"][self._column]

    @torch.no_grad()
    def agree_on_scale(self, amax: torch.Tensor, part: torch.Tensor) -> None:
        """Fix the scale until the next call.

        `amax` (0-d FP32) is that of all ranks' parts. With delayed scaling it is recorded for the
        next update, as the cast of the whole weight would record it, and the scale is the present
        one; otherwise the scale follows from it.
        """
        quantizer = self._quantizer()
        tensors = self._names.float8
        if isinstance(quantizer, tensors.Float8Quantizer):
            quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.view_as(quantizer.amax)))
            scale = quantizer.scale.detach().clone().reshape(1)
        else:
            scale, unused = torch.empty_like(amax.view(1)), torch.empty_like(amax.view(1))
            largest = torch.finfo(FORMATS[quantizer.dtype.name]).max
            self._names.extension.multi_tensor_compute_scale_and_scale_inv(
                CHUNK,
                torch.zeros(1, dtype=torch.int, device=amax.device),
                [[amax.view(1)], [scale], [unused]],
                largest,
                quantizer.force_pow_2_scales,
                quantizer.amax_epsilon,
            )
        self._cast = tensors.Float8Quantizer(
            scale, torch.zeros_like(scale), quantizer.dtype, rowwise=True, columnwise=True
        )

    def bytes_of(self, part: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight as bytes; `part` is rounded to the compute dtype."""
        payload = torch.empty(part.shape, dtype=torch.uint8, device=part.device)
        if part.numel():
            rows_alone = self._cast.copy()
            rows_alone.set_usage(rowwise=True, columnwise=False)
            flat = rows_alone.create_tensor_from_data(payload.view(1, -1), part.dtype)
            rows_alone.update_quantized(part.reshape(1, -1), flat)
        return payload

    def receive(
        self, payload_PI: torch.Tensor, rows: int, dtype: torch.dtype, out: Any
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the weight made of gathered bytes, and the memory that FSDP frees after use.

        The weight has the first `rows` rows. `out` is what takes the parameter's place already,
        to be filled again, or None. The bytes in the other orientation, where a GPU's products
        need them, are in memory that FSDP frees too.
        """
        payload_OI = payload_PI[:rows]
        if out is None:
            self._transposed_IO = payload_OI.t().contiguous()
            names_recipe = self._quantizer().copy()  # it casts nothing
            names_recipe.set_usage(rowwise=True, columnwise=True)
            out = self._names.float8.Float8Tensor(
                shape=payload_OI.shape,
                dtype=dtype,
                requires_grad=False,
                data=payload_OI,
                fp8_scale_inv=self._cast.scale.reciprocal(),
                fp8_dtype=self._cast.dtype,
                quantizer=names_recipe,
            )
        else:
            out._data, out._transpose = payload_OI, self._transposed_IO
            out._scale_inv = self._cast.scale.reciprocal()
            # Its bytes in the other orientation are of the last gather, and are written again.
            out._reset_caches()
            # A backward pass does not make them of every weight: FC1's are expected to be there.
            out.update_usage(columnwise_usage=True)
        return out, (payload_PI, self._transposed_IO)


@torch.no_grad()
def quantize_without_values(layer: nn.Module, weights: Weights) -> None:
    """Quantize the weights of a layer on the meta device, which Transformer Engine leaves out."""
    for path, (module, column) in weights.items():
        param = layer.get_parameter(path)
        quantizer = _quantizer_of_weight(module, column)
        setattr(module, path.rpartition(".")[2], nn.Parameter(quantizer(param.data)))


def to_be_gathered(
    weights: Weights, names: TeNames, dtype: torch.dtype
) -> dict[str, TeGatheredFp8]:
    """Return how each of a layer's weights is cast before FSDP gathers it.

    The results go by the weights' paths in the `TeLayer`. The weights are plain ones, which have no
    values yet; FSDP shards their FP32 masters.
    """
    found = {}
    for path, (module, column) in weights.items():
        _quantizer_of_weight(module, column)
        found[f"layer.{path}"] = TeGatheredFp8(names, module, column, dtype)
    return found


def _quantizer_of_weight(module: Any, column: int) -> Any:
    """Return a weight's quantizer, set as Transformer Engine sets it for weights with values."""
    quantizer = module.quantizers["scaling_fwd"][column]
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    return quantizer


def leave_meta(layer: nn.Module, device: torch.device) -> None:
    """Put tensors that are no parameters on `device`: empty ones, in place of biases."""
    for module in layer.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                assert value.numel() == 0, f"{name} would have no values"
                setattr(module, name, torch.empty_like(value, device=device))
