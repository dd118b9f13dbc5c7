"""Runs are exported in FP8: static scales from histories, errors and losses, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from fp8_numerics.cast import Fp8Tensor
from megafp8.checkpoint.huggingface import mapping
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.serving import ServingFormat, single_linears
from megafp8.checkpoint.serving_blocks import BlockFormat
from megafp8.cli import export
from megafp8.cli.export_quantized import REPORT, QuantizedOptions, plan_quantized
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.config.resume import with_defaults
from megafp8.data.samples import IGNORE
from megafp8.errors import CheckpointError
from megafp8.fp8.linear import Linear
from megafp8.parallel.mesh import single_rank
from megafp8.specs.layer import model_linears
from megafp8.train.build import build
from megafp8.train.load_model import shape_of, start_from
from megafp8.train.recorded import (
    linears_in_bf16,
    other_formats,
    own_casts,
    recorded_inputs,
    recorded_values,
    validation_data,
)
from tests.checkpoint.test_serving import spec_of
from tests.tiny import gpt_spec
from tests.train.runs import JOB, Place

LLAMA = [
    "model.hidden_size=128",
    "model.ffn_hidden_size=256",
    "model.num_layers=3",
    "model.normalization=rmsnorm",
    "model.activation=fast-swiglu",
    "model.bias=False",
    "model.position_embedding_type=rope",
    "model.share_embeddings_and_output_weights=False",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    "trainer.max_steps=4",
]
TENSORWISE = ["model.fp8_recipe=tensorwise", "model.fp8_amax_history_len=1024"]
ENDS = [
    "model.first_last_layers_bf16=True",
    "model.num_layers_at_start_in_bf16=1",
    "model.num_layers_at_end_in_bf16=0",
]
KEPT = {f"layers.0.{name}" for name in
        ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")}  # fmt: skip


def stored_in(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def report_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / REPORT).read_text())
    return found


def test_a_delayed_run_is_exported_in_three_forms_and_generates(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The histories are read from the checkpoint by hand; weights in FP8 are exported anew."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    done = place.run(*LLAMA, *ENDS, "model.fp8_margin=1", "model.fp8_params=True")
    assert done.code == 0, done.output
    reader = Reader(place.checkpoint(4))
    for scales in ("tensor", "channel", "block"):
        out = tmp_path / scales
        words = [str(place.dir()), str(out), "--dtype", "fp8", "--fp8-scales", scales]
        assert export.main(words) == 0
        shown = capsys.readouterr().out
        stored, report = stored_in(out), report_in(out)
        assert set(report["linears_in_bf16"]) == KEPT and "4 linears that the run" in shown
        assert len(report["errors"]) == 14 and "layer 2: " in shown and "layer 0: " not in shown
        assert 0.01 < report["errors"][0]["relative"] < 2.0**-4
        down = "model.layers.1.mlp.down_proj"
        if scales == "block":
            assert report["inputs"] == {"scales": "dynamic"}
            assert f"{down}.input_scale" not in stored
        else:
            history = reader.read("scaling/forward/history/layers.1.mlp.fc2.input")
            assert history.shape == (7,) and bool((history > 0).all())
            scale = float(stored[f"{down}.input_scale"])
            needed = float(history.max()) * 2 / 448
            assert needed <= scale <= needed * (1 + 2.0**-7)
            assert report["inputs"]["by_linear"]["layers.1.mlp.fc2"] == scale
            said = {key: report["inputs"][key] for key in ("step", "margin", "num_updates")}
            assert said == {"step": 4, "margin": 1, "num_updates": 7}
            assert "histories of step 4, over 7 microbatches, with margin 1" in shown
            for parts in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
                names = [f"model.layers.2.{parts[0]}.{part}_proj" for part in parts[1]]
                assert len({float(stored[f"{name}.input_scale"]) for name in names}) == 1
        loss = report["loss"]
        assert math.log(400) > loss["bf16"] > 1 and abs(loss["fp8"] - loss["bf16"]) < 0.05
        assert f"BF16 {loss['bf16']:.4f}, FP8 {loss['fp8']:.4f}" in shown
        model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        prompt = tokenizer("def function_", return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        assert made.shape[1] > prompt["input_ids"].shape[1]
        assert abs(transformers_loss(model, reader) - loss["bf16"]) < 0.05
    assert export.main(words) == 2, "an existing folder is not written again"
    assert stored_in(out).keys() == stored.keys()


def test_a_run_with_experts_is_exported_and_its_histories_are_not_those_of_servers(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers computes the run's loss. Experts stay in BF16 where one of their layer does."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    flags = ["model.num_layers=2", "model.num_moe_experts=4", "model.moe_ffn_hidden_size=128",
             "model.qk_layernorm=True", "model.ffn_dropout=0",
             "model.fp8_modules=['layers.1.*.experts.3.fc2:high_precision']"]  # fmt: skip
    done = place.run(*LLAMA, *flags)
    assert done.code == 0, done.output
    reader = Reader(place.checkpoint(4))
    words = [str(place.dir()), str(tmp_path / "out"), "--dtype", "fp8"]
    assert export.main([*words, "--fp8-inputs", "static"]) == 2
    assert "--fp8-inputs static: the model has experts" in capsys.readouterr().err
    assert export.main(words) == 0
    shown = capsys.readouterr().out
    assert "routers, and 8 linears that" in shown and "experts of one layer with such" in shown
    assert "as qwen3_moe, fp8" in shown
    stored, report = stored_in(tmp_path / "out"), report_in(tmp_path / "out")
    assert len(report["errors"]) == 4 + 3 * 4 + 4
    assert report["inputs"] == {"scales": "dynamic"} and "input_scale" not in "".join(stored)
    kept = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert {name for name in stored if "layers.1.mlp.experts" in name} <= kept
    loss = report["loss"]
    assert math.log(400) > loss["bf16"] > 1 and abs(loss["fp8"] - loss["bf16"]) < 0.05
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16
    )
    assert abs(transformers_loss(model, reader) - loss["bf16"]) < 0.05


def transformers_loss(model: Any, reader: Reader) -> float:
    """The loss over the first 64 samples that the report's is over."""
    total, count = 0.0, 0
    for batch in validation_data(reader, 64, lambda line: None).batches:
        tokens, targets = (torch.from_numpy(x).long() for x in (batch.tokens_BS, batch.targets_BS))
        with torch.no_grad():
            logits = model(tokens).logits.float().flatten(0, 1)
        of_batch = torch.nn.functional.cross_entropy(
            logits, targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        total, count = total + float(of_batch), count + int((targets >= 0).sum())
    return total / count


def test_a_wrong_scale_shows_in_the_reported_loss(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = place.run(*LLAMA, *TENSORWISE, "trainer.max_steps=12",
                     "model.optim.lr=1e-2")  # fmt: skip
    assert done.code == 0, done.output
    losses = []
    exact = ServingFormat.encode

    def doubled(*args: Any) -> dict[str, torch.Tensor]:
        tensors = exact(*args)
        return tensors | {"weight_scale": 2 * tensors["weight_scale"]}

    for wrong in (False, True):
        if wrong:  # the bytes are right, and belong to another scale
            monkeypatch.setattr(ServingFormat, "encode", doubled)
        words = [str(place.dir()), str(tmp_path / str(wrong)), "--dtype", "fp8"]
        assert export.main(words) == 0
        report = report_in(tmp_path / str(wrong))
        assert report["inputs"] == {"scales": "dynamic"} and report["linears_in_bf16"] == []
        losses.append(report["loss"]["fp8"] - report["loss"]["bf16"])
    right, wrong_by = losses
    assert abs(right) < 0.02 and wrong_by > 5 * abs(right)


@pytest.mark.parametrize("recipes", [("delayed", "bf16"), ("mxfp8", "delayed")])
def test_static_scales_come_from_the_last_phase_of_a_schedule(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], recipes: tuple[str, str]
) -> None:
    first, last = recipes
    done = place.run(*LLAMA, f"model.fp8_recipe={first}",
                     f"model.precision_schedule=[{{from: 2, recipe: {last}}}]")  # fmt: skip
    assert done.code == 0, done.output
    run, out = str(place.dir()), tmp_path / "out"
    asked = [run, str(out), "--dtype", "fp8", "--validation-samples", "0"]
    code = export.main([*asked, "--fp8-inputs", "static"])
    shown = capsys.readouterr()
    said = "note: the run trained in mxfp8, and these weights are E4M3 with one scale for each row"
    if last == "delayed":
        assert code == 0 and report_in(out)["inputs"]["scales"] == "static"
        assert said in shown.out
        return
    for words in ([], ["--fp8-inputs", "static"]):
        assert export.main([*asked, *words]) == 2
        assert "Give --fp8-inputs dynamic" in shown.err and not out.exists()
    assert export.main([*asked, "--fp8-inputs", "dynamic"]) == 0
    assert report_in(out)["inputs"] == {"scales": "dynamic"}
    assert "the run trained in" not in capsys.readouterr().out, "delayed has E4M3 too"


def test_options_without_effect_and_what_a_run_does_not_have_are_refused(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = place.run(*LLAMA, *TENSORWISE, "trainer.max_steps=1")
    assert done.code == 0, done.output
    run, out = str(place.dir()), tmp_path / "out"
    for words, named in (
        (["--fp8-scales", "block"], "--fp8-scales block: has no effect with --dtype float32"),
        (["--dtype", "bfloat16", "--validation-samples", "0"], "--validation-samples 0: has no"),
        (["--dtype", "fp8", "--fp8-scales", "block", "--fp8-inputs", "static"], "in blocks"),
        (["--dtype", "fp8", "--fp8-inputs", "static"], "recipe (tensorwise) keeps no histories"),
        (
            ["--dtype", "nvfp4", "--fp8-inputs", "static", "--validation-samples", "0"],
            "are measured over these samples",
        ),
    ):
        assert export.main([run, str(out), *words]) == 2
        assert named in capsys.readouterr().err
        assert not out.exists()
    place_data = Path(recorded_values(Reader(place.checkpoint(1)))["model.data.data_prefix"])
    moved = place_data.with_suffix(".bin").rename(place_data.with_suffix(".away"))
    assert export.main([run, str(out), "--dtype", "fp8"]) == 0
    assert "note: no loss was computed" in capsys.readouterr().out
    assert str(place_data) in report_in(out)["loss"]["why_not"]
    moved.rename(place_data.with_suffix(".bin"))
    bare = tmp_path / "bare"
    assert export.main([run, str(bare), "--dtype", "fp8", "--validation-samples", "0"]) == 0
    assert "loss" not in report_in(bare) and "loss" not in capsys.readouterr().out


@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_histories_of_ranks_and_of_one_update(
    length: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that do not reduce their amaxes have rows of their own, and the largest counts."""
    done = place.run(
        *LLAMA, f"model.fp8_amax_history_len={length}", "model.reduce_amax=False",
        "trainer.devices=2", "model.tensor_model_parallel_size=2",
    )  # fmt: skip
    assert done.code == 0, done.output
    reader = Reader(place.checkpoint(4))
    found = recorded_inputs(reader, shape_of(reader), recorded_values(reader), frozenset())
    name = "layers.1.attention.projection"
    if length == 1:
        largest = 448 / float(reader.read(f"scaling/forward/quant_scale/{name}.input/shards").min())
    else:
        rows = reader.read(f"scaling/forward/history/{name}.input/shards")
        assert rows.shape == (2, 3) and rows[0].max() != rows[1].max()
        largest = float(rows.max())
    assert largest / 448 <= found.by_linear[name] <= largest / 448 * (1 + 2.0**-6)
    assert found.num_updates == max(length - 1, 1) and found.step == 4


def test_torchaos_first_and_last_linear_stay_in_bf16() -> None:
    """torchao keeps them in high precision unless a rule names them; our own engine does not."""
    words = ["model.fp8=True", "model.fp8_recipe=tensorwise", "model.num_layers=3"]
    ends = {"layers.0.attention.qkv", "layers.2.mlp.fc2"}
    named = ['model.fp8_modules=["layers.0.*:tensorwise"]']
    for more, kept in ([], ends), (named, ends - {"layers.0.attention.qkv"}):
        spec = resolve(load([*words, "model.fp8_backend=torchao", *more]), lambda: False)
        assert linears_in_bf16(spec.model, with_defaults(spec.resolved)) == kept
    spec = resolve(load(words), lambda: False)
    assert not linears_in_bf16(spec.model, with_defaults(spec.resolved))


def test_a_linear_that_has_met_no_tokens_has_no_static_scale() -> None:
    """Its history says nothing, though the run has trained for long."""
    spec = gpt_spec()
    *_, unused = names = [linear.name for linear in model_linears(spec)]
    fields = ("history", "num_updates", "quant_scale")
    reader = Mock(path=Path("run"), step=5)
    reader.names.return_value = [f"scaling/forward/{f}/{n}.input" for f in fields for n in names]
    reader.read = lambda name: torch.full((3,), int(unused not in name))
    values = {"model.fp8_margin": 0}
    with pytest.raises(CheckpointError, match=f"inputs of {unused}: no token has visited it"):
        recorded_inputs(reader, spec, values, frozenset())
    assert recorded_inputs(reader, spec, values, frozenset([unused])).num_updates == 1


def weights_of_the_run(words: list[str], checkpoint: Path) -> dict[str, torch.Tensor]:
    """Numbers times scales of all weights as the run's linears cast them, without outer factors."""
    spec = resolve(load([*JOB, *words, "model.data.data_prefix=mock"]), lambda: False)
    model = shape_of(Reader(checkpoint))
    spec = replace(spec, model=model, restore_from_path=str(checkpoint))
    state = build(spec, single_rank())
    start_from(spec, state, lambda line: None, checkpoint)
    found = {}
    for module in state.model.modules():
        if not isinstance(module, Linear) or module.quantizer is None:
            continue
        (operand, _), _ = module.quantizer.operands("weight", module.weight.detach())
        if isinstance(operand, Fp8Tensor):
            assert operand.block is not None
            scale = operand.dequant_scale
            for dim, size in enumerate(operand.block):
                scale = scale.repeat_interleave(size, dim)
            rows, columns = operand.payload.shape
            found[module.name] = operand.payload.float() * scale[:rows, :columns]
    return found


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_run_is_exported_with_the_numbers_that_it_computed_with(
    recipe: str, layout: str, place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks train; experts and linears in high precision are among them."""
    words = [*LLAMA, *ENDS, *TENSORWISE, f"model.fp8_recipe={recipe}", "trainer.max_steps=2",
             "model.num_moe_experts=4", "model.moe_ffn_hidden_size=128", "model.qk_layernorm=True",
             "model.ffn_dropout=0", "model.moe_layer_freq=[0,0,1]"]  # fmt: skip
    ranks = ["trainer.devices=2", "model.tensor_model_parallel_size=2"]
    done = place.run(*words, *ranks, "model.sequence_parallel=True")
    assert done.code == 0, done.output
    out = tmp_path / "out"
    assert export.main([str(place.dir()), str(out), "--dtype", recipe, "--layout", layout]) == 0
    shown, report = capsys.readouterr().out, report_in(out)
    assert set(report["linears_in_bf16"]) == KEPT and "the run trained in" not in shown
    assert abs(report["loss"][recipe] - report["loss"]["bf16"]) < 0.05
    assert f"{recipe.upper()} {report['loss'][recipe]:.4f}" in shown
    assert (out / "hf_quant_config.json").exists() is (layout == "modelopt")
    stored, own = stored_in(out), weights_of_the_run(words, place.checkpoint(2))
    spec = shape_of(Reader(place.checkpoint(2)))
    theirs = {entry.ours[0]: entry.theirs.removesuffix(".weight") for entry in mapping(spec)}
    fmt = BlockFormat(recipe, layout)  # type: ignore[arg-type]
    count = 0
    for linear in single_linears(spec):
        if linear.name in KEPT:
            continue
        parts = []
        for part in linear.parts:
            module = theirs[f"{part.name}.weight"]
            tensors = {last: stored[f"{module}.{last}"] for last in fmt.tensor_names}
            if recipe == "nvfp4":
                tensors[fmt.tensor_names[-1]] = torch.ones(())
            parts.append(fmt.decode(tensors))
            count += 1
        assert torch.equal(torch.cat(parts), own[linear.name]), linear.name
    assert count == len(report["errors"]) == 7 + 4 + 3 * 4


def test_an_export_casts_as_the_ranks_of_its_run_did() -> None:
    values = {"model.fp8": True, "model.fp8_recipe": "nvfp4-no_2d",
              "model.tensor_model_parallel_size": 2}  # fmt: skip
    reader = Mock(meta={"config": values})
    planned = plan_quantized(reader, spec_of("llama"), QuantizedOptions(dtype="nvfp4"), None)
    expected = BlockFormat("nvfp4", square=False, source=torch.bfloat16, tp=2)
    assert planned.fmt == expected and not planned.trained_in


def test_options_of_blocks_and_the_rule_of_another_run(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = place.run(*LLAMA, *TENSORWISE, "trainer.max_steps=1")
    assert done.code == 0, done.output
    run, out = str(place.dir()), tmp_path / "out"
    for words, named in (
        (["--dtype", "mxfp8", "--fp8-scales", "tensor"], "--fp8-scales tensor: has no effect with"),
        (["--dtype", "mxfp8", "--fp8-inputs", "dynamic"], "or give --dtype fp8 or nvfp4"),
        (["--dtype", "nvfp4", "--fp8-inputs", "dynamic"], "has one FP32 number for all inputs"),
        (["--dtype", "fp8", "--layout", "modelopt"], "or give --dtype mxfp8 or nvfp4"),
    ):
        assert export.main([run, str(out), *words]) == 2
        assert named in capsys.readouterr().err and not out.exists()
    words = [run, str(out), "--dtype", "nvfp4", "--validation-samples", "0"]
    assert export.main(words) == 0
    said = "note: the run trained in tensorwise, and these weights are E2M1 with one scale in E4M3"
    assert said in capsys.readouterr().out
    static = tmp_path / "static"
    asked = [run, str(static), "--dtype", "nvfp4", "--fp8-inputs", "static"]
    assert export.main(asked) == 0
    shown, report = capsys.readouterr().out, report_in(static)
    assert "inputs: in NVFP4, by each linear's largest magnitude" in shown
    assert abs(report["loss"]["nvfp4"] - report["loss"]["bf16"]) < 0.05
    amaxes = report["inputs"]["amaxes"]
    assert len(amaxes) == 12 and all(1 < amax < 100 for n, amax in amaxes.items() if "qkv" in n)
    number = stored_in(static)["model.layers.1.self_attn.k_proj.input_global_scale"]
    assert float(number) == pytest.approx(2688 / amaxes["layers.1.attention.qkv"])
    assert not any("input_global_scale" in name for name in stored_in(out))
    values = recorded_values(Reader(place.checkpoint(1)))
    assert own_casts(values, "nvfp4") == (True, torch.float32, 1, ["tensorwise"])
    values |= {"model.fp8_recipe": "nvfp4-no_2d", "model.tensor_model_parallel_size": 2}
    assert own_casts(values, "nvfp4") == (False, torch.bfloat16, 2, [])
    values["model.fp8_modules"] = ["layers.0.*:mxfp8", "layers.1.*:high_precision"]
    assert own_casts(values, "nvfp4").others == other_formats(values)[1:] == ["mxfp8"]
