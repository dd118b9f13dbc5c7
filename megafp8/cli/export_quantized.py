"""Plan an export in FP8 or FP4, and report its errors and its loss beside BF16's.

Other programs quantize a BF16 export, too, but without the recipe and the scales of the training.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megafp8.cli.job import number_in
from megafp8.errors import RunError, UserError
from megafp8.files import write_json_atomically
from megafp8.secrets import say
from megafp8.specs import GPTSpec

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    from megafp8.checkpoint.huggingface_files import Quantization
    from megafp8.checkpoint.reader import Reader
    from megafp8.checkpoint.serving import ServingFormat, ServingWeights
    from megafp8.checkpoint.serving_blocks import BlockFormat

FP8 = "fp8"
BLOCK_KINDS = ("mxfp8", "nvfp4")
QUANTIZED = (FP8, *BLOCK_KINDS)
LAYOUTS = ("compressed-tensors", "modelopt")
REPORT = "fp8_export.json"
SAMPLES = 64
OPTIONS = {
    "fp8_scales": (FP8,), "scale_fmt": (FP8,), "fp8_inputs": (FP8, "nvfp4"), "layout": BLOCK_KINDS,
    "validation_samples": QUANTIZED,
}  # fmt: skip
"""The options of quantized weights, each with the dtypes that have it."""
SCALES = {"tensor": "one scale for each tensor", "channel": "one scale for each row",
           "block": "one scale for each 128 x 128 elements"}  # fmt: skip
_NAMES = {
    **{scales: f"E4M3, {said}" for scales, said in SCALES.items()},
    "mxfp8": "E4M3, one power of two for each 32 elements of a row",
    "nvfp4": "E2M1, one scale in E4M3 for each 16 elements of a row and one number for each linear",
}
_OF_EXPERTS = (
    "--fp8-inputs static: the model has experts. A run multiplies the input of an expert's second "
    "linear by the router's weight, and servers multiply its output: their inputs are larger than "
    "those of the run"
)
Inputs = tuple[Mapping[str, Any], str]
"""What becomes of the linears' inputs, for the report and in words."""
_POWERS = ", as powers of two where its kernels heed scale_fmt"
_DYNAMIC: Inputs = {"scales": "dynamic"}, "scales are dynamic, which the server computes"
_IN_BF16: Inputs = {"format": "bf16"}, "in BF16"


class QuantizedOptions(NamedTuple):
    """Hold what the user asks for; without `fp8_inputs` they are what the run's recipe has."""

    dtype: Literal["fp8", "mxfp8", "nvfp4"] = "fp8"
    fp8_scales: Literal["tensor", "channel", "block"] = "channel"
    scale_fmt: Literal["float", "ue8m0"] = "float"
    fp8_inputs: Literal["static", "dynamic"] | None = None
    layout: Literal["compressed-tensors", "modelopt"] = "compressed-tensors"
    validation_samples: int = SAMPLES


def add_quantized_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only quantized weights have, but for their dtype."""
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="whose names and configuration mxfp8 and nvfp4 get (compressed-tensors)",
    )
    parser.add_argument(
        "--fp8-scales",
        choices=list(SCALES),
        help="what has a scale of its own: each tensor or channel (compressed-tensors), or each "
        "block of 128 x 128 as DeepSeek's (channel)",
    )
    parser.add_argument(
        "--scale-fmt",
        choices=("float", "ue8m0"),
        help="with --fp8-scales block: any scales, or powers of two as DeepSeek-V3.1's, which are "
        "those of the recipe blockwise (float)",
    )
    parser.add_argument(
        "--fp8-inputs",
        choices=("static", "dynamic"),
        help="scales of the linears' inputs: from the run's amax histories, or computed for each "
        "token by the server (static if the recipe has histories, except with blocks); with nvfp4 "
        "static ones are measured over validation data, and inputs are in BF16 without",
    )
    parser.add_argument(
        "--validation-samples",
        type=number_in(int, lambda n: n >= 0, "0 or more"),
        metavar="N",
        help="samples of the run's validation data to compare over; 0 compares nothing "
        f"({SAMPLES})",
    )


def quantized_options(
    options: argparse.Namespace, named_by: str = "--dtype", of_all: Collection[str] = ()
) -> QuantizedOptions | None:
    """Return what the options of quantized weights say; None where the export has none.

    The option `named_by` has named their dtype. Those `of_all` are options of every dtype.

    Raises:
        RunError: One of them has no effect.
    """
    given = {name: getattr(options, name) for name in OPTIONS}
    for name, dtypes in OPTIONS.items():
        is_idle = options.dtype not in dtypes and name not in of_all
        if given[name] is not None and is_idle:
            flag = f"--{name.replace('_', '-')}"
            raise RunError(
                f"{flag} {given[name]}: has no effect with {named_by} {options.dtype}. Leave it "
                f"out, or give {named_by} {' or '.join(dtypes)}"
            )
    if options.dtype not in QUANTIZED:
        return None
    told = {name: value for name, value in given.items() if value is not None}
    asked = QuantizedOptions(options.dtype, **told)
    if asked.dtype == "nvfp4" and asked.fp8_inputs == "dynamic":
        raise RunError(
            "--fp8-inputs dynamic: NVFP4 has one FP32 number for all inputs of a linear. Give "
            "--fp8-inputs static, which measures it, or leave it out: inputs are in BF16 then"
        )
    if asked.dtype == "nvfp4" and asked.fp8_inputs and not asked.validation_samples:
        raise RunError(
            "--validation-samples 0: the inputs of --fp8-inputs static are measured over these "
            "samples. Give some, or leave --fp8-inputs out: inputs are in BF16 then"
        )
    if asked.fp8_scales != "block" and asked.scale_fmt != "float":
        raise RunError(
            f"--scale-fmt {asked.scale_fmt}: is a format of scales of blocks, as DeepSeek-V3.1 has "
            "them. Add --fp8-scales block, or leave it out"
        )
    if asked.fp8_scales == "block" and asked.fp8_inputs == "static":
        raise RunError(
            "--fp8-inputs static: weights in blocks have inputs whose scales the server computes. "
            "Give --fp8-inputs dynamic, or --fp8-scales tensor or channel"
        )
    return asked


@dataclasses.dataclass
class QuantizedExport:
    """Hold the format of an export, and what has been written."""

    reader: Reader
    spec: GPTSpec
    fmt: ServingFormat | BlockFormat
    weights: ServingWeights
    inputs: Inputs
    num_samples: int
    dtype: str
    trained_in: list[str]  # recipes whose weights have other numbers or scales

    @property
    def quantized(self) -> Quantization:
        """Return what writes the weights."""
        from megafp8.checkpoint.huggingface_files import Quantization

        return Quantization(self.fmt.quantization_config(self.spec), self.weights.encode)

    def files(self) -> dict[str, Any]:
        """Return the files beside those of transformers by their names, with their content."""
        return {**self.fmt.files(self.spec), REPORT: self.record()}

    def record(self) -> dict[str, Any]:
        """Return the content of the report's file, without the loss."""
        return {
            "checkpoint_step": self.reader.step,
            "weights": {
                "format": "e2m1" if self.dtype == "nvfp4" else "e4m3",
                "scales": self.fmt.scales,
                "has_powers_of_two": self.fmt.has_powers,
            },
            "inputs": self.inputs[0],
            "linears_in_bf16": sorted(self.fmt.kept),
            "errors": [error._asdict() for error in self.weights.errors],
        }

    def _words(self) -> str:
        words = _NAMES[self.fmt.scales]
        return words.replace("one scale", "one power of two") if self.fmt.has_powers else words

    def lines(self) -> Iterator[str]:
        """Yield what was written, and the errors of each layer."""
        kept = len(self.fmt.kept)
        more = ", routers" if self.spec.moe is not None else ""
        more += f", and {kept} linears that the run computed in high precision" if kept else ""
        if any(".experts." in name for name in self.fmt.kept):
            more += " or that are experts of one layer with such"
        yield (
            f"  weights of {len(self.weights.errors)} linears in {self._words()}; in "
            f"BF16: embedding, head, norms, biases{more}"
        )
        yield f"  inputs: {self.inputs[1]}"
        yield "  errors of weights: largest, mean, and mean over the weights' mean magnitude"
        for layer in range(self.spec.num_layers):
            own = [e for e in self.weights.errors if e.name.startswith(f"model.layers.{layer}.")]
            if own:
                largest = max(error.largest for error in own)
                mean = sum(error.mean for error in own) / len(own)
                share = sum(error.relative for error in own) / len(own)
                yield f"    layer {layer}: {largest:.2e}, {mean:.2e}, {share:.2%}"

    def notes(self) -> Iterator[str]:
        """Yield what the user should know of programs that load the folder."""
        from megafp8.checkpoint.serving import partial_blocks

        if self.trained_in:
            yield (
                f"note: the run trained in {' and '.join(self.trained_in)}, and these weights are "
                f"{self._words().replace(',', ' with', 1)}, cast from the FP32 masters. "
                "They have other rounding errors than the run had"
            )
        odd = partial_blocks(self.spec, self.fmt.kept) if self.fmt.scales == "block" else []
        if odd:
            yield (
                f"note: {', '.join(odd)}: sizes that are no multiples of 128 have smaller blocks "
                "at the ends, as in DeepSeek-V3. transformers on a CPU (5.23) refuses such weights "
                "or reads blocks of equal sizes from them, and vLLM may refuse them in QKV, gate "
                "and up, or over several GPUs. --fp8-scales channel has no such limits"
            )

    def report_loss(self, folder: Path) -> str:
        """Compute both losses, add them to the report's file, and return a line about them."""
        losses: dict[str, Any] = {}
        try:
            losses = self._losses(folder)
            apart = losses[self.dtype] - losses["bf16"]
            line = (
                f"  loss over {losses['num_samples']} samples of the run's validation data: "
                f"BF16 {losses['bf16']:.4f}, {self.dtype.upper()} {losses[self.dtype]:.4f} "
                f"({apart:+.4f})"
            )
        except UserError as error:
            losses = {"why_not": str(error)}
            line = f"note: no loss was computed: {error}"
        write_json_atomically(folder / REPORT, {**self.record(), "loss": losses})
        return line

    def _losses(self, folder: Path) -> dict[str, Any]:
        import torch

        from megafp8.train.load_model import load_model
        from megafp8.train.recorded import validation_data
        from megafp8.train.served import mean_loss, served_model

        data = validation_data(self.reader, self.num_samples, say)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        plain = load_model(self.reader, torch.bfloat16, device)
        bf16 = mean_loss(plain, data.batches, device)
        del plain  # one of the two is in memory at a time
        served = mean_loss(served_model(folder, self.spec, self.fmt, device), data.batches, device)
        return {"bf16": bf16, self.dtype: served, "num_samples": data.num_samples}


def plan_quantized(
    reader: Reader, spec: GPTSpec, asked: QuantizedOptions, family: str | None
) -> QuantizedExport:
    """Return the export of a checkpoint's model with quantized weights.

    Raises:
        UserError: The model cannot be exported so, or there are no histories for static scales.
    """
    from functools import partial

    import torch

    from megafp8.checkpoint.serving import BLOCK, ServingFormat, ServingWeights, check_can_be_fp8
    from megafp8.specs.recipes import RECIPES, find_recipe
    from megafp8.specs.traits import Scales
    from megafp8.train.load_model import read_tensor
    from megafp8.train.recorded import (
        has_histories,
        linears_in_bf16,
        other_formats,
        own_casts,
        recorded_inputs,
        recorded_values,
    )

    values = recorded_values(reader)
    kept = linears_in_bf16(spec, values)
    check_can_be_fp8(spec, kept, family, asked.dtype)
    if asked.dtype != FP8:
        return _plan_blocks(reader, spec, asked, kept)
    if asked.fp8_inputs == "static" and spec.moe is not None:
        raise RunError(f"{_OF_EXPERTS}. Give --fp8-inputs dynamic")
    known = has_histories(reader, values) and spec.moe is None
    if asked.fp8_inputs == "static" and not known:
        recipe = values["model.fp8_recipe"] if values["model.fp8"] else "none, without FP8"
        raise RunError(
            f"--fp8-inputs static: the run's recipe ({recipe}) keeps no histories of amaxes. Give "
            "--fp8-inputs dynamic, with which the server computes the scales"
        )
    is_static = asked.fp8_inputs == "static" or (
        asked.fp8_inputs is None and known and asked.fp8_scales != "block"
    )
    scales, inputs = None, _DYNAMIC
    if is_static:
        recorded = recorded_inputs(reader, spec, values, kept)
        scales = recorded.by_linear
        inputs = (
            {"scales": "static", **recorded._asdict()},
            (
                f"static scales, from the largest amaxes in the histories of step {recorded.step}, "
                f"over {recorded.num_updates} microbatches, with margin {recorded.margin}"
            ),
        )
    source = torch.float32
    if asked.scale_fmt == "ue8m0":
        squares = Scales(BLOCK, BLOCK)  # a run in such a recipe rounded its masters before the cast
        recipe = next(r for r in RECIPES if find_recipe(r).traits.casts["weight"].last == squares)
        source, inputs = own_casts(values, recipe).source, (inputs[0], inputs[1] + _POWERS)
    fmt = ServingFormat(asked.fp8_scales, scales, kept, asked.scale_fmt, source)
    weights = ServingWeights(spec, partial(read_tensor, reader), fmt)
    num_samples, trained = asked.validation_samples, other_formats(values)
    return QuantizedExport(reader, spec, fmt, weights, inputs, num_samples, FP8, trained)


def _plan_blocks(
    reader: Reader, spec: GPTSpec, asked: QuantizedOptions, kept: frozenset[str]
) -> QuantizedExport:
    """Return the export in MXFP8 or NVFP4, by the run's own rule if it was trained in it."""
    from functools import partial

    from megafp8.checkpoint.serving import ServingWeights
    from megafp8.checkpoint.serving_blocks import BlockFormat
    from megafp8.train.load_model import read_tensor
    from megafp8.train.recorded import own_casts, recorded_values

    assert asked.dtype != "fp8"
    values = recorded_values(reader)
    casts = own_casts(values, asked.dtype)
    if asked.fp8_inputs is not None and spec.moe is not None:
        raise RunError(f"{_OF_EXPERTS}. Leave it out: inputs are in BF16 then")
    fmt = BlockFormat(
        asked.dtype, asked.layout, kept, casts.square, casts.source, casts.tensor_ranks
    )
    fmt.check(spec)
    num_samples, inputs = asked.validation_samples, _DYNAMIC if asked.dtype == "mxfp8" else _IN_BF16
    if asked.fp8_inputs is not None:
        amaxes = _measured(reader, num_samples)
        fmt = dataclasses.replace(fmt, input_amaxes=amaxes)
        inputs = (
            {"scales": "static", "amaxes": amaxes},
            ("in NVFP4, by each linear's largest magnitude over the run's validation data"),
        )
    weights = ServingWeights(spec, partial(read_tensor, reader), fmt)
    return QuantizedExport(
        reader, spec, fmt, weights, inputs, num_samples, asked.dtype, casts.others
    )


def _measured(reader: Reader, num_samples: int) -> dict[str, float]:
    """Return the largest magnitude of each linear's input over samples of the validation data."""
    import torch

    from megafp8.train.load_model import load_model
    from megafp8.train.recorded import validation_data
    from megafp8.train.served import input_amaxes

    data = validation_data(reader, num_samples, say)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return input_amaxes(load_model(reader, torch.bfloat16, device), data.batches, device)
