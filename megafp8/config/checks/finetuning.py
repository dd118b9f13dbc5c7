"""Check the settings of fine-tuning: its files, its model, its prompts, and how it packs them."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.data_values import file_list
from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules
from megafp8.specs.data import CONVERSATIONS, template_fields

rule = Rules()

DATA, TRAIN = "model.data", "model.data.train_ds"
FILES, PREFIX = f"{TRAIN}.file_names", f"{DATA}.data_prefix"
RESTORE = "restore_from_path"
WITH_POSITIONS = ("learned_absolute", "rope")  # those that read the numbers of positions
RESUMES = ("model.resume_from_checkpoint", "exp_manager.resume_from_checkpoint")


@rule(FILES, PREFIX)
def _one_kind_of_data(v: Values) -> Iterator[Finding]:
    if v[FILES] is None and v[PREFIX] is None:
        yield Finding(
            PREFIX,
            "no data is named",
            f"Give {FILES}=FILE.jsonl to fine-tune, or {PREFIX} to pretrain",
        )
    elif v[FILES] is not None and v[PREFIX] is not None:
        yield Finding(
            FILES,
            f"has questions and answers, and {PREFIX}={v[PREFIX]} names text to pretrain on",
            f"Use finetune_gpt.py, or {PREFIX}=null",
        )


@rule(FILES, RESTORE, *RESUMES)
def _has_a_model(v: Values) -> Iterator[Finding]:
    if v[FILES] is not None and not any(v[key] for key in (RESTORE, *RESUMES)):
        yield Finding(
            RESTORE,
            "fine-tuning starts from a trained model, and none is named",
            "Give a run's directory, one of its checkpoints, or a directory that "
            "megafp8 import wrote",
        )


@rule(
    FILES,
    f"{TRAIN}.packed_sequence",
    f"{DATA}.reset_attention_mask",
    f"{DATA}.reset_position_ids",
    "model.position_embedding_type",
)
def _examples_are_kept_apart(v: Values) -> Iterator[Finding]:
    if v[FILES] is None or not v[f"{TRAIN}.packed_sequence"]:
        return
    for name, what in (
        ("reset_attention_mask", "attend to each other"),
        ("reset_position_ids", "have positions that depend on those before them"),
    ):
        reads = name != "reset_position_ids" or v["model.position_embedding_type"] in WITH_POSITIONS
        if reads and not v[f"{DATA}.{name}"]:
            yield Finding(
                f"{DATA}.{name}",
                f"examples that share a sequence would {what}",
                f"Set it to True, or {TRAIN}.packed_sequence=False, which gives each example a "
                "sequence of its own",
            )


@rule(
    f"{TRAIN}.prompt_template",
    f"{TRAIN}.label_key",
    f"{TRAIN}.truncation_field",
    f"{DATA}.chat",
)
def _template_has_its_fields(v: Values) -> Iterator[Finding]:
    template, label = v[f"{TRAIN}.prompt_template"], v[f"{TRAIN}.label_key"]
    chat = v[f"{DATA}.chat"]
    field = v[f"{TRAIN}.truncation_field"]
    names = template_fields(template)
    if names is None:
        yield Finding(
            f"{TRAIN}.prompt_template",
            "is not a text with fields in braces",
            "Write it as '{input} {output}'; {{ and }} stand for braces",
        )
    elif not chat and (not template.endswith("{" + label + "}") or names.count(label) != 1):
        yield Finding(
            f"{TRAIN}.prompt_template",
            f"must have the answer's field once, at its end, which {TRAIN}.label_key={label} names",
            f"Write '… {{{label}}}', or name another field by {TRAIN}.label_key",
        )
    fields = [
        *([] if chat else dict.fromkeys(names or ())),
        *(CONVERSATIONS if chat is not False else ()),
    ]
    if field is not None and names is not None and field not in fields:
        yield Finding(
            f"{TRAIN}.truncation_field",
            f"is no field of {TRAIN}.prompt_template={template}, nor of a conversation",
            f"Give {' or '.join(fields)}",
        )


@rule(f"{TRAIN}.truncation_field", f"{TRAIN}.truncation_method")
def _conversations_lose_their_ends(v: Values) -> Iterator[Finding]:
    field = v[f"{TRAIN}.truncation_field"]
    if field in CONVERSATIONS and v[f"{TRAIN}.truncation_method"] == "left":
        yield Finding(
            f"{TRAIN}.truncation_method",
            f"would take the beginning, and the system prompt, from {field}",
            f"Set {TRAIN}.truncation_method=right",
        )


@rule(FILES, f"{TRAIN}.concat_sampling_probabilities")
def _a_probability_for_each_file(v: Values) -> Iterator[Finding]:
    names, weights = file_list(v[FILES]), v[f"{TRAIN}.concat_sampling_probabilities"]
    if weights is not None and names and len(weights) != len(names):
        yield Finding(
            f"{TRAIN}.concat_sampling_probabilities",
            f"{FILES} names {len(names)} files",
            "Give one number for each file",
        )
