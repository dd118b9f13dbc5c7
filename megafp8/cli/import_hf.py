"""Import a model of Hugging Face's transformers (GPT-2, Llama, Mixtral, Qwen), to train it further.

megafp8 import MODEL DIR
megafp8 import CHECKPOINT DIR [--settings FILE]

CHECKPOINT is a distributed checkpoint of a GPT (torch_dist) of Megatron-LM, Megatron Bridge or
NeMo: a folder in which .metadata is, one above it, or an archive .nemo. Nothing is unpickled.

DIR gets a checkpoint, the tokenizer, and a YAML with the model's shape, with which
`megafp8 pretrain --config-dir DIR --config-name model …` trains the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megafp8.cli.commands import run_old_name
from megafp8.cli.job import command_parser, reports_errors
from megafp8.config.base_model import is_megatrons
from megafp8.config.errors import SettingError
from megafp8.errors import ExitCode
from megafp8.neighbours import part_in_another_package
from megafp8.secrets import say

if TYPE_CHECKING:  # the arguments are checked before torch, which takes seconds, is imported
    from megafp8.train.huggingface import Imported


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write the folder and print how to train; return 0, or 2 after printing an error."""
    parser = command_parser("import", __doc__)
    parser.add_argument(
        "model", type=Path, help="a folder with config.json and safetensors, or a checkpoint"
    )
    parser.add_argument("dir", type=Path, help="a new or empty folder")
    parser.add_argument(
        "--settings", type=Path, metavar="FILE",
        help="the launch script or the YAML with which a checkpoint of Megatron or NeMo was "
        "trained, if the checkpoint does not say it",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if is_megatrons(options.model):
        part = part_in_another_package("this import", "megafp8_migrate.weights")
        return int(part.import_checkpoint(options.model, options.dir, options.settings))
    if options.settings is not None:
        raise SettingError(
            "--settings", options.settings, f"has no effect: {options.model} is no checkpoint of "
            "Megatron or NeMo", "Leave it out, or give a checkpoint",
        )  # fmt: skip
    from megafp8.train.huggingface import import_model, notes_on_import

    imported = import_model(options.model, options.dir)
    _say(options.model, options.dir, imported)
    for note in notes_on_import(options.model, options.dir, imported.spec):
        say(note)
    return ExitCode.FINISHED


def _say(model: Path, folder: Path, imported: Imported) -> None:
    """Print what was imported, and the commands that train it."""
    from megafp8.train.huggingface import CONFIG, OPTIM

    spec = imported.spec
    say(f"{model}, {imported.family} of {spec.num_layers} layers: {imported.checkpoint}")
    missing = f"none in {model}; copy the model's tokenizer into {folder}"
    say(f"tokenizer: {', '.join(imported.tokenizer_files) or missing}")
    if imported.notes:
        say(*imported.notes)
    say(
        "train it with: megafp8 pretrain "
        f"--config-dir {folder.absolute()} --config-name {Path(CONFIG).stem} "
        "model.data.data_prefix=<data prepared with this tokenizer>"
    )
    say(
        f"{CONFIG} sets the learning rate to {OPTIM['lr']:g}, for continued training, and has the "
        "default job's batch and number of steps: model.optim.lr, model.global_batch_size and "
        "trainer.max_steps give others"
    )
    if not imported.has_tokenizer:
        return  # fine-tuning reads the model's own
    say(
        f"or fine-tune it with: megafp8 finetune restore_from_path={folder.absolute()} "
        f"model.encoder_seq_length={spec.max_position_embeddings} "
        "model.data.train_ds.file_names=<questions and answers>.jsonl"
    )


if __name__ == "__main__":
    run_old_name("import_hf")
