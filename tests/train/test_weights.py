"""Runs are exported to models of transformers, and such models start new runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from megafp8.checkpoint.reader import Reader
from megafp8.cli import export, generate, import_hf
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.indexed import IndexedWriter
from megafp8.errors import ConfigError, RunError
from megafp8.models.attention import KVCache
from megafp8.models.gpt import GPT
from megafp8.models.parts import Parts
from megafp8.models.random import RandomStreams
from megafp8.runs.tokenizer import find_tokenizer
from megafp8.specs import MoESpec
from megafp8.train import generate as generating
from megafp8.train.generate import Sampling, beyond_training
from megafp8.train.generate import generate as draw
from megafp8.train.huggingface import divisor
from megafp8.train.load import find_checkpoint
from megafp8.train.load_model import check_fits, load_model, shape_of
from tests.foreign.made import make_model
from tests.tiny import VOCAB, gpt_spec
from tests.train.runs import Driver, Finetuning, Place

transformers = pytest.importorskip("transformers")

LLAMA = [
    "model.normalization=rmsnorm",
    "model.activation=fast-swiglu",
    "model.bias=False",
    "model.position_embedding_type=rope",
    "model.share_embeddings_and_output_weights=False",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "trainer.precision=32",
]
GPT2 = ["trainer.precision=32"]
SHORT = ["trainer.max_steps=4", "model.optim.lr=1e-2"]
PROMPT = "def function_"


def tensors(reader: Reader) -> dict[str, torch.Tensor]:
    return {name: reader.read(name) for name in reader.names() if name.startswith("model/")}


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param([*LLAMA, "model.fp8_params=True"], id="llama"),
        pytest.param(GPT2, id="gpt2", marks=pytest.mark.slow),
    ],
)
def test_run_to_transformers_and_back(
    shape: list[str], place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = place.run(*shape, *SHORT)
    assert done.code == 0, done.output
    run, theirs, ours = place.dir(), tmp_path / "theirs", tmp_path / "ours"
    reader = Reader(find_checkpoint(run, print))
    assert export.main([str(run), str(theirs)]) == 0

    model = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    own = find_tokenizer(run)
    assert own is not None
    prompt = own.encode(PROMPT)
    assert tokenizer(PROMPT)["input_ids"] == prompt
    assert model.generation_config.eos_token_id == own.eod_id == tokenizer.eos_token_id

    # Greedy generation gives the same tokens, and the same text from the command line.
    plain = load_model(reader, torch.float32, torch.device("cpu"))
    mine = list(draw(plain, prompt, 16, Sampling(), vocab_size=own.vocab_size))
    model.generation_config.eos_token_id = None  # no end
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16)
    assert expected[0].tolist() == prompt + mine
    capsys.readouterr()
    assert (
        generate.main([str(run), "--prompt", PROMPT, "--tokens", "16", "--temperature", "0"]) == 0
    )
    until_end = mine[: mine.index(own.eod_id)] if own.eod_id in mine else mine
    assert capsys.readouterr().out == f"{PROMPT}{own.decode(until_end)}\n"

    # The model is imported again, bit for bit, and a run starts from it.
    assert import_hf.main([str(theirs), str(ours)]) == 0
    back = Reader(find_checkpoint(ours, print))
    before, after = tensors(reader), tensors(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    started = place.run(
        *shape,
        "exp_manager.name=second",
        f"restore_from_path={ours}",
        "trainer.max_steps=2",
        "trainer.nonfinite_policy=rollback",  # this policy saves step 0
        "model.init_method_std=0.2",  # of weights that are replaced before anything reads them
    )
    assert started.code == 0 and f"weights from {ours}" in started.output, started.output
    first = Reader(place.checkpoint(0, "second"))
    assert all(torch.equal(first.read(name), before[name]) for name in before)
    staged = "scaling/forward/amax/layers.1.mlp.fc2.weight"  # it waits for the first update
    if "model.fp8_params=True" in shape:
        assert first.read(staged) == before["model/layers.1.mlp.fc2.weight"].abs().max()
    last = Reader(place.checkpoint(2, "second"))
    assert not torch.equal(last.read("model/final_norm.weight"), before["model/final_norm.weight"])
    tree = load(config_dir=ours, config_name="model")
    rates = [tree[f"model.optim.{name}"] for name in ("lr", "sched.min_lr")]
    assert rates == [2e-5, 2e-6], "not the toy's"
    assert "model.yaml sets the learning rate to 2e-05, for continued" in capsys.readouterr().out
    own_yaml = resolve(tree, lambda: False)
    assert own_yaml.restore_from_path == str(ours)
    assert check_fits(replace(own_yaml.model, vocab_size=384), back) == []

    # Another shape is refused before the first step.
    refused = place.run(
        *shape, "exp_manager.name=third", f"restore_from_path={ours}", "model.num_layers=3"
    )
    assert refused.code == 2
    assert "model.num_layers=3: the model in" in refused.output


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import a small Llama of transformers, without a tokenizer."""
    folder = tmp_path_factory.mktemp("imported")
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        eos_token_id=[7, 8],
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "theirs")
    assert import_hf.main([str(folder / "theirs"), str(folder / "ours")]) == 0
    return folder


def test_import_and_export_keep_the_end_token(imported: Path, tmp_path: Path) -> None:
    assert export.main([str(imported / "ours"), str(tmp_path / "again")]) == 0
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tmp_path / "again", imported / "theirs")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    folders = (tmp_path / "again", imported / "theirs")
    again, first = (json.loads((f / "generation_config.json").read_text()) for f in folders)
    assert again["eos_token_id"] == first["eos_token_id"] == [7, 8], "all ends are kept"
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["eos_token_id"] == [7, 8]


def test_values_beyond_a_dtype_are_refused_by_name(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest number that rounds to a finite one is written."""
    shutil.copytree(imported / "theirs", tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    stored = load_file(file)
    for number, (value, refused) in enumerate(
        [
            (-1e5, ["float16"]),
            (65519.0, []),
            (65520.0, ["float16"]),
            (3.4e38, ["float16", "bfloat16"]),
        ]
    ):
        stored["model.norm.weight"][5] = value
        save_file(stored, file, metadata={"format": "pt"})
        ours = tmp_path / f"ours{number}"
        assert import_hf.main([str(tmp_path / "theirs"), str(ours)]) == 0
        for dtype in ("float16", "bfloat16", "float32"):
            capsys.readouterr()
            out = tmp_path / f"{dtype}{number}"
            code = export.main([str(ours), str(out), "--dtype", dtype])
            assert code == (2 if dtype in refused else 0)
            if code:
                said = capsys.readouterr().err
                assert "model.norm.weight (final_norm.weight) has a value of magnitude" in said
                assert f"{abs(value):g}, and {dtype} holds at most" in said and not out.exists()
            else:
                written = load_file(out / "model.safetensors")["model.norm.weight"]
                assert bool(torch.isfinite(written).all())


ADDED = ["<tool>", "<end>", "<x>", "<y>"]


def test_a_tokenizer_with_more_tokens_than_rows(
    driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers runs it: a text without such a token trains, and one with it is refused."""
    model = make_model(tmp_path / "theirs", vocab_size=257)
    weights = load_file(model / "model.safetensors")
    word = "transformer.wte.weight"
    save_file(weights | {word: weights[word][:257].clone()}, model / "model.safetensors")
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(ADDED)
    tokenizer.save(str(model / "tokenizer.json"))
    assert import_hf.main([str(model), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "261 tokens and the model 257 rows: '<tool>', '<end>', '<x>', … have none" in said
    reader = Reader(find_checkpoint(tmp_path / "ours", print))
    assert reader.meta["config"]["model"]["override_vocab_size"] == 257
    tuning = Finetuning(driver, tmp_path, tmp_path)
    words = [f"restore_from_path={tmp_path / 'ours'}", "trainer.max_steps=2",
             "trainer.val_check_interval=2"]  # fmt: skip

    def examples(*texts: str) -> None:
        lines = (json.dumps({"input": text, "output": "b"}) for text in texts)
        (tmp_path / "mine.jsonl").write_text("\n".join(lines))

    examples(*(f"a{n}" for n in range(20)))
    done = tuning.run(*words)
    assert done.code == 0, done.output
    assert "vocabulary 257" in done.output
    examples(*(f"a{n}" for n in range(20)), "x<end>")
    refused = tuning.run(*words, "exp_manager.name=other")
    assert refused.code == 2, refused.output
    assert "token 258: '<end>' stands in a text, and the model has 257 rows" in refused.output
    assert "Traceback" not in refused.output
    without = tuning.run(*words, "exp_manager.name=third", "model.override_vocab_size=null")
    assert "give model.override_vocab_size=257" in without.output, "a hint that can be followed"


def test_prepared_texts_have_no_token_beyond_the_rows(place: Place) -> None:
    """Of a blend each dataset is read whole, and not only until the first one has been."""
    rows = 298  # of 300 tokens
    with IndexedWriter(place.cwd / "rare", "uint16") as writer:
        for number in range(400):
            writer.add_document([65] * 40 + [299] * (number == 399))
    shutil.copy(f"{place.data}.tokenizer.json", place.cwd / "rare.tokenizer.json")
    plain = place.cwd / "plain"
    with IndexedWriter(plain, "uint16") as writer:
        for number in range(400):
            writer.add_document([65 + number % 20] * 40)
    shutil.copy(f"{place.data}.tokenizer.json", place.cwd / "plain.tokenizer.json")
    words = [f"model.override_vocab_size={rows}", "trainer.max_steps=1"]
    blend = f"model.data.data_prefix=[0.9,{plain},0.1,{place.cwd / 'rare'}]"
    refused = place.run(*words, blend)
    assert refused.code == 2 and "token 299: " in refused.output, refused.output
    done = place.run(*words, f"model.data.data_prefix={plain}", "exp_manager.name=good")
    assert done.code == 0 and "vocabulary 298" in done.output, done.output


def test_longer_contexts_may_start_from_a_model(imported: Path) -> None:
    reader = Reader(find_checkpoint(imported / "ours", print))
    spec = shape_of(reader)
    longer = replace(spec, max_position_embeddings=64, rotary_base=50000.0)
    assert check_fits(longer, reader) == [
        "model.rotary_base=50000.0: the weights were trained with 10000.0"
    ]
    with pytest.raises(ConfigError, match="model.bias=True: the model in .* has False"):
        check_fits(replace(spec, bias=True), reader)
    with pytest.raises(ConfigError, match="vocabulary has 100 rows"):
        check_fits(replace(spec, vocab_size=128), reader)


def test_a_checkpoint_describes_experts(place: Place) -> None:
    """A new run may start from it with the same experts, and one of an earlier version has none."""
    experts = ["model.num_moe_experts=4", "model.moe_layer_freq=[0,1]", "model.bias=False",
               "model.moe_ffn_hidden_size=48", "model.moe_router_score_function=sigmoid",
               "model.moe_router_enable_expert_bias=True", "model.ffn_dropout=0",
               "model.moe_router_topk_scaling_factor=2.5", "trainer.max_steps=2"]  # fmt: skip
    done = place.run(*experts)
    assert done.code == 0, done.output
    assert (
        "\nexperts: 4 of width 48 in 1 layer of 2, 2 for a token; router: sigmoid," in done.output
    )
    reader = Reader(place.checkpoint(2))
    spec = shape_of(reader)
    assert spec.moe == MoESpec(
        num_experts=4, top_k=2, ffn_hidden_size=48, layers=(False, True), has_expert_bias=True,
        score_function="sigmoid", scaling_factor=2.5,
    )  # fmt: skip
    assert check_fits(spec, reader) == []
    changes: list[tuple[dict[str, Any], str]] = [
        ({"top_k": 1}, "moe_router_topk=1"),
        ({"layers": (True, True)}, "moe_layer_freq"),
        ({"scaling_factor": 1.0}, "scaling_factor=None: .* has 2.5"),
    ]
    for change, named in changes:
        with pytest.raises(ConfigError, match=named):
            check_fits(replace(spec, moe=replace(spec.moe, **change)), reader)
    with pytest.raises(ConfigError, match="model.num_moe_experts=None: the model in .* has 4"):
        check_fits(replace(spec, moe=None), reader)
    other = place.run(*experts[:-2], "model.moe_router_topk_scaling_factor=1.5",
                      "trainer.max_steps=3")  # fmt: skip
    assert other.code == 2 and "model.moe_router_topk_scaling_factor" in other.output, other.output
    assert "Traceback" not in other.output
    assert place.run(*experts[:-1], "trainer.max_steps=3").code == 0, "the run continues"
    again = place.run(*experts, f"restore_from_path={place.dir()}", "exp_manager.name=second")
    assert again.code == 0 and "loaded the weights from" in again.output, again.output


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"model_type": "bert"}, 'model_type is "bert"'),
        ({"hidden_act": "mish"}, 'hidden_act is "mish"'),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 'rope_type is "dynamic"'),
        ({"num_hidden_layers": None}, "config.json"),
        ({"num_hidden_layers": 2}, "lacks model.layers.1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": 65}, "model.layers.0.mlp.gate_proj.weight"),
    ],
)
def test_foreign_models_are_refused(
    damage: dict[str, object],
    named: str,
    imported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(imported / "theirs", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "ours" / "checkpoints" / "step_00000000").exists()


def test_pickled_weights_are_not_read(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(imported / "theirs", tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "theirs" / "pytorch_model.bin")
    assert import_hf.main([str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 2
    assert "Give a model in safetensors files" in capsys.readouterr().err


def test_places_without_a_model_are_refused(
    imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    assert export.main([str(imported / "ours"), str(imported)]) == 2
    assert "exists already and is not empty" in capsys.readouterr().err
    assert generate.main([str(imported / "ours"), "--prompt", "x"]) == 2
    assert "tokenizer.json: is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "vocab_size", "expected"),
    [(50304, 50257, 128), (50257, 50257, 1), (100, 99, 4), (384, 256, 384)],
)
def test_divisor(rows: int, vocab_size: int, expected: int) -> None:
    assert divisor(rows, vocab_size) == expected


def test_cached_generation_is_the_uncached_one() -> None:
    """Tokens generated with a cache of keys and values equal those computed from the whole text."""
    for changes in (
        {},
        dict(position_embedding_type="rope", num_query_groups=2, rotary_percentage=0.5),
        dict(position_embedding_type="alibi", transformer_block_type="post_ln"),
        dict(position_embedding_type="none", num_query_groups=1),
        dict(position_embedding_type="alibi", window_size=(3, 0)),  # older keys are forgotten
    ):
        model = GPT(Parts(gpt_spec(**changes), torch.float64, 3, RandomStreams(3))).eval()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        cache, tokens = KVCache(), torch.arange(14).view(1, 14) * 5 % VOCAB
        whole = model.logits(tokens)
        parts = [model.logits(tokens[:, a:b], cache) for a, b in ((0, 5), (5, 6), (6, 9), (9, 14))]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
        assert cache.length == 14


def test_sampling() -> None:
    """Temperature, top-k and top-p are compared with their definitions by counting."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    generator = torch.Generator().manual_seed(0)

    def shares(sampling: Sampling, draws: int = 4000) -> torch.Tensor:
        chosen = [sampling.choose(logits, generator) for _ in range(draws)]
        return torch.bincount(torch.tensor(chosen), minlength=4) / draws

    assert Sampling().choose(logits, generator) == 0
    near = dict(rtol=0, atol=0.03)
    torch.testing.assert_close(shares(Sampling(1.0)), logits.softmax(0), **near)
    torch.testing.assert_close(shares(Sampling(2.0)), (logits / 2).softmax(0), **near)
    two = torch.cat((logits[:2].softmax(0), torch.zeros(2)))
    torch.testing.assert_close(shares(Sampling(1.0, top_k=2)), two, **near)
    assert logits.softmax(0)[0] < 0.7 < logits.softmax(0)[:2].sum()
    torch.testing.assert_close(shares(Sampling(1.0, top_p=0.7)), two, **near)
    assert shares(Sampling(1.0, top_p=0.01), 50)[0] == 1


def test_a_text_beyond_learned_positions_is_refused() -> None:
    model = GPT(Parts(gpt_spec(), torch.float32, 3, RandomStreams(3)))
    with pytest.raises(RunError, match="the model has 16 positions. Ask for at most 6"):
        list(draw(model, [1] * 10, 7, Sampling(), vocab_size=VOCAB))
    assert len(list(draw(model, [1] * 10, 6, Sampling(), vocab_size=VOCAB))) == 6


@pytest.mark.parametrize("positions", ["rope", "alibi", "none", "learned_absolute"])
def test_a_text_beyond_the_trained_length_is_warned_of(positions: str) -> None:
    spec = gpt_spec(position_embedding_type=positions)  # of 16
    assert beyond_training(spec, 6, 10) is None
    warning = beyond_training(spec, 7, 10)
    if positions == "learned_absolute":
        assert warning is None  # refused
    else:
        assert warning is not None and "are 17; the model was trained on texts of 16" in warning


def test_attention_on_a_gpu_is_not_planned_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernels, which torch prefers on Hopper, take tens of milliseconds for each new
    number of keys. The context is entered for each token, and left before the caller gets it."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    for name, is_changed in (("cuda", True), ("cpu", False)):
        with generating.kernels_of_any_length(torch.device(name)):
            assert enabled() != is_changed and torch.backends.cuda.flash_sdp_enabled()
        assert enabled()
    seen = []

    @contextmanager
    def watched(device: torch.device) -> Iterator[None]:
        seen.append(device.type)
        with generating_on_a_gpu(torch.device("cuda")):
            yield

    generating_on_a_gpu = generating.kernels_of_any_length
    monkeypatch.setattr(generating, "kernels_of_any_length", watched)
    model = GPT(Parts(gpt_spec(), torch.float32, 3, RandomStreams(3)))
    for _ in draw(model, [1, 2], 3, Sampling(), vocab_size=VOCAB):
        assert enabled()
    assert seen == ["cpu"] * 3
