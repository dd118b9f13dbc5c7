"""Write a run's model as a folder that Hugging Face's transformers loads.

megafp8 export RUN DIR [--dtype float32] [--family NAME]
megafp8 export RUN DIR --dtype fp8 [--fp8-scales channel] [--fp8-inputs dynamic]
megafp8 export RUN DIR --dtype fp8 --fp8-scales block [--scale-fmt ue8m0]
megafp8 export RUN DIR --dtype mxfp8|nvfp4 [--layout modelopt] [--fp8-inputs static]
megafp8 export RUN DIR --closest-to-training [--dtype fp8]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.checkpoint.families import FAMILIES
from megafp8.cli.commands import run_old_name
from megafp8.cli.export_quantized import (
    QUANTIZED,
    QuantizedOptions,
    add_quantized_options,
    plan_quantized,
    quantized_options,
)
from megafp8.cli.job import command_parser, reports_errors
from megafp8.data.tokenize import JSON_FILE
from megafp8.errors import ExitCode, RunError
from megafp8.files import whole_folder, write_json_atomically
from megafp8.runs.tokenizer import (
    copy_tokenizer,
    find_tokenizer,
    generation_ends_with,
    read_generation,
    refuse_secrets_in_files,
    token_ids,
    with_all_files,
)
from megafp8.secrets import say

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    import torch

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes of weights and of their computation, by torch's names."""


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the folder and list its files; return 0, or 2 after printing an error."""
    parser = command_parser("export", __doc__)
    parser.add_argument("run", type=Path, help="a run, one of its checkpoints, or latest")
    parser.add_argument("dir", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, *QUANTIZED),
        help="dtype of the weights (default: float32, which is exact); fp8 is E4M3 with scales, "
        "mxfp8 and nvfp4 are the numbers and scales of the recipes of these names",
    )
    parser.add_argument(
        "--family",
        choices=list(FAMILIES),
        help="family of models to write (default: the first of these that can express the model)",
    )
    add_quantized_options(parser)
    parser.add_argument(
        "--closest-to-training",
        action="store_true",
        help="take the form of those that the other options leave open whose KL from the forward "
        "pass of training is smallest, as megafp8 serve-diff computes it",
    )
    options = parser.parse_args(argv)
    if options.closest_to_training:
        quantized, options.dtype = _closest(options), "bfloat16"
    else:
        options.dtype = options.dtype or "float32"
        quantized = quantized_options(options)
    dtype = dtype_named(options.dtype if quantized is None else "bfloat16")
    export(options.run, options.dir, dtype, options.family, quantized)
    return ExitCode.FINISHED


def _closest(options: argparse.Namespace) -> QuantizedOptions | None:
    from megafp8.cli.serve_diff import by_kl

    flag = "--closest-to-training"
    if options.dtype in ("float32", "float16"):
        hint = "Leave one out"
        raise RunError(f"{flag}: no server's form is {options.dtype}. {hint}")
    if options.validation_samples == 0:
        raise RunError(f"{flag}: compares over --validation-samples. Give some")
    names = ("dtype", "layout", "fp8_scales", "scale_fmt", "fp8_inputs", "validation_samples")
    given = {name: getattr(options, name) for name in names}
    ranked = by_kl(options.run, given, options.family)
    say(f"closest to training: {ranked[0].words}; KL (trained || served) of each form:")
    say(*(f"  {each.kl:.3g}  {each.words}" for each in ranked))
    return ranked[0].asked


def export(
    run: Path,
    folder: Path,
    dtype: torch.dtype,
    family: str | None = None,
    quantized: QuantizedOptions | None = None,
) -> None:
    """Write the model of a run, and its tokenizer if it has one, into a folder.

    Args:
        run: A run's directory, or one of its checkpoints.
        folder: A new or empty folder.
        dtype: The dtype of the weights that are written.
        family: The family of models, by default the first one that can express the model.
        quantized: How the linears' weights are quantized; `dtype` is that of the others then.

    Raises:
        UserError: The run has no checkpoint, the folder is not empty, or transformers has no such
            model, or a tokenizer's file holds a secret.
    """
    from megafp8.checkpoint.huggingface import architecture
    from megafp8.checkpoint.huggingface_files import CONFIG, weight_bytes, write_folder
    from megafp8.checkpoint.reader import Reader
    from megafp8.checkpoint.serving import planned_bytes
    from megafp8.train.load import find_checkpoint
    from megafp8.train.load_model import read_tensor, shape_of

    checkpoint = find_checkpoint(run, say)
    reader = Reader(checkpoint)
    spec, home = shape_of(reader), home_of(checkpoint)
    config = reader.meta.get("config")
    tokenizer = find_tokenizer(home)
    home = with_all_files(home, config.get("restore_from_path") if isinstance(config, dict) else "")
    refuse_secrets_in_files(home)
    eod_id = reader.meta.get("eod_id") if tokenizer is None else tokenizer.eod_id
    read = partial(read_tensor, reader)
    num_tokens = None if tokenizer is None else tokenizer.vocab_size
    planned = None
    if quantized is not None:
        planned = plan_quantized(reader, spec, quantized, family)
    with whole_folder(folder, last=CONFIG) as build:
        files = write_folder(
            build,
            spec,
            read,
            dtype=dtype,
            eod_id=eod_id,
            num_tokens=num_tokens,
            family=family,
            generation=generation_ends_with(read_generation(home), eod_id),
            token_ids=token_ids(home, eod_id),
            quantized=None if planned is None else planned.quantized,
        )
        copied = copy_tokenizer(home, build)
        names = [*(file.name for file in files), *copied]
        if planned is not None:
            for name, content in planned.files().items():
                write_json_atomically(build / name, content)
                names.append(name)
    is_foreign = tokenizer is not None and tokenizer.file_name != JSON_FILE
    written = planned.dtype if planned is not None else str(dtype).removeprefix("torch.")
    say(f"{checkpoint} as {architecture(spec, family)}, {written}:")
    for name in names:
        say(f"  {folder / name}")
    tensors, headers = weight_bytes(folder)
    expected = planned_bytes(spec, None if planned is None else planned.fmt, dtype.itemsize)
    say(
        f"  weights: {tensors} bytes on disk, {expected} by the sizes of the model and its scales; "
        f"headers of the files: {headers} bytes"
    )
    if planned is not None:
        say(*planned.lines(), *planned.notes())
        if planned.num_samples:
            say(planned.report_loss(folder))
    if is_foreign:
        say("note: transformers cannot load this kind of tokenizer; load it with its own package")
    if not copied:
        say(f"note: {home} has no tokenizer. Copy the tokenizer of the run's data into {folder}")


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that one of `DTYPES` names."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def home_of(checkpoint: Path) -> Path:
    """Return the directory of the run that a checkpoint `<run>/checkpoints/step_…` belongs to."""
    return checkpoint.absolute().parents[1]


if __name__ == "__main__":
    run_old_name("export")
