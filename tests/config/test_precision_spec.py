"""Test which FP8 settings fit together, and the recipe that they resolve to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.config.precision_spec import gradient_format
from megafp8.config.resume import setting_differences, typed
from megafp8.errors import ConfigError
from megafp8.specs import Fp8Recipe
from megafp8.specs.recipes import RECIPES, find_recipe
from megafp8.specs.traits import FormatName
from tests.config.helpers import run_spec

FP8 = "model.fp8=True"


def recipe(*overrides: str) -> Fp8Recipe:
    found = run_spec(FP8, *overrides).precision.fp8
    assert found is not None
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves(name: str) -> None:
    found = recipe(f"model.fp8_recipe={name}")
    is_old = name in ("delayed", "tensorwise")
    assert found.name == name
    assert (found.forward_format, found.backward_format) == ("e4m3", "e5m2" if is_old else "e4m3")
    assert found.power_2_scale is not (is_old or name == "nvfp4")


def test_megatrons_names_of_fp4_and_its_parts() -> None:
    assert recipe("model.fp4=e2m1") == recipe("model.fp8_recipe=nvfp4")
    assert recipe("model.fp4_recipe=nvfp4", "model.fp4_param=False").name == "nvfp4"
    found = recipe(
        "model.fp4=e2m1", "model.fp4_disable_rht=True", "model.fp4_disable_2d_quantization=True",
        'model.fp8_modules=["*.fc2:nvfp4-no_rht","*.qkv:mxfp8"]',
    )  # fmt: skip
    assert found.name == "nvfp4-no_rht-no_2d"
    assert [rule.precision for rule in found.modules] == ["nvfp4-no_rht-no_2d", "mxfp8"]
    assert recipe("model.fp4=e2m1", "model.fp4_disable_stochastic_rounding=True").name == (
        "nvfp4-no_sr"
    )


def test_the_preset_of_nvfp4_keeps_the_last_layer_in_bf16() -> None:
    found = run_spec("precision=nvfp4").precision.fp8
    assert found is not None and found.name == "nvfp4"
    assert [rule.pattern for rule in found.modules] == ["layers.3.*"]


def test_formats_and_power_2_can_be_chosen() -> None:
    tensorwise = "model.fp8_recipe=tensorwise"
    assert recipe(tensorwise, "model.fp8_e4m3=True").backward_format == "e4m3"
    assert recipe(tensorwise, "model.fp8_power_2_scale=True").power_2_scale
    assert not recipe("model.fp8_recipe=blockwise", "model.fp8_power_2_scale=False").power_2_scale
    off = ("model.fp8_hybrid=False", "model.fp8_e4m3=False")
    assert recipe("model.fp8_recipe=mxfp8", *off).backward_format == "e4m3"


def test_products_in_high_precision() -> None:
    assert recipe("model.fp8_wgrad=False").high_precision_gemms == {"grad_weight"}
    both = recipe("model.fp8_wgrad=False", "model.override_linear_precision=[true,false,false]")
    assert both.high_precision_gemms == {"output", "grad_weight"}


def test_first_and_last_layers() -> None:
    found = recipe("model.num_layers=6", "model.first_last_layers_bf16=True",
                   "model.num_layers_at_start_in_bf16=2")  # fmt: skip
    high = [
        layer for layer in range(6)
        if found.precision_of(f"layers.{layer}.mlp.fc1") == "high_precision"
    ]  # fmt: skip
    assert high == [0, 1, 5]


def test_modules_by_pattern_come_before_layers() -> None:
    found = recipe(
        "model.first_last_layers_bf16=True",
        'model.fp8_modules=["layers.0.*.fc2:tensorwise","*.qkv:high_precision"]',
    )
    assert found.precision_of("layers.0.mlp.fc2") == "tensorwise"
    assert found.precision_of("layers.0.mlp.fc1") == "high_precision"
    assert found.precision_of("layers.1.attention.qkv") == "high_precision"
    assert found.precision_of("layers.1.mlp.fc1") == "delayed"


@pytest.mark.parametrize("recipe_name", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize(
    "detail",
    [
        "model.fp8_margin=1",
        "model.fp8_interval=2",
        "model.fp8_amax_history_len=16",
        "model.fp8_amax_compute_algo=most_recent",
        "model.reduce_amax=False",
    ],
)
def test_details_of_delayed_scaling_belong_to_it(recipe_name: str, detail: str) -> None:
    key = detail.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"has no effect with model.fp8_recipe={recipe_name}"
    ) as error:
        recipe("trainer.devices=2", f"model.fp8_recipe={recipe_name}", detail)
    assert error.value.key == key
    one_delayed = 'model.fp8_modules=["*.fc2:delayed"]'
    assert recipe("trainer.devices=2", f"model.fp8_recipe={recipe_name}", detail, one_delayed)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.fp8_power_2_scale=True"], "model.fp8_power_2_scale"),
        (["model.ub_tp_comm_overlap=True"], "model.ub_tp_comm_overlap"),
        (
            ["model.ub_tp_comm_overlap=True", "model.fp8_backend=te", "model.openai_gelu=True"],
            "model.ub_tp_comm_overlap",
        ),
        (["model.fp8_params=True", "model.fp8_recipe=rowwise"], "model.fp8_params"),
        (["model.fp8_params=True", 'model.fp8_modules=["*.fc2:rowwise"]'], "model.fp8_params"),
        (
            ["model.fp8_params=True", "model.override_linear_precision=[false,true,false]"],
            "model.fp8_params",
        ),
        (
            ["model.fp8_params=True", "model.reduce_amax=False", "trainer.devices=2"],
            "model.reduce_amax",
        ),
        (
            ["model.override_linear_precision=[true,true,true]"],
            "model.override_linear_precision",
        ),
        (
            ["model.fp8_wgrad=False", "model.override_linear_precision=[true,true,false]"],
            "model.override_linear_precision",
        ),
        (["model.fp8_wgrad=False", "model.fp8_recipe=rowwise_with_gw_hp"], "model.fp8_wgrad"),
        (
            ["model.fp8_recipe=rowwise_with_gw_hp",
             "model.override_linear_precision=[true,true,false]"],
            "model.override_linear_precision",
        ),
        (["model.num_layers_at_start_in_bf16=2"], "model.num_layers_at_start_in_bf16"),
        (["model.num_layers_at_end_in_bf16=2"], "model.num_layers_at_end_in_bf16"),
        (
            ["model.first_last_layers_bf16=True", "model.num_layers=2"],
            "model.first_last_layers_bf16",
        ),
        (
            ["model.first_last_layers_bf16=True", "model.num_layers_at_start_in_bf16=0",
             "model.num_layers_at_end_in_bf16=0"],
            "model.first_last_layers_bf16",
        ),
        (["model.fp8_recipe=blockwise", "model.pad_inner_dim=True"], "model.pad_inner_dim"),
        (["model.fp8_recipe=rowwise", "model.fp8_hybrid=True"], "model.fp8_hybrid"),
        (["model.fp8_recipe=mxfp8", "model.fp8_hybrid=True"], "model.fp8_hybrid"),
        (["model.fp8_recipe=mxfp8", "model.fp4_disable_rht=True"], "model.fp4_disable_rht"),
        (["model.fp8_recipe=nvfp4-no_sound"], "model.fp8_recipe"),
        (["model.fp4=e3m0"], "model.fp4"),
        (["model.fp4=e2m1", "model.fp4_param=True"], "model.fp4_param"),
        (["model.fp4=e2m1", "model.fp8_params=True"], "model.fp8_params"),
        (["model.fp4=e2m1", "model.encoder_seq_length=24", "model.micro_batch_size=2",
          "model.context_parallel_size=2", "trainer.devices=2"], "model.context_parallel_size"),
        (
            ["model.fp8_split_accumulator=[true,true,true]", "trainer.accelerator=cpu"],
            "model.fp8_split_accumulator",
        ),
        (["model.fp8_health_min_snr_db=10"], "model.fp8_health_min_snr_db"),
        (['model.fp8_modules=["*.fc2:bf17"]'], "model.fp8_modules"),
        (['model.fp8_modules=["fc2"]'], "model.fp8_modules"),
        (['model.fp8_modules=["*fc9:high_precision"]'], "model.fp8_modules"),
        (["model.num_layers=2", 'model.fp8_modules=["layers.2.*:rowwise"]'], "model.fp8_modules"),
        (["model.override_linear_precision=[true]"], "model.override_linear_precision"),
        (["model.pad_inner_dim=True"], "model.pad_inner_dim"),
        (
            [
                "model.fp8_backend=torchao",
                "model.fp8_recipe=tensorwise",
                "model.pad_inner_dim=True",
            ],
            "model.pad_inner_dim",
        ),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(*overrides)
    assert error.value.key == key


def test_without_fp8_its_details_are_refused() -> None:
    for detail in ("model.fp8_params=True", "model.fp8_recipe=rowwise", "model.fp8_health=full"):
        with pytest.raises(ConfigError, match="has no effect with model.fp8=False"):
            run_spec(detail)


def test_blocks_need_their_multiples() -> None:
    with pytest.raises(ConfigError, match="multiples of 128"):
        recipe("model.fp8_recipe=blockwise", "model.ffn_hidden_size=1040")


def test_a_size_refused_for_blocks_names_the_recipe_and_that_others_would_take_it() -> None:
    narrow = ("model.fp8_recipe=blockwise", "model.num_attention_heads=4", "model.hidden_size=64")
    with pytest.raises(ConfigError) as caught:
        recipe(*narrow, "model.ffn_hidden_size=256")
    text = str(caught.value)
    assert "model.hidden_size=64" in text and "blockwise (model.fp8_recipe)" in text
    others = text.partition("or a recipe of multiples of 16: ")[2]
    assert "tensorwise" in others and "mxfp8" not in others, "that needs multiples of 32"
    with pytest.raises(ConfigError) as caught:
        recipe("model.fp8_recipe=blockwise", "model.ffn_hidden_size=1048")
    assert "tensorwise" not in str(caught.value)  # 1048 is no multiple of 16 either
    with pytest.raises(ConfigError) as caught:
        recipe("model.ffn_hidden_size=1048")
    assert "blockwise" not in str(caught.value)


def test_padding_allows_odd_sizes() -> None:
    odd = ("model.hidden_size=36", "model.ffn_hidden_size=100")
    with pytest.raises(ConfigError, match="multiples of 16") as refused:
        recipe(*odd)
    assert "or model.pad_inner_dim=True" in str(refused.value)
    assert recipe(*odd, "model.pad_inner_dim=True").pad_inner_dim


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*fc9", "Did you mean *fc2 or *fc1"),
        ("layers.0.attention.qvk", "layers.0.attention.qkv"),
        ("layers.12.*", "The linears are layers.0.attention.qkv to layers.3.mlp.fc2"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_close_names(
    pattern: str, said: str
) -> None:
    layers = "model.num_layers=4"
    with pytest.raises(ConfigError) as error:
        recipe(layers, f'model.fp8_modules=["*.fc1:rowwise","{pattern}:high_precision"]')
    assert f"the pattern {pattern} matches no linear" in str(error.value)
    assert said in str(error.value)


def test_a_rule_that_comes_too_late_is_refused() -> None:
    rules = '["*.mlp.*:tensorwise","*.fc1:rowwise","*:blockwise"]'
    with pytest.raises(ConfigError) as error:
        recipe(f"model.fp8_modules={rules}")
    assert "*.fc1:rowwise decides about no linear" in str(error.value)
    assert "Write it before *.mlp.*, or leave it out" in str(error.value)
    assert "*:blockwise decides" not in str(error.value)  # the linears of attention


@pytest.mark.parametrize("second", ["*.fc2:mxfp8", "*.fc2:rowwise"])
def test_a_second_rule_of_a_pattern_is_refused(second: str) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(f'model.fp8_modules=["*.fc2:mxfp8","{second}"]')
    assert f"{second} decides about no linear" in str(error.value)
    assert "Leave out one of the rules for *.fc2" in str(error.value)


@pytest.mark.parametrize(
    ("formats", "e4m3", "hybrid", "found"),
    [
        (("e5m2", "e4m3"), None, None, "e5m2"),
        (("e4m3", "e5m2"), None, None, "e4m3"),  # the first is the recipe's own
        (("e4m3", "e5m2"), None, True, "e5m2"),
        (("e4m3", "e5m2"), False, None, "e5m2"),
        (("e5m2", "e4m3"), True, None, "e4m3"),
        (("e4m3",), False, None, "e4m3"),
        (("e5m2",), None, None, "e5m2"),
    ],
)
def test_the_format_of_gradients_is_the_one_asked_for_or_the_recipes_first(
    formats: tuple[FormatName, ...], e4m3: bool | None, hybrid: bool | None, found: FormatName
) -> None:
    traits = replace(find_recipe("delayed").traits, backward_formats=formats)
    values = {"model.fp8_e4m3": e4m3, "model.fp8_hybrid": hybrid}
    assert gradient_format(values, traits) == found


@pytest.mark.parametrize(
    ("settings", "formats"),
    [
        (["model.fp8_recipe=mxfp8"], {"mxfp8": "e4m3", "delayed": "e5m2"}),
        (["model.fp8_recipe=mxfp8", "model.fp8_e4m3=True"], {"mxfp8": "e4m3", "delayed": "e4m3"}),
        (["model.fp8_recipe=tensorwise"], {"tensorwise": "e5m2", "delayed": "e5m2"}),
        (
            ["model.fp8_recipe=tensorwise", "model.fp8_e4m3=True"],
            {"tensorwise": "e4m3", "delayed": "e4m3"},
        ),
        (["model.fp8_recipe=mxfp8", "model.fp8_e4m3=False"], {"delayed": "e5m2"}),
    ],
)
def test_linears_under_another_recipe_have_its_format_of_gradients(
    settings: list[str], formats: dict[str, str]
) -> None:
    found = recipe(*settings, 'model.fp8_modules=["*.fc2:delayed"]')
    assert {name: found.gradients_in(name) for name in formats} == formats


def test_a_pattern_of_another_pipeline_stage_is_fine() -> None:
    stages = ["model.num_layers=2", "trainer.devices=2", "model.pipeline_model_parallel_size=2"]
    for layer in (0, 1):
        assert recipe(*stages, f'model.fp8_modules=["layers.{layer}.*:rowwise"]').modules
    first_last = ["model.first_last_layers_bf16=True", "model.num_layers=4"]
    assert len(recipe(*first_last, 'model.fp8_modules=["layers.0.*:rowwise"]').modules) == 3


def test_a_run_with_a_pattern_that_was_ignored_continues_without_it() -> None:
    """An older version trained with it; a rule that had an effect may not be left out."""
    new = {"model": {"fp8": True, "num_layers": 2, "fp8_modules": []}}
    for entry, num_found in (("*fc9:high_precision", 0), ("*fc2:high_precision", 1)):
        old = {"model": {"fp8": True, "num_layers": 2, "fp8_modules": [entry]}}
        assert len(setting_differences(old, new)) == num_found
        twice = {"model": {"fp8": True, "num_layers": 2, "fp8_modules": [entry, entry]}}
        assert not setting_differences(twice, old)


def test_another_recipe_is_one_difference_which_can_be_typed() -> None:
    """The formats follow from it, and a user who never gave them could not tell what to give."""
    both = {"fp8": True, "num_layers": 2}
    mine = {**both, "fp8_recipe": "mine.py", "fp8_e4m3": False, "fp8_hybrid": True}
    new = {**both, "fp8_recipe": "nvfp4", "fp8_e4m3": True, "fp8_hybrid": False}
    (found,) = setting_differences({"model": mine}, {"model": new})
    assert typed(found.key, found.old) == "model.fp8_recipe=mine.py"
    new |= {"fp8_recipe": "mine.py"}
    formats = setting_differences({"model": mine}, {"model": new})
    assert {each.key for each in formats} == {"model.fp8_e4m3", "model.fp8_hybrid"}
