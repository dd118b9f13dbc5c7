"""Make the pages about all settings from the schema: `--help` and docs/configuration.md.

python -m megafp8.cli.help > docs/configuration.md
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from megafp8.config.keys import FREE_KINDS, NOT_IN_NEMO, Key, keys_of
from megafp8.config.layers import DEFAULT_CONFIG, conf_dir, find_source, layers_of
from megafp8.config.nemo import nemo_keys
from megafp8.config.overrides import PRESET_GROUPS, preset_names
from megafp8.config.rows import condition_text
from megafp8.config.schema import all_keys
from megafp8.config.schema.model import Architecture
from megafp8.config.together import TOGETHER
from megafp8.config.values import plain

WIDTH = 110
"""Columns of a line in docs/configuration.md."""
HELP_WIDTH = 100
"""Columns of a line that `--help` prints."""
TEMPLATE = Path(__file__).with_name("configuration_page.md")


class Group(NamedTuple):
    """Describe settings that belong together on the pages.

    Attributes:
        title: The group's heading.
        about: One or two sentences about the group.
        example: Settings of the group, as they are given on the command line.
        keys: Patterns of dotted paths (* ? [...]), in the order of the page. A key belongs to the
            first group that has a pattern for it.
    """

    title: str
    about: str
    example: str
    keys: tuple[str, ...]
    script: str = "pretrain_gpt.py"


GROUPS = (
    Group(
        "Length and validation",
        "How long a run is, and when it validates. See [training.md](training.md).",
        "trainer.max_steps=2000 trainer.val_check_interval=200 trainer.max_time=00:04:00:00",
        (
            "trainer.max_steps", "trainer.max_time", "trainer.val_check_interval",
            "trainer.limit_val_batches", "trainer.num_sanity_val_steps", "trainer.overfit_batches",
            "trainer.fast_dev_run",
        ),
    ),
    Group(
        "Run directory and logs",
        "Where a run writes, and what it records "
        "([files of a run](training.md#what-a-run-leaves)).",
        "exp_manager.name=first trainer.log_every_n_steps=50",
        (
            "exp_manager.name", "exp_manager.exp_dir", "exp_manager.explicit_log_dir",
            "exp_manager.resume_if_exists", "trainer.log_every_n_steps",
            "trainer.enable_progress_bar", "exp_manager.create_tensorboard_logger",
            "exp_manager.create_wandb_logger", "exp_manager.wandb_logger_kwargs.*",
        ),
    ),
    Group(
        "Checkpoints",
        "When checkpoints are written, and which of them are kept.",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=500 "
        "exp_manager.checkpoint_callback_params.keep=2",
        ("exp_manager.create_checkpoint_callback", "exp_manager.checkpoint_callback_params.*"),
    ),
    Group(
        "Starting from other weights",
        "A new run can start from the weights of another run, or from its whole state.",
        "restore_from_path=runs/first exp_manager.name=second",
        ("restore_from_path", "*.resume_from_checkpoint"),
    ),
    Group(
        "Failures and reproducibility",
        "What a run does when something goes wrong, and what makes it repeatable.",
        "trainer.nonfinite_policy=skip trainer.max_restarts=3 trainer.step_timeout=600",
        (
            "trainer.nonfinite_policy", "trainer.max_restarts", "trainer.step_timeout",
            "trainer.memory_snapshot_on_oom", "trainer.deterministic", "model.seed",
        ),
    ),
    Group(
        "Batches",
        "How many samples a step and a forward pass have.",
        "model.global_batch_size=64 model.micro_batch_size=8",
        ("model.*batch_size",),
    ),
    Group(
        "Ranks and parallelism",
        "How many ranks there are, and what they divide among themselves. "
        "See [parallelism.md](parallelism.md).",
        "trainer.devices=4 model.tensor_model_parallel_size=2 model.sequence_parallel=True",
        (
            "trainer.devices", "trainer.num_nodes", "trainer.accelerator",
            "model.tensor_model_parallel_size", "model.sequence_parallel",
            "model.context_parallel_size", "model.pipeline_*", "model.virtual_pipeline_*",
            "model.grad_allreduce_chunk_size_mb",
        ),
    ),
    Group(
        "FSDP",
        "Sharding of parameters, gradients and optimizer states over replicas "
        "([parallelism.md](parallelism.md#sharded-parameters-fsdp)). ZeRO-1 is "
        "`model.optim.name=distributed_fused_adam`.",
        "trainer.devices=2 model.fsdp=True model.fsdp_sharding_strategy=grad",
        ("model.fsdp*", "model.enable_fsdp_float8_all_gather"),
    ),
    Group(
        "The model",
        "Sizes and functions of the GPT. See [models.md](models.md).",
        "model.num_layers=8 model.hidden_size=512 model.ffn_hidden_size=2048 "
        "model.num_attention_heads=8",
        tuple(keys_of(Architecture, "model.")),
    ),
    Group(
        "Memory and speed",
        "Recomputation of activations, compilation, CUDA graphs and garbage collection.",
        "model.activations_checkpoint_granularity=selective model.compile=block",
        ("model.activations_checkpoint_*", "model.compile", "model.enable_cuda_graph",
         "model.gc_interval"),
    ),
    Group(
        "Precision without FP8",
        "The dtype of products and weights that are not in FP8, and FP16's loss scale.",
        "trainer.precision=16 model.native_amp_init_scale=65536",
        (
            "trainer.precision", "model.megatron_amp_O2", "model.native_amp_*",
            "model.hysteresis",
        ),
    ),
    Group(
        "FP8",
        "Which products and weights are in FP8, and in which formats. See [fp8.md](fp8.md).",
        "model.fp8=True model.fp8_recipe=tensorwise model.first_last_layers_bf16=True",
        (
            "model.fp8", "model.fp8_recipe", "model.fp8_hybrid", "model.fp8_e4m3",
            "model.fp8_params", "model.fp8_wgrad", "model.override_linear_precision",
            "model.fp8_split_accumulator", "model.fp8_power_2_scale", "model.fp4_disable_*",
            "model.first_last_layers_bf16", "model.num_layers_at_*", "model.fp8_modules",
            "model.use_autocast_during_eval", "model.pad_inner_dim",
        ),
    ),
    Group(
        "Delayed scaling",
        "How `model.fp8_recipe=delayed` computes scales from earlier amaxes "
        "([the rule](numerics.md#amax-history-scale)).",
        "model.fp8=True model.fp8_margin=1 model.fp8_amax_history_len=256",
        (
            "model.fp8_margin", "model.fp8_interval", "model.fp8_amax_*", "model.reduce_amax",
            "model.tp_only_amax_red",
        ),
    ),
    Group(
        "FP8 health",
        "What is recorded about FP8 tensors, and when a warning follows "
        "([health](numerics.md#health)).",
        "model.fp8=True model.fp8_health=full model.fp8_health_max_underflow=0.3",
        ("model.fp8_health*",),
    ),
    Group(
        "Backends",
        "The library that runs the layers. See [backends.md](backends.md).",
        "model.fp8=True model.fp8_recipe=tensorwise model.fp8_backend=torchao",
        (
            "model.fp8_backend", "model.te_version", "model.transformer_engine",
            "model.ub_tp_comm_overlap", "model.fp8_dot_product_attention",
            "model.fp8_multi_head_attention",
        ),
    ),
    Group(
        "Data and tokenizer",
        "What is trained on. See [data.md](data.md).",
        "'model.data.data_prefix=[0.8,my/corpus,0.2,my/other]' model.data.num_workers=4",
        ("model.data.data_prefix", "model.data.splits_string", "model.data.[!tv]*",
         "model.data.validation_drop_last", "model.tokenizer.*"),
    ),
    Group(
        "Fine-tuning",
        "Questions and answers that `finetune_gpt.py` trains on. See "
        "[finetuning.md](finetuning.md).",
        "restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl "
        "'model.data.train_ds.prompt_template=\"Q: {input} A: {output}\"'",
        ("model.data.train_ds.file_names", "model.data.validation_ds.*",
         "model.data.train_ds.*", "model.answer_only_loss"),
        "finetune_gpt.py",
    ),
    Group(
        "Optimizer",
        "The optimizer and the clipping of gradients.",
        "model.optim.name=distributed_fused_adam model.optim.lr=6e-4 trainer.devices=2",
        (
            "model.optim.name", "model.optim.lr", "model.optim.weight_decay",
            "model.do_layer_norm_weight_decay",
            "model.optim.betas", "model.optim.eps", "model.optim.grad_sync_dtype",
            "trainer.gradient_clip_*",
        ),
    ),
    Group(
        "States in few bits (FP8-LM)",
        "Gradients, master weights and moments in FP8 and FP16. See [fp8_lm.md](fp8_lm.md).",
        "model.fp8=True model.optim.fp8_opt_level=O2 model.optim.stochastic_rounding=True",
        (
            "model.optim.fp8_opt_level", "model.optim.main_*", "model.optim.exp_avg*",
            "model.optim.low_precision_moments_of",
            "model.optim.fp8_grad_reduction", "model.optim.data_parallel_sharding_strategy",
            "model.optim.shard_by", "model.optim.stochastic_rounding",
        ),
    ),
    Group(
        "Learning rate",
        "The schedule of the learning rate over the run, as in NeMo.",
        "model.optim.sched.name=WarmupAnnealing model.optim.sched.warmup_steps=100",
        ("model.optim.sched.name", "model.optim.sched.min_lr", "model.optim.sched.*"),
    ),
    Group(
        "Profiles",
        "A profile of some steps ([trials and profiles](training.md#trials-and-profiles)).",
        "model.nsys_profile.enabled=True model.nsys_profile.end_step=12",
        ("model.nsys_profile.*",),
    ),
)  # fmt: skip
"""The groups of the pages, in their order. Every key of the schema must be in one."""
_PURPOSES = {
    "finetune_gpt": "Fine-tune a GPT on questions and answers (docs/finetuning.md).",
    "pretrain_gpt": "Pretrain a GPT. Without arguments this runs the default job.",
}
_EXAMPLES = {
    "finetune_gpt": """\
  {prog} restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl
  {prog} restore_from_path=runs/first model.data.train_ds.file_names=mine.jsonl model.fp8=True""",
    "pretrain_gpt": """\
  {prog} model.fp8=True
  {prog} model.fp8=True model.fp8_e4m3=True model.fp8_margin=1 exp_manager.name=e4m3
  {prog} model=gpt3_125m precision=fp8_delayed_hybrid
  {prog} trainer.devices=2 model.tensor_model_parallel_size=2
  {prog} -m model.fp8=True,False model.optim.lr=1e-3,3e-4
  {prog} --config-dir mine --config-name my_gpt trainer.max_steps=1000""",
}  # fmt: skip
_USAGE = """\
Usage: {prog} [KEY=VALUE ...] [options]

{purpose}

Options:
  --help, -h [WORD ...]  print this page, or only the keys that have a WORD in their name
  --version              print the versions of megafp8, torch and Python
  --cfg job, -c job      print the configuration and end; --resolve fills in ${{...}}
  --config-name, -cn N   use another YAML than {job}
  --config-dir, -cd DIR  a directory with your own YAML, which begins with
                         `defaults: [{job}, _self_]`, or with a NeMo YAML as it is;
                         --config-path, -cp mean the same
  --trust-recipe         import the recipes of FP8 that a YAML file names as code
  model=NAME             a preset of conf/model:
{models}
  precision=NAME         a preset of conf/precision:
{precisions}
  --multirun, -m         one run for each combination of comma-separated values

Examples:
{examples}

Keys, with the values of {job}.yaml. After each explanation: the values that it takes, and the
setting that it needs to have an effect.
"""


def group_of(path: str) -> Group | None:
    """Return the first group with a pattern for the key `path`, or None."""
    return next((g for g in GROUPS if any(fnmatchcase(path, p) for p in g.keys)), None)


def keys_of_group(group: Group) -> list[Key]:
    """Return the keys of a group, in the order of its patterns."""
    own = [key for key in all_keys().values() if group_of(key.path) is group]
    first = {
        key.path: next(i for i, p in enumerate(group.keys) if fnmatchcase(key.path, p))
        for key in own
    }
    return sorted(own, key=lambda key: first[key.path])


def help_page(prog: str, words: Sequence[str] = (), job: str = DEFAULT_CONFIG) -> str:
    """Return what `--help` prints: everything, or the keys that have one of `words` in their path.

    A word may be a setting; only what is before its `=` counts. `job` is the command's own YAML,
    whichever one `--config-name` names.
    """
    wanted = [word.partition("=")[0].lower() for word in words]
    names = (", ".join(preset_names(group, [conf_dir()])) for group in PRESET_GROUPS)
    margin = " " * 25
    models, precisions = ("\n".join(_wrapped(text, HELP_WIDTH, margin, margin)) for text in names)
    purpose, examples = _PURPOSES[job], _EXAMPLES[job].format(prog=prog)
    fields = {"job": job, "purpose": purpose, "examples": examples}
    usage = _USAGE.format(prog=prog, models=models, precisions=precisions, **fields)
    lines = [] if wanted else [usage]
    values = default_values(job)
    for group in GROUPS:
        keys = [
            key
            for key in keys_of_group(group)
            if not wanted or any(word in key.path.lower() for word in wanted)
        ]
        if keys:
            lines += [f"{group.title}:", *_help_lines(keys, values), ""]
    if not lines:
        return f"No key has {' or '.join(words)} in its name; --help lists all keys.\n"
    return "\n".join(lines).rstrip() + "\n"


def _help_lines(keys: Sequence[Key], values: dict[str, Any]) -> Iterator[str]:
    for key in keys:
        yield f"  {key.path}={_plain(values[key.path])}"
        needs = "" if key.needs is None else f"; needs {key.needs.text}"
        text = f"{key.help} [{key.valid_text}{needs}]"
        yield from _wrapped(text, HELP_WIDTH, "      ", "      ")


def markdown_page() -> str:
    """Return the text of docs/configuration.md: the template with its tables and lists."""
    values = default_values()
    made = {
        "contents": _contents(),
        "presets": (
            f"| `{group}` | {', '.join(map(_code, preset_names(group, [conf_dir()])))} |"
            for group in PRESET_GROUPS
        ),
        "groups": _groups(values),
        "together": _together(),
        "nemo": _nemo(),
        "differences": (
            f"| `{key.path}` | {_code(values[key.path])} | {_code(key.nemo)} |"
            for key in differing_keys()
        ),
    }
    text = TEMPLATE.read_text("utf-8")
    return re.sub(r"(?m)^\{(\w+)\}$", lambda place: "\n".join(made[place[1]]), text)


def _groups(values: dict[str, Any]) -> Iterator[str]:
    for group in GROUPS:
        yield from (f"## {group.title}\n", *_wrapped(group.about, WIDTH), "")
        yield from ("```console", f"$ python {group.script} {group.example}", "```", "")
        for key in keys_of_group(group):
            yield from _item(key, values[key.path])
        yield ""


def _contents() -> Iterator[str]:
    """Yield an entry for each group, with a link to each of its keys."""
    for group in GROUPS:
        names = [key.path for key in keys_of_group(group)]
        short = [_short(name, names) for name in names]
        yield f"  - [{group.title}](#{anchor(group.title)}):"
        links = (f"[`{text}`](#{name})" for text, name in zip(short, names, strict=True))
        yield from _wrapped(", ".join(links), WIDTH, "    ", "    ")


def _short(path: str, others: Sequence[str]) -> str:
    """Return the end of a path, with as many sections before it as tell it from `others`."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        text = ".".join(parts[-count:])
        if sum(f".{other}".endswith(f".{text}") for other in others) == 1:
            return text
    return path


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _item(key: Key, value: Any) -> Iterator[str]:
    """Yield the lines about one key."""
    facts = [f"*Values:* {_escaped(key.valid_text)}."]
    if key.needs is not None:
        facts.append(f"*Needs* {_condition(key.needs.text)}.")
    if key.nemo is NOT_IN_NEMO:
        facts.append("*Not in NeMo's file.*")
    elif key.nemo != value:
        facts.append(f"*NeMo's default:* {_code(key.nemo)}.")
    if key.required:
        facts.append("*Required.*")
    if key.kind in FREE_KINDS:
        facts.append("*May change.*")
    text = f"**`{key.path}`** = {_code(value)}: {_escaped(key.help)} {' '.join(facts)}"
    yield f'- <a id="{key.path}"></a>'
    yield from _wrapped(text, WIDTH, "  ", "  ")


def _together() -> Iterator[str]:
    from megafp8.config.te_layers import BACKEND, TABLE  # a run without Transformer Engine has none

    of_te = [row._replace(when={BACKEND: "te", **row.when}) for row in TABLE]
    for row in (*TOGETHER, *of_te):
        excludes, when = (
            ", ".join(_condition(condition_text(key, test)) for key, test in tests.items())
            for tests in (row.excludes, row.when)
        )
        reason = re.sub(r"; this run has \{[\w.]+\}", "", row.reason)
        reason = re.sub(r"\{([\w.]+)\}", r"`\1`", reason)
        mark = " *(unproven)*" if row.unproven else ""
        yield f"| {excludes} | {when} | {reason}{mark} |"


def _condition(text: str) -> str:
    """Return a condition such as `a=1 or 2 for some linear` with only its settings as code."""
    return " and ".join(map(_term, text.replace("None", "null").split(" and ")))


def _term(text: str) -> str:
    found = re.fullmatch(r"([\w.]+)=(\S+(?:(?:, | or )\S+)*)( for .*)?", text)
    if found is None:  # words, in which settings stand
        return re.sub(r"\b[a-z_]+(?:\.\w+)+(?:=\w+)?", lambda setting: f"`{setting[0]}`", text)
    first, *others = re.split(r"(, | or )", found[2])
    pairs = zip(others[::2], others[1::2], strict=True)
    listed = "".join(f"{joint}`{other}`" for joint, other in pairs)
    return f"`{found[1]}={first}`{listed}{found[3] or ''}"


def _nemo() -> Iterator[str]:
    for key in nemo_keys().values():
        nemo = _code(key.nemo) if key.in_megatron_gpt_config else "—"
        accepted = [_code(value) for value in key.accepts]
        passes = key.free.text if key.free is not None else ", ".join(accepted)
        if key.same_as is not None or key.where is not None:
            passes += ", and what follows from other keys"
        here = key.note
        if not key.hint.startswith("Leave it out, or give"):
            here += f". {key.hint}"
        cells = [f"`{key.path}`", nemo, passes, here[0].upper() + here[1:] + "."]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def differing_keys() -> list[Key]:
    """Return the keys whose value in the default job is not NeMo's default."""
    values = default_values()
    nemo = [key for key in all_keys().values() if key.nemo is not NOT_IN_NEMO]
    return [key for key in nemo if values[key.path] != key.nemo]


def default_values(job: str = DEFAULT_CONFIG) -> dict[str, Any]:
    """Return every key's value in a job of conf/, with interpolations as they are written."""
    values = {path: key.default for path, key in all_keys().items()}
    for layer in layers_of(find_source(None, job), []):
        values |= {setting.key: setting.value for setting in layer.settings}
    return values


def _wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    """Return lines of at most `width` columns; none begins like an item of a Markdown list."""
    glued = re.sub(r" (?=(?:\d+[.)]|[-+*])(?: |$))", "\0", text)
    lines = textwrap.wrap(
        glued,
        width,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _escaped(text: str) -> str:
    """Escape what Markdown would take for emphasis, outside of code."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def _code(value: Any) -> str:
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return "???" if value == MISSING else plain(value)


if __name__ == "__main__":
    print(markdown_page(), end="")
