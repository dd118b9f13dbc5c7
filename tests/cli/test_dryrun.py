"""Test `megafp8 dryrun`: what it prints, what it refuses, and its time and memory."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli.dryrun import main
from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.config.test_presets import PARAMETERS
from tests.te_sources import need_sources
from tests.train.runs import ROOT, Driver, make_dataset

SMALL = [
    "trainer.accelerator=cpu",
    "model.micro_batch_size=2",
    "model.global_batch_size=32",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.encoder_seq_length=32",
    "model.tokenizer.vocab_size=300",
    "model.fp8=True",
]
LARGE = [
    "model=gpt3_175b",
    "model.fp8=True",
    "trainer.num_nodes=128",
    "trainer.devices=8",
    "trainer.accelerator=gpu",
    "model.tensor_model_parallel_size=8",
    "model.pipeline_model_parallel_size=8",
]
FOUR_STAGES = ["trainer.num_nodes=2", "trainer.devices=4", "model.pipeline_model_parallel_size=4"]


def test_1024_ranks_of_175b_in_a_minute_and_4_gib() -> None:
    """Processor time counts, so a busy machine does not matter. The vocabulary is GPT-2's."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "megafp8", "dryrun", *LARGE, "--vocab-size=50257", "--rank=517"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert f"{PARAMETERS['gpt3_175b']:,} parameters" in done.stdout
    assert "1024 ranks (128 nodes x 8) = tensor 8 x context 1 x data 16 x pipeline 8" in done.stdout
    assert "96 microbatches of 1 on each of 16 replicas" in done.stdout
    assert "pipeline: ranks wait 6.8% of the time" in done.stdout  # 7 / (96 + 7)
    assert "rank 517" in done.stdout and "tp5 cp0 dp0 pp4" in done.stdout
    assert re.search(r"layers +48-59\n", done.stdout)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.1f} s of a core, {after.ru_maxrss / 2**20:.2f} GiB")
    assert seconds < 60
    assert after.ru_maxrss < 4 * 2**20  # KiB


def test_ranks_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *FOUR_STAGES, "--vocab-size=300", "--shapes"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"rank 0 +rank 4 +rank 6\n", text)
    assert "layers.*.mlp.fc1.weight [128, 64] -> [128, 64] bfloat16" in text
    assert "trainer.num_nodes = 2 (command line; default job: 1)" in text
    assert main([*SMALL, *FOUR_STAGES, "--vocab-size=300", "--rank=7"]) == 0
    assert "tp0 cp0 dp1 pp3" in capsys.readouterr().out


def test_shards_of_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    """The rank's rows, as torch divides them: 64 rows of each of 128 and, of QKV's 192, 96."""
    two = ["trainer.devices=2", "model.fsdp=True", "trainer.accelerator=gpu"]
    given = [word for word in SMALL if "accelerator" not in word]
    assert main([*given, *two, "--vocab-size=300", "--shapes", "--rank=1", "hardware=h100"]) == 0
    text = capsys.readouterr().out
    assert "layers.*.mlp.fc1.weight [128, 64] -> [64, 64] float32  x 4" in text
    assert "layers.*.attention.query.weight [64, 64] -> [0, 64] float32  x 4" in text
    assert "layers.*.attention.key.weight [64, 64] -> [32, 64] float32  x 4" in text
    for row in ("FP32 master weights", "weights gathered by FSDP", "at the start"):
        assert re.search(rf"^{row} +[\d.]+ KiB$", text, re.M), row
    assert not re.search("^weights  ", text, re.M)
    assert "fits on H100" in text


def test_states_in_low_precision_are_counted_as_stored(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["model.fp8=True", "model.optim.fp8_opt_level=O2", "trainer.devices=1"]
    held = {}
    for level in ([*few[:1], few[2]], few):
        assert main([*SMALL, *level, "--vocab-size=300"]) == 0
        text = capsys.readouterr().out
        held[len(level)] = re.search(r"^(FP32 )?gradients +([\d.]+) KiB", text, re.M)
    plain, stored = held[2], held[3]
    assert plain is not None and plain[1] and stored is not None and not stored[1]
    assert float(stored[2]) < 0.6 * float(plain[2])


def test_a_level_with_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["model.fp8=True", "model.optim.fp8_opt_level=O2", "trainer.devices=2", "model.fsdp=True"]
    assert main([*SMALL, *few, "--vocab-size=300"]) == 0
    text = capsys.readouterr().out
    for row in ("master weights", "gradients", "weights gathered by FSDP", "at the start"):
        assert re.search(rf"^{row} +[\d.]+ (K|M)iB$", text, re.M), row


def test_ranks_that_share_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["trainer.devices=2", "model.context_parallel_size=2"]
    assert main([*SMALL, *two, "--vocab-size=300"]) == 0
    assert "context 2" in capsys.readouterr().out


def test_ranks_that_divide_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of four has two of eight experts, of which a token visits two, then four."""
    four = ["trainer.devices=4", "model.expert_model_parallel_size=4", "model.micro_batch_size=8"]
    given = [word for word in SMALL if not re.search("hidden|heads", word)]
    given = ["model=moe_tiny", *given, *four, "model.hidden_size=64", "--vocab-size=300"]
    assert main([*given, "--shapes", "--rank=3"]) == 0
    text = capsys.readouterr().out
    assert "data 4 x pipeline 1; 4 ranks divide the experts of a layer" in text
    assert "tp0 cp0 dp3 pp0 ep3" in text
    for part, (rows, columns) in {"gate": (128, 64), "fc2": (64, 128)}.items():
        whole = f"mlp.experts.7.{part}.weight [{rows}, {columns}] -> [{rows}, {columns}]"
        assert re.search(rf"{re.escape(whole)} bfloat16 +x 4", text)
    assert "mlp.experts.5." not in text
    balance = "Rows of experts are counted in balance: each expert gets equally many of every rank"
    more = re.search(
        rf"{balance}\. With 2 times as many, the total at the peak is ([\d.]+) MiB on rank 3", text
    )
    peak = re.search(r"total at the peak +([\d.]+) MiB", text)
    assert more is not None and peak is not None and float(peak[1]) < float(more[1])
    assert main([*given, "model.moe_router_topk=8"]) == 0
    assert f"{balance}. No router can give a rank more." in capsys.readouterr().out


def test_a_tokenizer_that_is_not_here_needs_only_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = [f"model.data.data_prefix={make_dataset(tmp_path)}",
              "model.tokenizer.library=huggingface",
              f"model.tokenizer.type={tmp_path}/none"]  # fmt: skip
    given = [word for word in SMALL if "vocab_size" not in word]
    assert main([*given, *theirs]) == 2
    assert "or --vocab-size N, with which no data are opened" in capsys.readouterr().err
    assert main([*given, *theirs, "--vocab-size=300"]) == 0


def test_the_data_say_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_dataset(tmp_path / "tiny")
    given = [word for word in SMALL if "vocab_size" not in word]
    assert main([*given, f"model.data.data_prefix={prefix}"]) == 0
    said = "vocabulary 384 (of the data; --vocab-size gives another)"  # 300, padded
    assert said in capsys.readouterr().out
    assert main([*given, "model.data.data_prefix=/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["model=llama3_8b"], "vocabulary 128256 (of Llama 3; the built-in corpus has 4096, for "
         "which give --vocab-size 4096)"),
        (["model=gpt3_125m"], "vocabulary 50304 (of GPT-2; the built-in corpus has 4096"),
        (["model=gpt3_125m", "--vocab-size=300"], "vocabulary 384\n"),
        (["model=gpt3_125m", "model.tokenizer.vocab_size=300"],
         "vocabulary 384 (of model.tokenizer.vocab_size=300)\n"),
        (["model.num_layers=1"], "vocabulary 4096 (of the built-in corpus; --vocab-size gives"),
    ],
)  # fmt: skip
def test_it_says_whose_vocabulary_it_takes(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset has the vocabulary of its published model, and not the built-in corpus's."""
    shape = ["model.hidden_size=64", "model.num_attention_heads=4", "model.num_layers=1"]
    shape += ["model.ffn_hidden_size=128", "model.encoder_seq_length=32"]
    groups = ["model.num_query_groups=4"] if "model=llama3_8b" in given else []
    assert main([*given[:1], *shape, *groups, *given[1:]]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["trainer.devices=3", "trainer.num_nodes=3", "model.tensor_model_parallel_size=2"],
         "trainer.devices=3 times trainer.num_nodes=3 is not a multiple of it"),
        ([*FOUR_STAGES, "model.num_layers=6"], "is not a multiple of 4 pipeline stages"),
        (["trainer.num_nodes=3"], "times 3 data-parallel ranks"),
        (["model.fp8=True", "model.fp8_modules=['*:high_precision']"],
         "no product would run in FP8"),
        (["model.no_such_key=1"], "model.no_such_key"),
        (["--rank=1"], "the ranks are 0 to 0"),
        (["--nonsense"], "--nonsense"),
        (["--rank=first"], "argument --rank: invalid int value: 'first'. --help lists"),
    ],
)  # fmt: skip
def test_it_refuses_what_the_run_would(
    given: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {text.partition("=")[0] for text in given}
    others = [text for text in SMALL if text.partition("=")[0] not in keys]
    assert main([*others, "--vocab-size=300", *given]) == 2
    assert reason in capsys.readouterr().err


def test_a_run_of_that_name_is_looked_at_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [*SMALL, "--vocab-size=300", "exp_manager.name=mine"]
    assert main(named) == 0
    assert not list(tmp_path.iterdir()), "it makes nothing"
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text("model: {num_layers: 9}\n")
    record = {"identity": "another", "status": "finished", "created": "today"}
    (tmp_path / "runs/mine/run.json").write_text(json.dumps(record))
    assert main(named) == 2
    assert "model.num_layers=4" in capsys.readouterr().err


def test_transformer_engine_s_layers_on_a_gpu(driver: Driver, tmp_path: Path) -> None:
    """Its own Python loads here; a GPU's attention keeps no scores. The native engine keeps more:
    it keeps what its norms and activations return, which Transformer Engine's fused ones cast."""
    need_sources(DEFAULT_VERSION)
    given = [*SMALL[1:], "trainer.accelerator=gpu", "trainer.devices=4", "--vocab-size=300"]
    given += ["model.tensor_model_parallel_size=2", "model.pipeline_model_parallel_size=2"]
    given += ["model.sequence_parallel=True", "model.fp8_params=True", "model.fp8_backend=te"]
    words = ("-m", "megafp8", "dryrun", *given, "--shapes")
    done = driver.run_python(*words, cwd=ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FP8: 100.0% of the GEMM FLOPs" in done.stdout or "in higher precision" in done.stdout
    assert "attention.query.weight [64, 64] -> [32, 64] fp8" in done.stdout
    assert re.search(r"scales, histories +[1-9]", done.stdout)


def test_transformer_engine_s_layers_in_shards(driver: Driver, tmp_path: Path) -> None:
    """Its default version keeps FP8 copies of weights that FSDP gathers: they are a row of these
    bytes, in two orientations of the 4 x (4 x 64^2 + 2 x 64 x 128) elements of the linears."""
    need_sources(DEFAULT_VERSION)
    given = [*SMALL[1:], "trainer.accelerator=gpu", "trainer.devices=2", "--vocab-size=300"]
    given += ["model.fsdp=True", "model.fp8_backend=te"]
    words = ("-m", "megafp8", "dryrun", *given)
    done = driver.run_python(*words, cwd=ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for row in ("FP32 master weights", "weights gathered by FSDP", "at the start"):
        assert re.search(rf"^{row} +[\d.]+ KiB$", done.stdout, re.M), row
    assert re.search(r"^quantized copies of weights +256.1 KiB$", done.stdout, re.M), done.stdout


@pytest.mark.parametrize(
    ("accelerator", "has_gpu", "said"),
    [
        ("auto", False, "CPUs (trainer.accelerator=auto finds no GPU here; "
         "trainer.accelerator=gpu counts GPUs', and needs none)"),
        ("auto", True, "GPUs (trainer.accelerator=auto finds a GPU here; "
         "trainer.accelerator=cpu counts CPUs')"),
        ("cpu", True, "CPUs (trainer.accelerator=cpu; trainer.accelerator=gpu counts"),
        ("gpu", False, "GPUs (trainer.accelerator=gpu; trainer.accelerator=cpu counts"),
    ],
)  # fmt: skip
def test_it_says_for_which_device_it_counts(
    accelerator: str,
    has_gpu: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    given = [*SMALL[1:], f"trainer.accelerator={accelerator}", "--vocab-size=300"]
    assert main([*given, "model.fp8_backend=native"]) == 0
    assert f"memory: that of ranks on {said}" in capsys.readouterr().out


def test_cpu_ranks_are_not_compared_with_a_gpus_memory(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL[1:], "model.fp8_backend=native", "--vocab-size=300", "hardware=h100"]
    assert main([*given, "trainer.accelerator=cpu"]) == 2
    assert "hardware=H100 SXM: the ranks would be on CPUs" in capsys.readouterr().err
    for more in (["trainer.accelerator=gpu"], []):  # a GPU that is named is one
        assert main([*given, *more]) == 0
        out = capsys.readouterr().out
        assert "fits on H100 SXM" in out and "memory: that of ranks on GPUs" in out
    assert "(trainer.accelerator=auto, hardware=H100 SXM; trainer.accel" in out


def test_the_answer_stands_before_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "model.fp8_backend=native", "--vocab-size=300"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model: ")
    answer, _, settings = out.partition("\nsettings that are not the default job's:\n")
    assert "total at the peak" in answer and "model.hidden_size = 64 (command line;" in settings


def test_a_setting_of_gpus_is_refused_on_a_cpu_as_in_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    auto = [word for word in SMALL if not word.startswith("trainer.accelerator")]
    for setting in ("model.enable_cuda_graph=True", "model.transformer_engine=False"):
        given = [*auto, setting, "model.fp8=False", "--vocab-size=300"]
        assert main([word for word in given if word != "model.fp8=True"]) == 2
        said = capsys.readouterr().err
        assert f"{setting} (command line): has no effect with" in said


def test_nvfp4_in_a_process_of_its_own_is_called_fp4(driver: Driver, tmp_path: Path) -> None:
    """The compiled kernels load there among tensors without memory, whose bytes nothing reads."""
    given = ["precision=nvfp4", "model.num_layers=2", "--vocab-size=300"]
    words = ("-m", "megafp8", "dryrun", *given)
    done = driver.run_python(*words, cwd=ROOT, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^FP4: \d", done.stdout, re.MULTILINE)
