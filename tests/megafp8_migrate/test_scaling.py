"""Import of FP8's scales and histories from distributed checkpoints of Megatron's.

The fast tests pickle states as Transformer Engine does, with classes of its names; the slow one
lets Megatron-core over Transformer Engine's own Python write them.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from megafp8.cli.pretrain import main as pretrain
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.loader import Microbatch
from megafp8.foreign import ForeignFileError
from megafp8.parallel.mesh import single_rank
from megafp8.train.build import build
from megafp8.train.load_model import start_from
from megafp8.train.step import train_step
from megafp8_migrate.saved_tensors import read_with_tensors
from tests.megafp8_migrate.test_weights import (
    ARGUMENTS,
    FP32,
    LLAMA,
    L,
    M,
    half_llama,
    imported,
    in_megatron,
    let_megatron_write,
    run,
    saved,
    stacked,
    weights_of,
    write_checkpoint,
)

LENGTH = 4
MODULE = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


class DelayedScaling:
    """Hold the fields that Transformer Engine's class of this name has."""

    def __init__(self, **fields: Any) -> None:
        self.margin, self.fp8_format = 0, Format.HYBRID
        self.amax_history_len, self.amax_compute_algo = LENGTH, "max"
        self.scaling_factor_compute_algo, self.reduce_amax = None, True
        vars(self).update(fields)


@pytest.fixture(autouse=True)
def _classes_have_their_names(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("slow"):  # has the real ones
        return
    module = ModuleType(MODULE)
    for made in (DelayedScaling, Format, _FormatHelper):
        monkeypatch.setattr(made, "__module__", MODULE)
        setattr(module, made.__name__, made)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)


def values_of(seed: int) -> dict[str, Any]:
    """Return scales and histories of one linear, as Transformer Engine's modules hold them."""
    draw = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for side, count, largest in (("fwd", 3, 448.0), ("bwd", 2, 57344.0)):
        history = torch.rand(LENGTH, count, generator=draw) + 0.5
        history[0] = 0.0
        history[:, -1] = 0.0  # nothing has written the last one
        made[f"scale_{side}"] = largest / history.amax(0).where(history.amax(0) > 0, largest)
        made[f"amax_history_{side}"] = history
    return made


def state_of(values: dict[str, Any], **fields: Any) -> bytes:
    """Return the file of one module's state."""
    state = {"recipe": DelayedScaling(**fields), **values}
    state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": 1}
    return saved([torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)])


NAMES = {
    "self_attention.linear_qkv": "attention.qkv", "mlp.linear_fc1": "mlp.fc1",
    "self_attention.linear_proj": "attention.projection", "mlp.linear_fc2": "mlp.fc2",
}  # fmt: skip


def states(**fields: Any) -> dict[str, bytes]:
    """Return the files of the states of two layers that are stacked, and one that is empty."""
    made = {"decoder.final_layernorm._extra_state/shard_0_1": saved([torch.empty(0).byte()])}
    for layer in range(2):
        for number, theirs in enumerate(NAMES):
            content = state_of(values_of(10 * layer + number), **fields)
            made[f"decoder.layers.{theirs}._extra_state/shard_{layer}_2"] = content
    return made


def test_scales_and_histories_come_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(
        tmp_path / "theirs", half_llama(), arguments=ARGUMENTS, objects=states()
    )
    assert run(folder, tmp_path / "new") == 0
    said = capsys.readouterr().out
    wanted = "model.fp8_margin=0 model.fp8_amax_history_len=4 model.fp8_amax_compute_algo=max"
    assert f"of 8 linears. A run takes them with model.fp8=True model.fp8_hybrid=True {wanted}" in (
        said
    )
    assert "left: 1 _extra_state" in said and "note" not in said
    reader = imported(tmp_path / "new")
    for layer in range(2):
        for number, ours in enumerate(NAMES.values()):
            values = values_of(10 * layer + number)
            for column, role in enumerate(("input", "weight")):
                name = f"layers.{layer}.{ours}.{role}"
                history = reader.read(f"scaling/forward/history/{name}")
                assert torch.equal(history, values["amax_history_fwd"][1:, column])
                scale = reader.read(f"scaling/forward/quant_scale/{name}")
                assert torch.equal(scale, values["scale_fwd"][column])
                assert reader.read(f"scaling/forward/num_updates/{name}") == LENGTH - 1
    assert not any("backward" in name for name in reader.names())


JOB = ["model.data.data_prefix=mock", "model.tokenizer.vocab_size=300", "trainer.max_steps=1",
       "trainer.accelerator=cpu", "model.global_batch_size=2", "model.micro_batch_size=2",
       "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0",
       "exp_manager.name=r"]  # fmt: skip
FP8 = ["model.fp8=True", "model.fp8_hybrid=True", f"model.fp8_amax_history_len={LENGTH}",
       "model.pad_inner_dim=True"]  # fmt: skip


def test_a_run_takes_them_under_their_recipe_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After one step the loaded amaxes are one place older, and the newest is the step's."""
    wide = replace(LLAMA, vocab_size=320)
    theirs = {n: t.bfloat16() for n, t in stacked(in_megatron(wide, weights_of(wide)), 2).items()}
    folder = write_checkpoint(tmp_path / "theirs", theirs, arguments=ARGUMENTS, objects=states())
    new = tmp_path / "new"
    assert run(folder, new) == 0
    start = ["--config-dir", str(new), "--config-name", "model", *JOB]
    cases = {
        "theirs": (FP8, "loaded FP8's scales and histories of 16 tensors"),
        "another length": ([*FP8, "model.fp8_amax_history_len=5"], "and are left"),
        "another format": ([FP8[0], "model.fp8_e4m3=True", *FP8[2:]], "and are left"),
        "without": ([], "and are left"),
    }
    for name, (settings, said) in cases.items():
        where = f"exp_manager.exp_dir={tmp_path / name}"
        assert pretrain([*start, *settings, where]) == 0
        assert said in capfd.readouterr().out, name
    (step,) = (tmp_path / "theirs").glob("r/checkpoints/step_00000001")
    reader = type(imported(new))(step)
    name = "layers.1.attention.qkv.input"
    row, before = reader.read(f"scaling/forward/history/{name}"), values_of(10)["amax_history_fwd"]
    assert torch.equal(row[:-1], before[2:, 0]) and row[-1] > 0
    assert reader.read(f"scaling/forward/num_updates/{name}") == LENGTH
    gradients = reader.read("scaling/backward/num_updates/layers.1.attention.qkv.grad_output")
    assert gradients == 1


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in values_of(0).items() if name != key}


QKV = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_2"
ODD: dict[str, tuple[Callable[[], bytes], str]] = {
    "a function of its own": (
        lambda: state_of(values_of(0), scaling_factor_compute_algo="mine"), "function of its own"),
    "another algorithm": (
        lambda: state_of(values_of(0), amax_compute_algo="mean"), "function of its own"),
    "another format": (lambda: state_of(values_of(0), fp8_format=None), "format or its margin"),
    "no recipe": (
        lambda: state_of(values_of(0) | {"recipe": None}), "does not say its recipe"),
    "no history": (lambda: state_of(without("amax_history_fwd")), "another form"),
    "no scale": (lambda: state_of(without("scale_fwd")), "not delayed scaling"),
    "a scale of another size": (
        lambda: state_of(values_of(0) | {"scale_fwd": torch.ones(6)}), "not those of one linear"),
    "a scale of 0": (
        lambda: state_of(values_of(0) | {"scale_fwd": torch.zeros(3)}), "no positive number"),
    "a NaN": (
        lambda: state_of(values_of(0) | {"amax_history_fwd": torch.full((LENGTH, 3), torch.nan)}),
        "no positive number"),
    "halves": (
        lambda: state_of({name: value.half() for name, value in values_of(0).items()}),
        "not those of one linear"),
    "a class of another name": (
        lambda: state_of(values_of(0) | {"x": json.JSONDecodeError("", "", 0)}),
        "json.decoder.JSONDecodeError"),
    "no bytes": (lambda: saved([torch.ones(3)]), "no row of bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_read_is_left_and_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = ODD[name]
    folder = write_checkpoint(
        tmp_path / "theirs", half_llama(), arguments=ARGUMENTS, objects=states() | {QKV: content()}
    )
    assert run(folder, tmp_path / "new") == 0
    out = capsys.readouterr().out
    assert said in out and f"note: {QKV}: " in out and "of 7 linears" in out, out
    assert "scaling/forward/history/layers.0.attention.qkv.input" not in (
        imported(tmp_path / "new").names()
    )


def test_states_of_two_recipes_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {QKV: state_of(values_of(0), amax_compute_algo="most_recent")}
    folder = write_checkpoint(
        tmp_path / "theirs", half_llama(), arguments=ARGUMENTS, objects=states() | changed
    )
    assert run(folder, tmp_path / "new") == 0
    assert "of another recipe than the layers before" in capsys.readouterr().out


def old_file(tensor: torch.Tensor) -> bytes:
    content = io.BytesIO()
    torch.save(tensor.untyped_storage(), content, _use_new_zipfile_serialization=False)
    return content.getvalue()


def in_pickle(content: bytes) -> bytes:
    length = len(content).to_bytes(4, "little")
    return b"\x80\x03ctorch.storage\n_load_from_bytes\nB" + length + content + b"\x85R."


PICKLED = pickle.dumps(torch.arange(6.0).view(2, 3).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_tensors_within_a_pickle_are_torchs(dtype: torch.dtype) -> None:
    base = torch.arange(24).view(4, 6).to(dtype)
    value = {"a": base, "b": base[1:, ::2].t(), "c": base[2, 3], "again": base}
    read = read_with_tensors(pickle.dumps(value))
    for name, tensor in value.items():
        assert torch.equal(read.tensor(read.value[name]), tensor)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (in_pickle(b"abc"), "not a whole pickle"),
        (PICKLED.replace(b"little_endian", b"little_sndian"), "not a whole pickle"),
        (PICKLED.replace(bytes(8) + b"\0\0\x80?", b"\x07" + bytes(7) + b"\0\0\x80?"), "form"),
        (in_pickle(PICKLED), "it calls"),
    ],
)
def test_damaged_bytes_of_tensors_are_refused(content: bytes, said: str) -> None:
    with pytest.raises(ForeignFileError, match=said):
        read = read_with_tensors(content)
        read.tensor(read.value)


def test_a_storage_within_a_storage_is_not_read() -> None:
    """Each level would hold a copy of all within it."""
    content = b""
    for _ in range(50):
        content = in_pickle(content)
    with pytest.raises(ForeignFileError, match="it calls"):
        read_with_tensors(content)


VOCABULARY = 128  # of the models that Megatron-core writes
SCALED = {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": LENGTH,
          "fp8_amax_compute_algo": "max"}  # fmt: skip
SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_router_padding_for_fp8": True}
LOSS = 6.0  # about that of all models here
TRAINS = {"own": True, "trains": 10}
CASES: dict[str, dict[str, Any]] = {
    "FP32": {"config": L, **TRAINS},
    "experts": {"config": L | M, **TRAINS},
    "FP8": {"config": L | SCALED, "passes": 6, **TRAINS},
    "FP8 from BF16": {"config": L | SCALED, "bf16": True, "passes": 6, "own": True},
    "FP8, layers apart": {"config": L | M | SCALED | SHARED | {"moe_layer_freq": [0, 1]},
                          "passes": 2, "own": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints that Megatron-core wrote, with what its runs had after."""
    folder = tmp_path_factory.mktemp("scaled")
    let_megatron_write(folder, CASES)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "passes" in case])
def test_they_are_what_transformer_engines_modules_hold(
    name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(written / name, tmp_path / "new") == 0
    assert "note: decoder" not in capsys.readouterr().out
    reader = imported(tmp_path / "new")
    theirs = load_file(f"{written / name}.safetensors")
    found = 0
    for part in (*NAMES, "mlp.shared_experts.linear_fc1"):
        for layer in range(2):
            scales = theirs.get(f"decoder.layers.{layer}.{part}.scale.fwd")
            if scales is None:
                continue
            found += 1
            history = theirs[f"decoder.layers.{layer}.{part}.amax_history.fwd"]
            begin = "scaling/forward/{}/" + f"layers.{layer}.{NAMES.get(part, 'mlp.shared.fc1')}."
            assert reader.read(begin.format("quant_scale") + "weight") == scales[1] != 1
            of_input = reader.read(begin.format("history") + "input")
            assert torch.equal(of_input, history[1:, 0]) and history.any()
    assert found == (7 if "apart" in name else 8)


def continued(folder: Path, *settings: str) -> torch.Tensor:
    """Return the losses of ten steps from an import, as the writer's `train` takes them."""
    sizes = ["micro_batch_size=2", "global_batch_size=2", "encoder_seq_length=32"]
    rates = ["lr=0.02", "sched.min_lr=0.02", "eps=0.1", "weight_decay=0.0", "betas=[0.9,0.999]"]
    overrides = [
        *(f"model.{each}" for each in sizes), *(f"model.optim.{each}" for each in rates),
        "model.optim.sched.warmup_steps=0", "model.data.data_prefix=mock",
        "trainer.accelerator=cpu", "trainer.precision=32", *settings,
    ]  # fmt: skip
    spec = resolve(load(overrides, folder, "model"), lambda: False)
    spec = replace(spec, model=replace(spec.model, vocab_size=VOCABULARY))
    state = build(spec, single_rank())
    start_from(spec, state, lambda line: None, folder)
    losses = []
    for step in range(10):
        draw = torch.Generator().manual_seed(step)
        text = torch.randint(0, VOCABULARY, (2, 33), generator=draw).numpy()
        losses.append(train_step(state, [Microbatch(text[:, :-1].copy(), text[:, 1:].copy())]).loss)
        state.step += 1
    return torch.tensor(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FP32", "experts"])
def test_ten_steps_are_those_of_megatron(name: str, written: Path, tmp_path: Path) -> None:
    """Its own run trains on after it has saved."""
    theirs = load_file(f"{written / name}.safetensors")["losses"]
    assert run(written / name, tmp_path / "new") == 0
    losses = continued(tmp_path / "new", "model.fp8=False")
    assert len(set(losses.tolist())) == 10 and (losses - theirs).abs().max() <= FP32 * LOSS


@pytest.mark.slow
def test_ten_steps_in_fp8_are_those_of_megatron_but_for_roundings(
    written: Path, tmp_path: Path
) -> None:
    """With the imported scales the first loss is Megatron's, and with scales of 1 it is not.

    Later a number may be rounded the other way, and casts after it differ; all casts together are
    what FP8 differs from FP32 by, which one cast is less than.
    """
    theirs = load_file(f"{written / 'FP8'}.safetensors")["losses"]
    in_fp32 = load_file(f"{written / 'FP32'}.safetensors")["losses"]
    assert run(written / "FP8", tmp_path / "new") == 0
    losses = continued(tmp_path / "new", *FP8)
    assert abs(losses[0] - theirs[0]) <= FP32 * LOSS
    difference = (losses - theirs).square().mean()
    assert difference < (theirs - in_fp32).square().mean()
    without = continued(tmp_path / "new", *FP8, "model.fp8_amax_history_len=5")
    assert abs(without[0] - theirs[0]) > 5 * FP32 * LOSS
