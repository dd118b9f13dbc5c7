"""What was trained beside what is served: nothing between equal recipes, and planted faults named.

The runs are tiny and train once for all tests. Where both sides have one rule everything is exact,
so that a fault is the only difference, and the rule that undoes it leaves no byte and a KL of 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fp8_numerics.formats import E4M3
from megafp8.checkpoint import serving
from megafp8.checkpoint.huggingface import ConversionError
from megafp8.checkpoint.huggingface_files import weight_bytes
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.serving import ServingFormat
from megafp8.checkpoint.serving_blocks import BlockFormat, Blocks
from megafp8.cli import export, serve_diff
from megafp8.cli.export_quantized import QuantizedOptions, plan_quantized
from megafp8.cli.serve_diff import Compared, forms_of
from megafp8.train.recorded import validation_data
from megafp8.train.serve_casts import NOTHING, Form
from megafp8.train.serve_diff import KEPT, KV, ROUTER, Distance, Result, compare
from megafp8.train.serve_sides import Sides, Way, trained_state
from megafp8.train.served import served_model
from megafp8.train.step import local_batch
from megafp8.train.validate import evaluate
from tests.checkpoint.test_serving import spec_of
from tests.kit.faults import Fault, planted
from tests.train.runs import TWO_RANKS, Driver, Place
from tests.train.test_fp8_export import ENDS, LLAMA, report_in

SHORT = [*LLAMA, "model.num_layers=2", "model.encoder_seq_length=64"]
NO_HISTORY = "model.fp8_amax_history_len=1024"
MORE = {
    "mxfp8": [*ENDS, *TWO_RANKS, "model.share_embeddings_and_output_weights=True", NO_HISTORY],
    "blockwise": [NO_HISTORY],
    "nvfp4": [NO_HISTORY],
    "bf16": ["model.fp8=False", NO_HISTORY],
    "delayed": ["model.fp8_params=True"],
    "experts": [
        "model.fp8_recipe=mxfp8",
        "model.num_moe_experts=4",
        NO_HISTORY,
        "model.moe_ffn_hidden_size=128",
        "model.qk_layernorm=True",
        "model.ffn_dropout=0",
    ],
    "mixed": ["model.fp8=False", "model.megatron_amp_O2=False", NO_HISTORY],
}
"""The settings of the runs by their names, most of them recipes; one trains on two ranks."""
Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(driver: Driver, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    place, known = Place(driver, dataset, tmp_path_factory.mktemp("served")), dict[str, Path]()

    def run(name: str) -> Path:
        if name not in known:
            words = [*SHORT, f"model.fp8_recipe={name}", *MORE[name], f"exp_manager.name={name}"]
            if "model.fp8=False" in words:
                words.remove(f"model.fp8_recipe={name}")
            done = place.run(*words)
            assert done.code == 0, done.output
            known[name] = place.checkpoint(4, name)
        return known[name]

    return run


def quiet(line: str) -> None:
    """Show nothing."""


def compared(checkpoint: Path, form: Form) -> Result:
    reader = Reader(checkpoint)
    data = validation_data(reader, 6, quiet)
    return compare(Sides.of(reader, quiet), form, data.batches)


def test_the_same_recipe_on_both_sides_is_the_same(runs: Runs) -> None:
    """A tied head, a layer in BF16 and a run of two ranks are among it."""
    kept = {f"layers.0.{name}" for name in
            ("attention.qkv", "attention.projection", "mlp.fc1", "mlp.fc2")}  # fmt: skip
    form = BlockFormat("mxfp8", kept=frozenset(kept), source=torch.bfloat16, tp=2)
    for name, served in (("mxfp8", form), ("bf16", None)):
        found = compared(runs(name), served)
        assert found.served.kl == found.served.largest == found.served.absolute == 0.0
        assert found.served.agree == found.served.tokens > 100
        assert not found.rules
        for apart in (*found.weights.values(), *found.inputs.values()):
            assert apart.bytes > 0 and (apart.differ, apart.scales) == (0, 0)
        assert found.more[KV].kl > 0, "a server that rounds keys and values does more"
        assert (KEPT in found.more) is (served is not None)


def test_the_trained_side_is_the_evaluation_of_the_run(runs: Runs) -> None:
    for name in ("delayed", "blockwise"):
        reader = Reader(runs(name))
        batches = validation_data(reader, 6, quiet).batches
        loss, tokens = evaluate(trained_state(reader, quiet), batches)
        sides = Sides.of(reader, quiet)
        found = compare(sides, None, batches, only=True)
        assert found.trained.tokens == tokens
        assert found.trained.loss / tokens == pytest.approx(loss, rel=1e-5)
        assert found.trained.kl == 0.0 < found.served.kl and not found.rules


def test_a_residual_stream_in_fp32_is_what_differs(runs: Runs) -> None:
    found = compared(runs("mixed"), None)
    assert found.served.kl > 0 == found.rules["rest"].kl and found.ranked() == ["rest"]
    assert not any(apart.differ for apart in found.weights.values())


def test_a_rule_that_shows_late_counts_all_tokens(runs: Runs) -> None:
    """In the batches before, its casts were those that are served."""
    reader, form = Reader(runs("delayed")), ServingFormat("channel")
    batches = validation_data(reader, 6, quiet).batches
    whole = compare(Sides.of(reader, quiet), form, batches)
    sides, late = Sides.of(reader, quiet), [0]
    rules = sides.rules

    def of_later_batches() -> list[str]:
        late[0] += 1
        return rules() if late[0] > 2 else []

    sides.rules = of_later_batches  # type: ignore[method-assign]
    found = compare(sides, form, batches)
    for key, distance in found.rules.items():
        assert distance.tokens == whole.rules[key].tokens == found.served.tokens
    assert found.served == whole.served


def test_weights_of_nvfp4_are_the_runs_and_inputs_are_what_differs(runs: Runs) -> None:
    inputs = dict.fromkeys(Sides.of(Reader(runs("nvfp4")), quiet).linears, 40.0)
    form = BlockFormat("nvfp4", "modelopt", source=torch.bfloat16, input_amaxes=inputs)
    found = compared(runs("nvfp4"), form)
    assert not any(apart.differ or apart.scales for apart in found.weights.values())
    assert found.served.kl > 0 == found.rules["inputs"].kl
    assert set(found.rules) == {"inputs", "static"}
    assert found.rules["static"].kl < found.served.kl
    assert KEPT not in found.more, "the inputs of the other linears have no number"


# ---- planted faults


def floored(right: Any, form: Any, *given: Any) -> Blocks:
    """Round the codes of scales down where the recipe rounds up."""
    blocks: Blocks = right(form, *given)
    values = blocks.numbers.unflatten(1, (-1, 32)) * blocks.scales[..., None]
    scales = blocks.scales / 2
    numbers = (values / scales[..., None]).clamp(-448, 448).to(E4M3.dtype).float()
    return Blocks(numbers.flatten(1), scales, blocks.amax)


def turned(right: Any, form: Any, linear: Any, read: Any) -> Blocks:
    """Cast the transposed weight of a linear whose shape does not show it."""
    is_square = linear.name.endswith("projection")
    blocks: Blocks = right(form, linear, (lambda n: read(n).t()) if is_square else read)
    return blocks


def scales_of_the_first(right: Any, form: Any, linear: Any, read: Any) -> Blocks:
    """Cast all parts of a joined weight with the scales of the first one's first row."""
    blocks: Blocks = right(form, linear, read)
    if len(linear.parts) == 1:
        return blocks
    scales = blocks.scales[:1].expand_as(blocks.scales).contiguous()
    values = blocks.numbers.unflatten(1, (-1, 32)) * blocks.scales[..., None]
    numbers = (values / scales[..., None]).clamp(-448, 448).to(E4M3.dtype).float()
    return Blocks(numbers.flatten(1), scales, blocks.amax)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [(floored, "weight scales"), (turned, "turned"), (scales_of_the_first, "joined")],
)
def test_a_planted_fault_is_named(wrong: Any, cause: str, runs: Runs) -> None:
    """It is the only difference: with this rule as in training nothing is left of it."""
    target = "megafp8.checkpoint.serving_blocks.BlockFormat.quantize"
    form = BlockFormat("mxfp8", source=torch.bfloat16)
    kept = frozenset(n for n in Sides.of(Reader(runs("mxfp8")), quiet).linears if "layers.0" in n)
    with planted(Fault(target, wrong)):
        found = compared(runs("mxfp8"), replace(form, kept=kept))
    assert found.ranked()[0] == found.cause() == cause
    assert found.served.kl > 0 == found.rules[cause].kl
    assert found.left[cause].differ == 0 == found.left[cause].scales
    assert sum((x for x in found.weights.values()), start=NOTHING).differ > 0
    assert not any(apart.differ for apart in found.inputs.values())


def test_fp32_scales_for_powers_of_two_are_named(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The powers of two of `scale_fmt` ue8m0 are those of the recipe; then one rule is not."""
    form = ServingFormat("block", scale_fmt="ue8m0", source=torch.bfloat16)
    found = compared(runs("blockwise"), form)
    assert found.served.kl == 0.0 == found.served.largest and not found.rules
    for apart in (*found.weights.values(), *found.inputs.values()):
        assert apart.bytes > 0 and (apart.differ, apart.scales) == (0, 0)
    for name, cause in (("scale_of", "weight scales"), ("input_scale_of", "input scales")):
        with monkeypatch.context() as patch:
            wrong = getattr(serving, name)
            patch.setattr(ServingFormat, name, lambda form, amax, wrong=wrong: wrong(amax))
            found = compared(runs("blockwise"), form)
        assert found.ranked()[0] == cause
        assert found.served.kl > 0 == found.rules[cause].kl


# ---- experts


def sides_of(checkpoint: Path) -> Sides:
    """The sides of a run with experts whose routers never choose expert 3."""
    sides = Sides.of(Reader(checkpoint), quiet)
    for experts, _ in sides.routed:
        experts.router.bias = torch.tensor([0.0, 0, 0, -1e9])
    assert len(sides.routed) == 4, "of two layers, on both sides"
    return sides


def test_experts_of_one_recipe_differ_by_what_becomes_of_the_router(runs: Runs) -> None:
    """Servers hold it in BF16, and its weights multiply what an expert returns."""
    batches = validation_data(Reader(runs("experts")), 6, quiet).batches
    sides = sides_of(runs("experts"))
    found = compare(sides, BlockFormat("mxfp8", source=torch.bfloat16), batches)
    assert set(found.rules) == {"router", "place", "routing"}
    assert found.served.kl > 0 == found.rules["routing"].kl == found.rules["routing"].largest
    assert found.cause() in ("router", "place") and ROUTER in found.more
    assert all(0 < found.rules[key].kl != found.served.kl for key in ("router", "place"))
    for name, apart in found.weights.items():
        assert apart.bytes > 0 and (apart.differ, apart.scales) == (0, 0)
        of_inputs = found.inputs[name]
        assert (of_inputs.bytes == 0) == (".experts.3." in name), "no token has visited it"
        assert (of_inputs.differ, of_inputs.scales) == (0, 0)


def floored_in_one(right: Any, form: Any, linear: Any, read: Any) -> Blocks:
    planted_in = "layers.1.mlp.experts.2.fc1"
    return (
        floored(right, form, linear, read)
        if linear.name == planted_in
        else right(form, linear, read)
    )


def test_a_fault_in_one_expert_is_named_with_its_linear(runs: Runs) -> None:
    sides = sides_of(runs("experts"))
    batches = validation_data(Reader(runs("experts")), 6, quiet).batches
    with planted(Fault("megafp8.checkpoint.serving_blocks.BlockFormat.quantize", floored_in_one)):
        found = compare(sides, BlockFormat("mxfp8", source=torch.bfloat16), batches)
    named = ["layers.1.mlp.experts.2.fc1"]
    assert [name for name, apart in found.weights.items() if apart.differ] == named
    assert found.places["weight scales"] == found.places["weights"] == named
    assert found.left["weight scales"].differ == 0
    for key in found.rules.keys() - {"weight scales"}:
        found.rules[key] = replace(found.served)
    assert words_of(found).cause() == f"cause: rule of the weights' scales in {named[0]}"
    rows = {row[0]: row[1:] for row in list(words_of(found).tables())[-1][2]}
    assert len(rows) == 2 * 4, "all experts of a layer are one row"
    apart = found.weights[named[0]]
    assert rows["layers.1.mlp.experts.*.fc1"][0] == f"{apart.differ / apart.bytes / 4:.2%}"


def words_of(found: Result) -> Compared:
    return Compared(Path("run"), "mxfp8", "mxfp8", "", found, [])


@pytest.mark.parametrize(
    ("run", "asked"),
    [
        ("delayed", QuantizedOptions(fp8_scales="tensor")),
        ("experts", QuantizedOptions(fp8_scales="channel")),
        ("blockwise", QuantizedOptions(fp8_scales="block", scale_fmt="ue8m0")),
        ("experts", QuantizedOptions("mxfp8")),
        ("nvfp4", QuantizedOptions("nvfp4", layout="modelopt")),
        ("nvfp4", QuantizedOptions("nvfp4", fp8_inputs="static")),
    ],
)
def test_the_loss_of_an_export_is_that_of_the_comparison(
    run: str,
    asked: QuantizedOptions,
    runs: Runs,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model that is made of the files and the served side have the same logits, bit for bit.

    An export sums losses in FP32, with the unit u of 2**-24: of a token, V exponentials and their
    logarithm are wrong by (V + R + 2) u, where R is the range of logits, and a sum of T losses by
    T u of it. The comparison sums in FP64.
    """
    checkpoint, asked = runs(run), asked._replace(validation_samples=6)
    export.export(checkpoint, tmp_path / "out", torch.bfloat16, quantized=asked)
    reported = report_in(tmp_path / "out")["loss"][asked.dtype]
    reader, cpu = Reader(checkpoint), torch.device("cpu")
    sides = Sides.of(reader, quiet)
    planned = plan_quantized(reader, sides.spec, asked, None)
    batches = validation_data(reader, 6, quiet).batches
    found = compare(sides, planned.fmt, batches, only=True)
    of_files = served_model(tmp_path / "out", sides.spec, planned.fmt, cpu)
    largest = tokens = 0.0
    with torch.no_grad():
        for batch in (local_batch(each, sides.state.mesh) for each in batches):
            logits = of_files.forward_stage(batch.tokens_BS, None, None, **batch.documents)
            assert torch.equal(logits.flatten(0, 1), sides.logits(sides.served, Way(), batch))
            largest, tokens = (
                max(largest, float(logits.abs().max())),
                max(tokens, batch.tokens_BS.numel()),
            )
    loss = found.served.loss / found.served.tokens
    bound = 2.0**-24 * (sides.spec.vocab_size + 2 * largest + 2 + tokens * loss)
    assert abs(reported - loss) <= bound < 1e-3 and found.served.kl > 0 or run == "blockwise"
    size, _ = weight_bytes(tmp_path / "out")
    assert found.num_bytes == size
    assert f"{size} bytes on disk, {size} by the sizes" in capsys.readouterr().out


def test_rules_of_a_delayed_run_and_of_linears_in_high_precision(runs: Runs) -> None:
    """What a rule says of bytes follows from its casts."""
    found = compared(
        runs("delayed"), ServingFormat("channel", kept=frozenset({"layers.0.mlp.fc1"}))
    )
    assert {"static", "kept", "weight groups", "input groups", "weights"} <= set(found.rules)
    assert found.left["weights"].differ < found.left["weight groups"].differ
    kept, other = (found.weights[f"layers.{layer}.mlp.fc1"] for layer in (0, 1))
    assert kept.differ == kept.bytes == 2 * other.bytes
    assert found.num_bytes < compared(runs("delayed"), None).num_bytes


# ---- figures


def test_distances_are_those_of_float64() -> None:
    """600 tokens take three chunks."""
    generator = torch.Generator().manual_seed(1)
    trained, served = (torch.randn(600, 37, generator=generator) * 3 for _ in range(2))
    served = trained + served / 10
    targets = torch.randint(37, (600,), generator=generator)
    found = Distance()
    found.add(trained[:100], served[:100], targets[:100])
    found.add(trained[100:], served[100:], targets[100:])
    p, q = (np.exp(x.numpy().astype(np.float64)) for x in (trained, served))
    p, q = (x / x.sum(1, keepdims=True) for x in (p, q))
    at = np.arange(600), targets.numpy()
    apart = np.abs(np.log(p[at]) - np.log(q[at]))
    assert found.as_json() == pytest.approx(
        {
            "kl": (p * np.log(p / q)).sum(1).mean(),
            "logprob_mean_difference": apart.mean(),
            "logprob_largest_difference": apart.max(),
            "first_choice_agrees": (p.argmax(1) == q.argmax(1)).mean(),
            "loss": -np.log(q[at]).mean(),
        },
        rel=1e-9,
    )


def test_the_cause_is_narrow_where_a_narrow_rule_explains_half_of_it() -> None:
    found = Result(Distance(), Distance(kl=8.0, tokens=4), {}, {}, {}, {}, {})
    assert found.cause() is None
    for rules, cause in (
        ({"weights": 4.0, "weight scales": 7.0, "input scales": 4.0}, "input scales"),
        ({"weights": 3.0, "weight scales": 5.0, "input scales": 5.0}, "weight scales"),
        ({"weights": 3.0, "weight scales": 6.0, "input scales": 5.0}, "weights"),
        ({"weights": 9.0, "masters": 8.0}, None),
    ):
        found.rules = {key: Distance(kl=kl, tokens=4) for key, kl in rules.items()}
        assert found.cause() == cause


def test_the_command_writes_text_json_and_a_page(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = str(runs("delayed").parents[1]), tmp_path / "page.html"
    asked = [f"{run}@4", "--as", "fp8", "--fp8-scales", "tensor", "--validation-samples", "3"]
    assert serve_diff.main([*asked, "--page", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "trained in delayed and bf16, served as fp8 (tensor)\n  inputs as served: stat" in shown
    assert "KL (trained || served): " in shown and "\ncause: " in shown
    text = page.read_text()
    assert (
        text.startswith("<!doctype html>") and "layers.1.<wbr>mlp.<wbr>fc1" in text and KV in text
    )
    assert serve_diff.main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_samples"] == 3 and found["num_tokens"] > 50 and found["export_bytes"] > 0
    assert set(found["served"]) >= {"kl", "first_choice_agrees", "logprob_largest_difference"}
    assert found["served"]["kl"] > 0 and found["cause"] in [rule["rule"] for rule in found["rules"]]
    explained = [rule["explained_kl"] for rule in found["rules"]]
    assert explained[0] == max(explained) and set(found["more"]) == {KV}
    linear = found["linears"]["layers.1.mlp.fc1"]
    assert linear["weight"]["bytes"] == 512 * 128 and set(linear) == {"weight", "input"}


def test_what_cannot_be_compared_is_refused_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs("bf16").parents[1])
    for words, said in (
        ([run, "--as", "bfloat16", "--fp8-inputs", "dynamic"], "no effect with --as bfloat16"),
        ([run, "--as", "fp8", "--validation-samples", "0"], "leaves nothing to compare"),
        ([f"{run}@3", "--as", "fp8"], "has no checkpoint of step 3"),
        ([run, "--as", "fp8", "--fp8-inputs", "static"], "keeps no histories"),
        ([run, "--as", "int8"], "invalid choice"),
        ([run, "--as", "fp8", "--scale-fmt", "ue8m0"], "is a format of scales of blocks"),
        ([run, "--as", "mxfp8", "--scale-fmt", "ue8m0"], "no effect with --as mxfp8"),
    ):
        assert serve_diff.main(words) == 2
        assert said in capsys.readouterr().err
    module = "megafp8.train.serve_sides.shape_of"
    for settings, model, said in (
        ({"model.fp8_backend": "te"}, "llama", "has layers of model.fp8_backend=te"),
        ({"model.fp8_recipe": "lab.py:Mine"}, "llama", "was trained in lab.py:Mine, which is code"),
    ):
        monkeypatch.setattr(module, lambda _, model=model: spec_of(model))
        config = {"model.fp8": True, **settings}
        with pytest.raises(ConversionError, match=said):
            trained_state(Mock(meta={"config": config}, path=Path("run")), quiet)


def test_an_export_takes_the_form_that_is_closest_to_training(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs("mxfp8").parents[1])
    words = [run, str(tmp_path / "out"), "--closest-to-training", "--validation-samples", "2"]
    assert export.main(words) == 0
    shown = capsys.readouterr().out
    assert "closest to training: mxfp8" in shown and "\n  0  mxfp8" in shown
    assert (
        "as llama, mxfp8:" in shown and report_in(tmp_path / "out")["weights"]["scales"] == "mxfp8"
    )
    for more, said in (
        (["--dtype", "float32"], "no server's form is float32"),
        (["--dtype", "bfloat16", "--layout", "modelopt"], "no form has these options"),
    ):
        assert export.main([run, str(tmp_path / "no"), "--closest-to-training", *more]) == 2
        assert said in capsys.readouterr().err
    every = list(forms_of({}))
    assert len(every) == len(set(every)) == 10 and None in every
    assert list(forms_of({"dtype": "nvfp4", "layout": "modelopt", "fp8_inputs": "static"})) == [
        QuantizedOptions("nvfp4", fp8_inputs="static", layout="modelopt")
    ]
    assert len(list(forms_of({"dtype": "fp8", "fp8_inputs": "dynamic"}))) == 4
    (powers,) = forms_of({"scale_fmt": "ue8m0"})
    assert powers == QuantizedOptions(fp8_scales="block", scale_fmt="ue8m0", fp8_inputs="dynamic")
    assert all(
        form is not None and form.dtype != "fp8" for form in forms_of({"layout": "modelopt"})
    )
