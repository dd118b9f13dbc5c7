"""Fine-tuning: the packed, masked loss, data parallelism, whole runs, and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint.reader import Reader
from megafp8.cli import export, generate, import_hf
from megafp8.cli.epochs import with_epochs
from megafp8.cli.job import gives_steps
from megafp8.config.load import load, load_all
from megafp8.config.resolve import data_spec, resolve
from megafp8.data.instructions import PackedExamples, PreparedInstructions, prepare_instructions
from megafp8.data.loader import microbatch
from megafp8.data.tokenize import byte_tokenizer
from megafp8.errors import ConfigError
from megafp8.models.gpt import GPT
from megafp8.runs.run_data import open_data
from megafp8.train.load import find_checkpoint
from megafp8.train.load_model import load_model
from megafp8.train.step import forward_backward
from tests.data.model_tokenizers import write_model
from tests.data.test_instructions import GOOD, spec_of, write
from tests.models.test_transformers import (
    assert_close,
    counterpart,
    logical,
    randomized,
    rms_norm_in_its_dtype,
)
from tests.tiny import build_run, gpt_spec
from tests.train.runs import ENVIRONMENT, FILES, ROOT, Done, Finetuning, Place

SEQ = 48


# --- the loss and its gradients -------------------------------------------------------------------


def tiny_data(tmp_path: Path, **changes: Any) -> PreparedInstructions:
    path = write(tmp_path / "mine.jsonl", *GOOD)
    spec = spec_of(path, seq_length=SEQ, validation_files=(str(path),), **changes)
    return prepare_instructions(spec, byte_tokenizer(), lambda line: None)


@pytest.mark.parametrize("answer_only", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        dict(
            normalization="rmsnorm",
            activation="swiglu",
            position_embedding_type="rope",
            bias=False,
            share_embeddings_and_output_weights=False,
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_the_loss_is_that_of_each_example_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: dict[str, Any],
    packed: bool,
    answer_only: bool,
) -> None:
    """Loss and gradients of packed samples are those of transformers' model.

    It reads one example after another, without packing, padding, masks or positions, and its loss
    is taken from its logits at the answer's places.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    monkeypatch.setattr(LlamaRMSNorm, "forward", rms_norm_in_its_dtype)
    data = tiny_data(tmp_path, packed=packed, answer_only_loss=answer_only)
    source = data.validation
    assert isinstance(source, PackedExamples)
    size = gpt_spec(num_layers=2, max_position_embeddings=SEQ, vocab_size=data.vocab_size, **shape)
    model = randomized(size, torch.float64)
    theirs = counterpart(model, torch.float64)
    num_samples = min(3, source.num_samples)
    batch = microbatch([source[n] for n in range(num_samples)], data.rules)
    loss = call(model, batch)
    loss.backward()

    expected = torch.zeros((), dtype=torch.float64)
    num_counted = 0
    for sample in source.samples[:num_samples]:
        for number in sample:
            ids, counted = source.examples.example(number)
            tokens = torch.from_numpy(ids.astype(np.int64))
            logits = theirs(tokens[None, :-1]).logits[0]
            places = torch.from_numpy(counted[1:])
            expected = expected + F.cross_entropy(
                logits[places], tokens[1:][places], reduction="sum"
            )
            num_counted += int(counted.sum())
    expected.backward()
    assert batch.num_targets == num_counted
    assert packed == any(len(sample) > 1 for sample in source.samples[:num_samples])
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    ours, named = logical(model, gradients=True), dict(theirs.named_parameters())
    for entry in hf.mapping(model.spec):
        gradient = named[entry.theirs].grad
        assert gradient is not None
        assert_close(hf.to_theirs(entry, ours.__getitem__), gradient, torch.float64, entry.theirs)


def call(model: GPT, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(
        torch.from_numpy(batch.tokens_BS),
        torch.from_numpy(batch.targets_BS),
        position_ids_BS=torch.from_numpy(batch.position_ids_BS),
        cu_seqlens_N1=torch.from_numpy(batch.cu_seqlens_N1),
    )
    return loss


@pytest.mark.parametrize(("micro", "counts"), [(1, 4), (2, 2), (4, 1)])
def test_microbatches_do_not_change_the_sum(tmp_path: Path, micro: int, counts: int) -> None:
    """One division by all counted tokens follows, so each token has the same weight."""
    data = tiny_data(tmp_path, packed=False)
    state = build_run(model=gpt_spec(max_position_embeddings=SEQ, vocab_size=data.vocab_size))
    windows = [data.train[number] for number in range(4)]
    whole = microbatch(windows, data.rules)
    parts = [microbatch(windows[n * micro : (n + 1) * micro], data.rules) for n in range(counts)]
    assert len({part.num_targets for part in parts}) > 1 or counts == 1  # they are uneven
    loss, num_tokens = forward_backward(state, parts)
    expected = call(build_run(model=state.model.spec).model, whole)  # type: ignore[arg-type]
    assert int(num_tokens) == whole.num_targets
    torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0)


# --- whole runs -----------------------------------------------------------------------------------


def base(place: Finetuning) -> str:
    return f"restore_from_path={place.data}"


def tensors(place: Place, name: str = "job", step: int = 6) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in a checkpoint."""
    reader = Reader(place.checkpoint(step, name))
    return {name: reader.read(name) for name in reader.names() if name.startswith("model/")}


def test_a_run_learns_its_answers_and_takes_the_model_from_the_checkpoint(
    tuning: Finetuning,
) -> None:
    done = tuning.run(base(tuning), "trainer.max_steps=30", "trainer.precision=32")
    assert done.code == 0, done.output
    losses = [row["loss"] for row in tuning.metrics() if "loss" in row]
    assert losses[-1] < 0.6 * losses[0]
    assert tuning.summary()["val_loss"] < 0.6 * losses[0]
    assert re.search(r"model\.num_layers +2 +the model in", done.output)
    assert re.search(r"def f\d+\(x\)", done.output)  # the sample at the end begins with a prompt
    assert "0.00 M" not in done.output  # small numbers of tokens are shown whole
    # 5% of 60 examples are for a test, and are not read.
    assert "54 training examples" in done.output and "3 validation examples" in done.output
    assert "3 are left out (model.data.splits_string)" in done.output


FP8 = "model.fp8=True"
LEVEL = "model.optim.fp8_opt_level"
TWO = "trainer.devices=2"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["trainer.precision=16"], marks=slow),
        pytest.param(["trainer.precision=bf16"], marks=slow),
        pytest.param([FP8], marks=slow),
        pytest.param([FP8, "model.fp8_recipe=rowwise"], marks=slow),
        pytest.param([FP8, "model.fp8_recipe=tensorwise", "model.fp8_backend=torchao"], marks=slow),
        pytest.param([FP8, f"{LEVEL}=O1"], marks=slow),
        pytest.param([FP8, f"{LEVEL}=O2"], marks=slow),
        pytest.param([FP8, f"{LEVEL}=O3"]),
        pytest.param([FP8, TWO, "model.tensor_model_parallel_size=2"], marks=slow),
        pytest.param([FP8, TWO, "model.pipeline_model_parallel_size=2"], marks=slow),
    ],
    ids=lambda flags: " ".join(flag.rpartition(".")[2] for flag in flags),
)
def test_precisions_and_layouts_of_pretraining(tuning: Finetuning, flags: list[str]) -> None:
    """The first step's loss is that of the base model in FP32, within the precision's error."""
    if "torchao" in flags[-1]:
        pytest.importorskip("torchao")
    done = tuning.run(base(tuning), *flags)
    assert done.code == 0, done.output
    losses = [row["loss"] for row in tuning.metrics() if "loss" in row]
    assert len(losses) == 6 and all(np.isfinite(losses)) and len(set(losses)) == 6

    reader = Reader(find_checkpoint(tuning.data, print))
    model = load_model(reader, torch.float32, torch.device("cpu"))
    cfg = load(tuning.argv(base(tuning))[1:], config_name="finetune_gpt")
    data = open_data(data_spec(cfg), print)
    batch = microbatch([data.train[number] for number in range(4)], data.rules)
    with torch.no_grad():
        expected = float(call(model, batch)) / batch.num_targets
    assert losses[0] == pytest.approx(expected, rel=0.01)


def test_two_replicas_train_as_one_process(tuning: Finetuning) -> None:
    """The loss is the mean over the counted tokens of all ranks and microbatches.

    Ranks and microbatches have different numbers of counted tokens, so means of means differ.
    """
    flags = [base(tuning), "trainer.precision=32"]
    for name, more in (
        ("one", ["model.micro_batch_size=4"]),
        ("two", ["trainer.devices=2", "model.micro_batch_size=1"]),
    ):
        done = tuning.run(*flags, f"exp_manager.name={name}", *more)
        assert done.code == 0, done.output
    rows = [[row for row in tuning.metrics(name) if "loss" in row] for name in ("one", "two")]
    for one, two in zip(*rows, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=2e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
    two_ranks = tensors(tuning, "two")
    for name, tensor in tensors(tuning, "one").items():
        if not name.endswith("key.bias"):  # its gradient is rounding noise around 0
            torch.testing.assert_close(two_ranks[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_killed_run_continues_bit_for_bit(tuning: Finetuning) -> None:
    flags = [base(tuning), "model.fp8=True"]
    done = tuning.run(*flags, "exp_manager.name=whole")
    assert done.code == 0, done.output
    killed = tuning.run(*flags, "exp_manager.name=killed", fault=["killed_in_microbatch", 4, 1])
    assert killed.code == -9 and tuning.steps("killed") == [2], killed.output
    done = tuning.run(*flags, "exp_manager.name=killed")
    assert done.code == 0 and "continuing from" in done.output, done.output
    first, second = tensors(tuning, "whole"), tensors(tuning, "killed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    # Other answers are other data.
    write(tuning.cwd / "mine.jsonl", *GOOD)
    refused = tuning.run(*flags, "exp_manager.name=whole", "trainer.max_steps=8")
    assert refused.code == 2 and "trained on other data" in refused.output


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("mixtral", {"num_local_experts": 4, "num_key_value_heads": 1})],
)
def test_a_chat_from_an_import_to_transformers(
    family: str, more: dict[str, Any], tuning: Finetuning, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides make the same tokens of a conversation, learn them, and answer the same."""
    theirs = tuning.cwd / "theirs"
    source = write_model(theirs, "qwen2", scale=1.0, family=family, **more)
    assert import_hf.main([str(theirs), str(tuning.cwd / "ours")]) == 0
    talks = [
        [{"role": "user", "content": f"def f{n}(x)?"},
         {"role": "assistant", "content": f"Return {n % 3}."},
         {"role": "user", "content": "More?"}, {"role": "assistant", "content": "No."}]
        for n in range(40)
    ]  # fmt: skip
    write(tuning.cwd / "mine.jsonl", *({"messages": talk} for talk in talks))
    flags = [f"restore_from_path={tuning.cwd / 'ours'}", "trainer.precision=32",
             "trainer.max_steps=40", "trainer.val_check_interval=40",
             "model.encoder_seq_length=128"]  # fmt: skip
    done = tuning.run(*flags)
    assert done.code == 0, done.output
    assert f"40 conversations, by the chat template of {tuning.cwd / 'ours'}" in done.output

    # The tokens and the counted ones are transformers' own, and so is the loss over them.
    data = open_data(data_spec(load(tuning.argv(*flags)[1:], config_name="finetune_gpt")), print)
    assert isinstance(data, PreparedInstructions)
    (examples,) = data.validation_examples
    assert export.main([str(tuning.dir()), str(tuning.cwd / "out")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tuning.cwd / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tuning.cwd / "out")
    rendered = [tokenizer.apply_chat_template(talk)["input_ids"] for talk in talks]
    total = torch.zeros(())
    for number in range(examples.num_examples):
        ids, counted = examples.example(number)
        assert ids.tolist() in rendered
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0]
        at = torch.from_numpy(counted[1:])
        total += F.cross_entropy(logits[at], tokens[1:][at], reduction="sum")
    expected = float(total) / int(examples.counted_T.sum())
    assert tuning.summary()["val_loss"] == pytest.approx(expected, rel=1e-5)

    capsys.readouterr()
    words = ["--chat", "--temperature", "0", "--tokens", "20", "--json", "--prompt", "def f4(x)?"]
    assert generate.main([str(tuning.dir()), *words]) == 0
    mine = json.loads(capsys.readouterr().out)
    inputs = tokenizer.apply_chat_template(
        talks[4][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    again = source.apply_chat_template(talks[4][:1], add_generation_prompt=True)["input_ids"]
    assert inputs["input_ids"][0].tolist() == again
    out = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, len(again) :]
    assert mine["text"] == tokenizer.decode(out, skip_special_tokens=True)
    assert (mine["end"] == "token") == (out[-1] == tokenizer.eos_token_id)
    assert mine["text"].startswith("Return "), "it has learned to answer"


def test_epochs_are_so_many_steps(tuning: Finetuning) -> None:
    """The header says how many before the first one, and the schedule of rates ends with them."""
    flags = [base(tuning), "trainer.precision=32", "model.optim.sched.min_lr=1e-3"]
    done = tuning.run(*flags, "trainer.max_epochs=2", "trainer.max_steps=1000")
    assert done.code == 0, done.output
    samples = int(re.search(r"54 training examples in (\d+) samples", done.output)[1])  # type: ignore[index]
    steps = -(-2 * samples // 4)
    line = f"trainer.max_epochs=2: 2 x {samples} samples are {steps} steps"
    assert -1 < done.output.find(line) < done.output.find("loaded the weights from")
    rows = [row for row in tuning.metrics() if "loss" in row]
    assert len(rows) == tuning.summary()["total_steps"] == steps
    assert rows[-1]["lr"] == pytest.approx(1e-3, rel=0.2) and rows[2]["lr"] > 5e-3
    longer = done.output.partition("continue with")[2]
    assert f"trainer.max_steps={2 * steps}" in longer and "max_epochs" not in longer


@pytest.mark.parametrize("copies", [1, 2])
def test_every_example_trains_where_no_validation_is_asked_for(
    tuning: Finetuning, copies: int
) -> None:
    mine = tuning.cwd / "mine.jsonl"
    (tuning.cwd / "b.jsonl").write_text(mine.read_text())
    files = f"{FILES}=[{','.join([str(mine), str(tuning.cwd / 'b.jsonl')][:copies])}]"
    flags = [base(tuning), files, "model.data.splits_string='100,0,0'"]
    refused = tuning.run(*flags)
    flags += ["trainer.limit_val_batches=0"]
    assert refused.code == 2 and "leave the validation split empty" in refused.output
    for steps in (4, 6):
        done = tuning.run(*flags, f"trainer.max_steps={steps}")
        assert done.code == 0, done.output
        assert f"data: {60 * copies} training examples in " in done.output
        assert "; 0 validation examples" in done.output
        summary = tuning.summary()
        assert summary["val_loss"] is None and summary["step"] == steps
    rows = (tuning.dir() / "samples.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["prompt"]


def test_epochs_and_steps_end_a_run_at_what_comes_first(
    undisturbed: tuple[Place, Done], tmp_path: Path
) -> None:
    write(tmp_path / "mine.jsonl", *({"input": "ab " * 9, "output": "c"} for _ in range(50)))
    argv = [f"{FILES}={tmp_path / 'mine.jsonl'}", f"restore_from_path={undisturbed[0].dir()}",
            "model.data.train_ds.packed_sequence=False", "model.global_batch_size=4",
            "model.micro_batch_size=2", "trainer.max_epochs=3"]  # fmt: skip

    def settled(*more: str) -> tuple[int, list[str]]:
        loaded = load_all([*argv, *more], config_name="finetune_gpt", trains=False)
        settled, notes = with_epochs(loaded, gives_steps(loaded))
        return settled.values["trainer.max_steps"], notes

    said = "trainer.max_epochs=3: 3 x 45 samples are 34 steps with model.global_batch_size=4"
    assert settled() == (34, [said])
    assert settled("trainer.max_steps=34") == (34, [said])
    assert settled("trainer.max_steps=900") == (34, [said])
    assert settled("trainer.max_steps=20")[0] == 20
    assert settled("trainer.max_steps=20")[1] == [
        f"{said}; trainer.max_steps=20 ends the run before"
    ]
    grows = settled("model.rampup_batch_size=[2,2,40]")
    assert grows[0] == 20 + -(-(135 - 40) // 4)
    profile = ["model.nsys_profile.enabled=True", "model.nsys_profile.start_step=40",
               "model.nsys_profile.end_step=40"]  # fmt: skip
    with pytest.raises(ConfigError, match="start_step=40: is never reached.*are 34 steps"):
        settled(*profile)
    with pytest.raises(ConfigError, match="trainer.max_epochs=3.*has no effect"):
        load(["trainer.max_epochs=3"])
    assert load(["trainer.max_epochs=-1"])["trainer.max_steps"] == 900


# --- errors of the command ------------------------------------------------------------------------


def command(place: Finetuning, *argv: str) -> tuple[int, str, set[str]]:
    """Run the real command; return its code, its output and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "finetune_gpt.py"), *argv],
        cwd=place.cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    imported = re.compile(r"^import time:.*\|(.*)\n", re.MULTILINE)
    modules = {name.strip() for name in imported.findall(done.stderr)}
    return done.returncode, done.stdout + imported.sub("", done.stderr), modules


def test_bad_data_is_named_before_torch_is_imported(tuning: Finetuning) -> None:
    """The import of torch takes a second or more, so the message would come late."""
    path = write(tuning.cwd / "bad.jsonl", *GOOD, {"input": "a"})
    code, output, modules = command(tuning, base(tuning), f"{FILES}={path}")
    assert code == 2
    assert output.startswith(f"error: {path}, line 41: output: is missing")
    assert "megafp8.data.instructions" in modules and "torch" not in modules
    assert not (tuning.cwd / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["model.data.data_prefix", "no data is named", "train_ds.file_names=FILE.jsonl"]),
        ([f"{FILES}=mine.jsonl"], ["restore_from_path", "fine-tuning starts from a trained model"]),
        ([f"{FILES}=mine.jsonl", "restore_from_path=no/where"], ["no/where: has no checkpoint"]),
        ([f"{FILES}=[]"], ["must be a path, or a list of paths"]),
    ],
)
def test_settings_that_lack_something(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv, config_name="finetune_gpt")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["model.data.data_prefix=builtin"], [FILES, "data_prefix=null"]),
        (["model.data.reset_attention_mask=False"], ["would attend to each other"]),
        (["model.data.train_ds.prompt_template='{output} {input}'"], ["at its end"]),
        (["model.data.train_ds.prompt_template='{input'"], ["fields in braces"]),
        (["model.data.train_ds.label_key=answer"], ["answer's field", "label_key=answer"]),
        (["model.data.train_ds.truncation_field=context"], ["is no field", "Give input or output"]),
        (["model.data.train_ds.truncation_method=left"], ["has no effect"]),
        (["model.data.train_ds.concat_sampling_probabilities=[0.5,0.5]"], ["names 1 file"]),
        (["model.data.shuffle_documents=False"], ["has no effect", "Leave it out"]),
        (["model.num_layers=3"], []),
    ],
)
def test_settings_that_do_not_fit(
    undisturbed: tuple[Place, Done], flags: list[str], words: list[str]
) -> None:
    argv = [f"{FILES}=mine.jsonl", f"restore_from_path={undisturbed[0].dir()}", *flags]
    if not words:  # a shape of the user's own wins, and start_from refuses it
        assert load(argv, config_name="finetune_gpt")["model.num_layers"] == 3
        return
    with pytest.raises(ConfigError) as caught:
        load(argv, config_name="finetune_gpt")
    for word in words:
        assert word in str(caught.value)


def test_examples_without_packing_need_no_masks(undisturbed: tuple[Place, Done]) -> None:
    """So the backends and layouts that have none can fine-tune too."""
    argv = [
        f"{FILES}=mine.jsonl",
        f"restore_from_path={undisturbed[0].dir()}",
        "model.data.train_ds.packed_sequence=False",
        "model.data.reset_attention_mask=False",
        "model.data.reset_position_ids=False",
        "trainer.devices=2",
        "model.context_parallel_size=2",
    ]
    assert resolve(load(argv, config_name="finetune_gpt"), lambda: False).parallel.cp == 2


def test_a_new_line_in_a_template_of_the_command_line(undisturbed: tuple[Place, Done]) -> None:
    """As the documentation's command writes it."""
    argv = [
        f"{FILES}=mine.jsonl",
        f"restore_from_path={undisturbed[0].dir()}",
        r'model.data.train_ds.prompt_template="Question: {input}\nAnswer: {output}"',
    ]
    asked = resolve(load(argv, config_name="finetune_gpt"), lambda: False).data.instructions
    assert asked is not None and asked.prompt_template == "Question: {input}\nAnswer: {output}"


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (FILES, ["mine.jsonl", "other.jsonl"]),
        (FILES, ["[mine.jsonl,other.jsonl]", "[other.jsonl,mine.jsonl]"]),
        ("model.data.train_ds.concat_sampling_probabilities", ["null", "[1.0,2.0]"]),
        ("model.data.train_ds.shuffle", ["True", "False"]),
        ("model.data.train_ds.label_key", ["output", "input"]),
        ("model.data.train_ds.prompt_template", ["'{input} {output}'", "'{more} {output}'"]),
        ("model.data.train_ds.truncation_field", ["input", "more"]),
        ("model.data.train_ds.truncation_method", ["left", "right"]),
        ("model.data.train_ds.add_bos", ["null", "False", "True"]),
        ("model.data.train_ds.add_eos", ["null", "True", "False"]),
        ("model.data.train_ds.packed_sequence", ["True", "False"]),
        ("model.data.validation_ds.file_names", ["null", "other.jsonl"]),
        ("model.answer_only_loss", ["True", "False"]),
        ("model.encoder_seq_length", ["32", "24"]),
        ("model.seed", ["1", "2"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_key_changes_the_samples(
    undisturbed: tuple[Place, Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    values: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        write(
            tmp_path / f"{name}.jsonl",
            *({"input": f"{name} {n}", "output": f"{n}!", "more": "ab" * 6} for n in range(60)),
        )
    more = {
        "model.data.train_ds.concat_sampling_probabilities": [f"{FILES}=[mine.jsonl,other.jsonl]"],
        "model.data.train_ds.label_key": [
            "model.data.train_ds.prompt_template='{more} {output}'",
        ],
        "model.data.train_ds.truncation_field": ["model.encoder_seq_length=22"],
        "model.data.train_ds.truncation_method": [
            "model.encoder_seq_length=8",
            "model.data.train_ds.truncation_field=input",
        ],
    }.get(key, [])
    found = set()
    for value in values:
        given = [f"{FILES}=mine.jsonl", *more, f"{key}={value}"]
        if key.endswith("label_key") and value == "input":
            given.append("model.data.train_ds.prompt_template='{more} {input}'")
        if key.endswith("truncation_field"):
            given.append("model.data.train_ds.prompt_template='{input}{more}{input} {output}'")
        cfg = load(
            [f"restore_from_path={undisturbed[0].dir()}", *given], config_name="finetune_gpt"
        )
        data = open_data(data_spec(cfg), print)
        found.add((data.fingerprint, data.train[0].tobytes(), data.train[1].tobytes()))
    assert len(found) == 2


@pytest.mark.parametrize("positions", ["alibi", "none", "rope"])
def test_models_of_other_positions(
    undisturbed: tuple[Place, Done], tmp_path: Path, positions: str
) -> None:
    """What the job file sets for positions is named as without effect where nobody reads them."""
    recorded = (undisturbed[0].checkpoint(12) / "manifest.json").read_text()
    manifest = json.loads(recorded)
    manifest["meta"]["config"]["model"]["position_embedding_type"] = positions
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    loaded = load_all(
        [f"{FILES}=mine.jsonl", f"restore_from_path={tmp_path}"], config_name="finetune_gpt"
    )
    assert loaded.values["model.position_embedding_type"] == positions
    named = any("reset_position_ids" in line for line in loaded.inert_lines())
    assert named == (positions != "rope")
    assert resolve(loaded.values, lambda: False).data.reset_position_ids == (positions == "rope")
