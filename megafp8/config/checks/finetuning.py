"""Check the settings of fine-tuning: its files and its prompts."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.config.data_values import file_list
from megafp8.config.keys import Values
from megafp8.config.rules import Finding, Rules
from megafp8.specs.data import CONVERSATIONS, template_fields

rule = Rules()

DATA, TRAIN = "model.data", "model.data.train_ds"
FILES = f"{TRAIN}.file_names"


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


@rule(FILES, f"{TRAIN}.concat_sampling_probabilities")
def _a_probability_for_each_file(v: Values) -> Iterator[Finding]:
    names, weights = file_list(v[FILES]), v[f"{TRAIN}.concat_sampling_probabilities"]
    if weights is not None and names and len(weights) != len(names):
        yield Finding(
            f"{TRAIN}.concat_sampling_probabilities",
            f"{FILES} names {len(names)} files",
            "Give one number for each file",
        )
