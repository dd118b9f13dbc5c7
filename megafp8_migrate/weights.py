"""Import the weights of a distributed checkpoint of Megatron-LM, Megatron Bridge or NeMo.

`megafp8 import CHECKPOINT DIR` and a run with `restore_from_path` call it. Nothing of a checkpoint
is unpickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megafp8.errors import ExitCode
from megafp8.secrets import say
from megafp8.train.huggingface import CONFIG, Imported, Original, write_folder
from megafp8_migrate.megatron_model import Settings, given_settings, own_settings, spec_of
from megafp8_migrate.megatron_scaling import FoundScaling, find_scaling
from megafp8_migrate.megatron_weights import Found, find_tensors, prefix_of, vocabulary_of
from megafp8_migrate.torch_dist import open_checkpoint

_LEFT = (
    ("optimizer.", "of the optimizer: its moments begin at zero"),
    ("_extra_state", "_extra_state: the first steps build up FP8's scales and histories"),
    ("rng_state", "of random numbers: data and dropout are drawn from model.seed"),
    ("rerun_state_machine", "of Megatron's rerun_state_machine"),
)
"""What is left in a checkpoint: by a part of its name, what the report says."""


def import_checkpoint(path: Path, folder: Path, settings_file: Path | None = None) -> int:
    """Write the folder, and print what was read and how to train; return the exit code.

    Errors are those of `write_import`.
    """
    imported, lines = write_import(path, folder, settings_file)
    say(*lines)
    say(f"{path}, a GPT of {imported.spec.num_layers} layers: {imported.checkpoint}")
    if not imported.tokenizer_files:
        say(f"tokenizer: none in {path}; the data's own is used")
    say(
        "train it with: megafp8 pretrain "
        f"--config-dir {folder.absolute()} --config-name {Path(CONFIG).stem} "
        "model.data.data_prefix=<data prepared with the model's tokenizer>"
    )
    say(f"{CONFIG} has the default job's batch, and a low learning rate. Set those of your run")
    return ExitCode.FINISHED


def write_import(
    path: Path, folder: Path, settings_file: Path | None = None
) -> tuple[Imported, list[str]]:
    """Write the folder; return what was imported, and lines about what was read and what was left.

    Args:
        path: The folder of a checkpoint, one above it, or an archive `.nemo`.
        folder: A new or empty folder.
        settings_file: The launch script or the YAML with which the model was trained; None if the
            checkpoint says it.

    Raises:
        UserError: The checkpoint cannot be read, its model is none of ours, or the folder is not
            empty.
    """
    home, checkpoint = open_checkpoint(path)
    rows = vocabulary_of(checkpoint)
    if settings_file is None:
        settings = own_settings(home, checkpoint)
    else:
        settings = given_settings(settings_file)
    spec = spec_of(settings, rows)
    found = find_tensors(spec, checkpoint)
    scaling = find_scaling(spec, checkpoint, prefix_of(checkpoint))
    files = path if path.is_dir() else folder
    imported = write_folder(
        Original(
            "megatron", spec, lambda: found.tensors, files, None, 1, scaling.rows, scaling.recipe
        ),
        folder,
    )
    return imported, list(_lines(settings, found, scaling))


def _lines(settings: Settings, found: Found, scaling: FoundScaling) -> Iterator[str]:
    """Yield lines about what was read and what was left."""
    masters, count = found.num_masters, len(found.tensors)
    yield f"settings of the model: {settings.file}"
    yield f"read: {count} tensors, {masters} of them from the optimizer's master weights in FP32"
    if scaling.read:
        wanted = " ".join(f"model.{name}={value}" for name, value in scaling.recipe.items())
        yield (
            f"read: FP8's scales and histories of the inputs and weights of {len(scaling.read)} "
            f"linears. A run takes them with model.fp8=True {wanted}"
        )
    if scaling.why_not:
        yield f"note: {scaling.why_not}"
    left = Counter(
        next((said for part, said in _LEFT if part in name), f"such as {name}")
        for name in found.left
        if name not in scaling.read
    )
    for said, number in left.items():
        yield f"left: {number} {said}"
    if found.has_buckets:
        yield (
            "note: master weights are in buckets of the distributed optimizer, whose order no file "
            "has; the weights were read as they are. --dist-ckpt-optim-fully-reshardable saves "
            "master weights of each parameter"
        )
