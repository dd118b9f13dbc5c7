"""Import a GPT-2 or Llama of Hugging Face's transformers, to train it further.

python -m megafp8.cli.import_hf MODEL DIR

DIR gets a checkpoint, the tokenizer, and a YAML with the model's shape, with which
`python pretrain_gpt.py --config-dir DIR --config-name model …` trains the model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from megafp8.checkpoint import store
from megafp8.checkpoint.huggingface import architecture, end_of_text, from_config
from megafp8.checkpoint.huggingface_files import read_config, read_tensors
from megafp8.checkpoint.manifest import Placement
from megafp8.checkpoint.store import ShardEntry
from megafp8.cli.job import command_parser, reports_errors
from megafp8.config.architecture import tree_of_spec
from megafp8.errors import ExitCode
from megafp8.files import run_errors_reported, whole_folder, write_atomically
from megafp8.runs.find import CHECKPOINTS_DIR
from megafp8.runs.tokenizer import copy_tokenizer, find_tokenizer, refuse_secrets
from megafp8.secrets import say
from megafp8.specs import GPTSpec
from megafp8.specs.model import padded_vocab_size
from megafp8.train.load import MODEL

CONFIG = "model.yaml"
SHARD_BYTES = 4 << 30
OPTIM = {"lr": 2e-5, "sched": {"min_lr": 2e-6}}
"""The rate at which the folder's YAML continues to train, a tenth and less of the highest rates at
which GPT-2 and Llama were trained; the default job's is for a model of width 256 from the start."""


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the folder and print how to train; return 0, or 2 after printing an error."""
    parser = command_parser("import_hf", __doc__)
    parser.add_argument("model", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument("dir", type=Path, help="a new or empty folder")
    options = parser.parse_args(argv)
    import_model(options.model, options.dir)
    return ExitCode.FINISHED


def import_model(model: Path, folder: Path) -> None:
    """Write the model of one folder as a checkpoint of step 0, with tokenizer and YAML, to another.

    Args:
        model: A folder with config.json and safetensors files.
        folder: A new or empty folder.

    Raises:
        UserError: The model cannot be read or is of another kind, or the folder is not empty.
    """
    config = read_config(model)
    spec = from_config(config, model / "config.json")
    with whole_folder(folder, last=CHECKPOINTS_DIR) as build:
        checkpoint, copied = _build(model, folder, build, config, spec)
    _say(model, folder, spec, folder / checkpoint.relative_to(build), copied)


def _build(
    model: Path, folder: Path, build: Path, config: dict[str, Any], spec: GPTSpec
) -> tuple[Path, list[str]]:
    """Write all of the folder to `build`; return the checkpoint there and the tokenizer's files."""
    refuse_secrets(model)
    tokenizer = find_tokenizer(model)
    first = end_of_text(config, model / "config.json")
    tree = {
        "encoder_seq_length": spec.max_position_embeddings,  # fine-tuning takes it from here
        **tree_of_spec(spec),
        "init_method_std": spec.init_method_std,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "make_vocab_size_divisible_by": divisor(
            spec.vocab_size, spec.vocab_size if tokenizer is None else tokenizer.vocab_size
        ),
    }
    meta = {"config": {"model": tree}, "eod_id": first, "imported_from": architecture(spec)}
    checkpoint = _write_checkpoint(model, spec, build / CHECKPOINTS_DIR, meta)
    copied = copy_tokenizer(model, build)
    own = {
        "defaults": ["pretrain_gpt", "_self_"],
        "restore_from_path": str(folder.absolute()),
        "model": {**tree, "optim": OPTIM},
    }
    with run_errors_reported(build / CONFIG, "writing the settings"):
        write_atomically(build / CONFIG, yaml.safe_dump(own, sort_keys=False))
    return checkpoint, copied


def _say(model: Path, folder: Path, spec: GPTSpec, checkpoint: Path, copied: list[str]) -> None:
    """Print what was imported, and the commands that train it."""
    say(f"{model}, {architecture(spec)} of {spec.num_layers} layers: {checkpoint}")
    missing = f"none in {model}; copy the model's tokenizer into {folder}"
    say(f"tokenizer: {', '.join(copied) or missing}")
    say(
        "train it with: python pretrain_gpt.py "
        f"--config-dir {folder.absolute()} --config-name {Path(CONFIG).stem} "
        "model.data.data_prefix=<data prepared with this tokenizer>"
    )
    say(
        f"{CONFIG} sets the learning rate to {OPTIM['lr']:g}, for continued training, and has the "
        "default job's batch and number of steps: model.optim.lr, model.global_batch_size and "
        "trainer.max_steps give others"
    )
    say(
        f"or fine-tune it with: python finetune_gpt.py restore_from_path={folder.absolute()} "
        f"model.encoder_seq_length={spec.max_position_embeddings} "
        "model.data.train_ds.file_names=<questions and answers>.jsonl"
    )


def divisor(rows: int, vocab_size: int) -> int:
    """Return the `make_vocab_size_divisible_by` that pads a vocabulary to the embedding's rows.

    The result is the largest power of two up to 128 that does, or `rows` if none does.
    """
    powers = (2**n for n in range(7, -1, -1))
    fits = (n for n in powers if padded_vocab_size(vocab_size, n) == rows)
    return next(fits, rows)


def _write_checkpoint(model: Path, spec: GPTSpec, root: Path, meta: dict[str, Any]) -> Path:
    """Write the model's tensors, some gigabytes at a time, and return the checkpoint's path.

    The checkpoint is verified when a run starts from it.
    """
    staging = store.begin(root, 0)
    entries: list[ShardEntry] = []
    waiting: list[Placement] = []
    size = 0

    def write() -> None:
        nonlocal waiting, size
        name = f"model{len(entries)}.safetensors"
        entries.append(store.write_shard(staging, name, waiting))
        waiting, size = [], 0

    try:
        for name, tensor in read_tensors(model, spec):
            shape = tuple(tensor.shape)
            waiting.append(Placement(MODEL + name, shape, (0,) * len(shape), tensor))
            size += tensor.numel() * torch.float32.itemsize
            if size >= SHARD_BYTES:
                write()
        if waiting:
            write()
    except BaseException:
        store.discard(staging)
        raise
    return store.commit(staging, root, 0, entries, meta)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
