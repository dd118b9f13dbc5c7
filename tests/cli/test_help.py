"""The pages about all settings: every key in one group, examples that run, and `--help WORD`."""

from __future__ import annotations

import re
import shlex

import pytest

from megafp8.cli.help import help_page, keys_of_group
from megafp8.cli.main import run_app
from megafp8.config.errors import SettingError
from megafp8.config.groups import GROUPS
from megafp8.config.load import load
from megafp8.config.schema import all_keys
from scripts.configuration import TEXTS, anchor, markdown_page

PROG = "python pretrain_gpt.py"


def test_every_group_has_keys_and_every_key_is_shown_once() -> None:
    shown = [key.path for name in GROUPS for key in keys_of_group(name)]
    assert sorted(shown) == sorted(all_keys())
    assert all(keys_of_group(name) for name in GROUPS) and GROUPS.keys() == TEXTS.keys()


@pytest.mark.parametrize("name", GROUPS)
def test_a_groups_example_is_accepted_and_is_about_it(name: str) -> None:
    group = TEXTS[name]
    words = shlex.split(group.example)
    if group.script == "pretrain_gpt.py":
        load(words)
    else:  # its model and its data are the user's
        with pytest.raises(SettingError, match="restore_from_path=runs/first"):
            load(words, config_name=group.script.removesuffix(".py"))
    keys = {word.partition("=")[0] for word in words}
    assert keys & {key.path for key in keys_of_group(name)}


def test_the_page_has_contents_with_a_link_to_each_group_and_key() -> None:
    page = markdown_page()
    contents = page.partition("## How settings are given")[0]
    for group in GROUPS.values():
        assert f"](#{anchor(group.title)})" in contents and f"\n## {group.title}\n" in page
    for path in all_keys():
        assert page.count(f'<a id="{path}"></a>') == 1 and f"](#{path})" in contents


def test_no_line_of_the_page_begins_a_list_by_accident() -> None:
    assert not re.search(r"^ +(?:\d+[.)]|[+*]) ", markdown_page(), re.MULTILINE)


def test_help_explains_every_key_and_fits_the_screen() -> None:
    lines = help_page(PROG).splitlines()
    for path in all_keys():
        assert any(line.startswith(f"  {path}=") for line in lines), path
    assert all(len(line) <= 100 for line in lines if line.startswith("      "))


def test_help_with_words_shows_the_keys_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["--help", "margin", "model.seed=1"], lambda cfg, info: 1) == 0
    shown = re.findall(r"^  (\S+?)=", capsys.readouterr().out, re.MULTILINE)
    assert shown == ["model.seed", "model.fp8_margin"]
    assert "No key or value has nonsense in its name" in help_page(PROG, ["nonsense"])


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("mxfp8", ["  model.fp8_recipe=delayed", "  precision=bf16_with_mxfp8_mixed,"]),
        ("hybrid", ["  model.fp8=False", "  model.fp8_hybrid=null"]),
        ("custom", ["  model.fp8_recipe=delayed", "refused: custom"]),
        ("subchannel", ["Refused: precision=bf16_with_fp8_subchannel_scaling_mixed"]),
        ("fp8_output_proj", ["  model.fp8_output_proj", "[accepted: False]"]),
        ("fp8_param", ["  model.fp8_param_gather", "It stands for model.fp8_params=True."]),
        ("fp4_param", ["  model.fp4_param", "It is refused if it is True."]),
        ("mla", ["  model.multi_latent_attention", "[accepted: False, null]"]),
        ("mtp", ["  model.mtp_num_layers", "[accepted: null, 0]"]),
        ("lion", ["  model.optim.name=adamw"]),
        ("recompute_granularity", ["  recompute_granularity", "checkpoint_granularity."]),
        ("model.swiglu", ["  swiglu", "for what model.activation says here."]),
        ("untie", ["  untie_embeddings_and_output_weights", "opposite of model.share_embeddings"]),
        ("dsa_indexer_topk", ["  dsa_*", "It is a name of Megatron's without an effect here;"]),
        ("no_load_rng", ["  no_load_rng", "without an equivalent here;"]),
        ("muon_nesterov", ["  model.optim.muon_nesterov", "model.optim.muon_use_nesterov=True."]),
        ("muon_split_qkv", ["  model.optim.name=adamw"]),
        ("lr_wsd_decay_iters", ["  model.optim.sched.wsd_decay_steps=null"]),
        ("lr_wsd_decay_style", ["  model.optim.sched.wsd_decay_style=exponential"]),
        ("lr_decay_style", ["  model.optim.sched.name=CosineAnnealing"]),
    ],
)
def test_help_finds_values_presets_and_names_of_others(word: str, shown: list[str]) -> None:
    page = help_page(PROG, [word])
    assert all(text in page for text in shown), page
    assert "model.seed" not in page and "exp_manager.name" not in page


@pytest.mark.parametrize("more", [[], ["--config-name", "mine"]])
def test_help_is_about_the_commands_own_job(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def page(job: str) -> str:
        code = run_app(
            ["--help", *more], lambda cfg, info: 1, prog=f"python {job}.py", config_name=job
        )
        assert code == 0
        return capsys.readouterr().out

    tuning, training = page("finetune_gpt"), page("pretrain_gpt")
    for setting, usual in {
        "trainer.max_steps=300": "trainer.max_steps=900",
        "model.optim.lr=0.0001": "model.optim.lr=0.002",
        "model.data.data_prefix=null": "model.data.data_prefix=builtin",
        "Fine-tune a GPT on": "Pretrain a GPT.",
        "`defaults: [finetune_gpt, _self_]`": "`defaults: [pretrain_gpt, _self_]`",
        "use another YAML than finetune_gpt": "use another YAML than pretrain_gpt",
        "with the values of finetune_gpt.yaml": "with the values of pretrain_gpt.yaml",
    }.items():
        assert setting in tuning and usual not in tuning, setting
        assert usual in training and setting not in training, usual
