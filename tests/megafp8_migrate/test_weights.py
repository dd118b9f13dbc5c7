"""Import of weights from distributed checkpoints of Megatron's, of which nothing is unpickled.

The fast tests write the files as Megatron-core does, with torch's own classes of metadata; the slow
one lets Megatron-core write them (`megatron_writer.py`).
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import operator
import os
import pickle
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fp8_numerics.caches import built_beside, cache_folder
from megafp8.checkpoint.reader import Reader
from megafp8.cli.commands import main
from megafp8.cli.pretrain import main as pretrain
from megafp8.config.architecture import spec_of_tree, tree_of_spec
from megafp8.foreign import ForeignFileError
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes
from megafp8.train import huggingface
from megafp8.train.live_bytes import LiveBytes
from megafp8.train.load_model import load_model, shape_of
from megafp8_migrate.plain_pickle import read_pickle
from megafp8_migrate.saved_tensors import read_saved
from tests.te_sources import need_sources
from tests.test_layers import ROOT

VOCABULARY = 96
GPT = spec_of_tree(
    {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
     "max_position_embeddings": 32},
    VOCABULARY,
)  # fmt: skip
LLAMA = spec_of_tree(
    {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
     "num_query_groups": 2, "kv_channels": 8, "activation": "fast-swiglu", "bias": False,
     "normalization": "rmsnorm", "position_embedding_type": "rope", "qk_layernorm": True,
     "share_embeddings_and_output_weights": False, "max_position_embeddings": 32},
    VOCABULARY,
)  # fmt: skip
EXPERTS = spec_of_tree(
    tree_of_spec(LLAMA) | {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12,
        "moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 20,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    },
    VOCABULARY,
)  # fmt: skip
ALL_EXPERTS = spec_of_tree(tree_of_spec(EXPERTS) | {"moe_layer_freq": 1}, VOCABULARY)
ARGUMENTS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8, "swiglu": True,
    "squared_relu": False, "openai_gelu": False, "bias_gelu_fusion": False,
    "add_bias_linear": False, "add_qkv_bias": False, "normalization": "RMSNorm",
    "norm_epsilon": 1e-5, "apply_layernorm_1p": False, "qk_layernorm": True,
    "position_embedding_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0,
    "rotary_interleaved": False, "use_rope_scaling": False,
    "untie_embeddings_and_output_weights": True, "max_position_embeddings": 32,
    "multi_latent_attention": False, "num_experts": None, "init_method_std": 0.02,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "padded_vocab_size": VOCABULARY,
    "fp8": "hybrid", "lr": 3e-4, "params_dtype": torch.bfloat16, "world_size": 8,
}  # fmt: skip
"""Arguments of Megatron-LM, as `common.pt` has them."""


# ---- weights of ours, and the same under Megatron's names


def weights_of(spec: GPTSpec) -> dict[str, torch.Tensor]:
    """Return random weights that BF16 holds, by logical names."""
    draw = torch.Generator().manual_seed(3)
    shapes = dict(logical_shapes(spec))
    if spec.moe is not None and spec.moe.has_expert_bias:
        layers = [layer for layer, has in enumerate(spec.moe.layers) if has]
        shapes |= {f"layers.{layer}.mlp.router.bias": (spec.moe.num_experts,) for layer in layers}
    return {
        name: torch.randn(shape, generator=draw).bfloat16().float()
        for name, shape in shapes.items()
    }


def in_megatron(spec: GPTSpec, ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's tensors as Megatron-core names and joins them, layer by layer."""
    theirs = {
        "embedding.word_embeddings.weight": ours["embedding.word.weight"],
        "embedding.position_embeddings.weight": ours.get("embedding.position.weight"),
        "output_layer.weight": ours.get("head.weight"),
        "decoder.final_layernorm.weight": ours["final_norm.weight"],
        "decoder.final_layernorm.bias": ours.get("final_norm.bias"),
    }
    for layer, kind in itertools.product(range(spec.num_layers), ("weight", "bias")):

        def of(name: str, layer: int = layer, kind: str = kind) -> Any:
            return ours.get(f"layers.{layer}.{name}.{kind}")

        def mlp(home: str, of: Callable[[str], Any] = of) -> Any:
            halves = of(f"{home}.gate"), of(f"{home}.up")
            return of(f"{home}.fc1") if halves[0] is None else torch.cat(halves)

        named = {
            "self_attention.linear_qkv": joined(spec, *map(of, (
                "attention.query", "attention.key", "attention.value"))),
            "self_attention.linear_proj": of("attention.projection"),
            "self_attention.q_layernorm": of("attention.query_norm"),
            "self_attention.k_layernorm": of("attention.key_norm"),
            "mlp.linear_fc1": mlp("mlp"),
            "mlp.linear_fc2": of("mlp.fc2"),
            "mlp.router": of("mlp.router") if kind == "weight" else None,
            "mlp.shared_experts.linear_fc1": mlp("mlp.shared"),
            "mlp.shared_experts.linear_fc2": of("mlp.shared.fc2"),
        }  # fmt: skip
        begin = f"decoder.layers.{layer}"
        theirs |= {f"{begin}.{name}.{kind}": tensor for name, tensor in named.items()}
        theirs[f"{begin}.self_attention.linear_qkv.layer_norm_{kind}"] = of("attention_norm")
        has_experts = spec.moe is not None and spec.moe.layers[layer]
        norm = "pre_mlp_layernorm." if has_experts else "mlp.linear_fc1.layer_norm_"
        theirs[f"{begin}.{norm}{kind}"] = of("mlp_norm")
        if has_experts and spec.moe is not None and kind == "weight":
            theirs[f"{begin}.mlp.router.expert_bias"] = ours[f"layers.{layer}.mlp.router.bias"]
            for name in ("fc1", "fc2"):
                each = [f"mlp.experts.{expert}" for expert in range(spec.moe.num_experts)]
                stack = [mlp(e) if name == "fc1" else of(f"{e}.fc2") for e in each]
                theirs[f"{begin}.mlp.experts.experts.linear_{name}.weight"] = torch.stack(stack)
    return {name: tensor for name, tensor in theirs.items() if tensor is not None}


def joined(spec: GPTSpec, query: Any, key: Any, value: Any) -> Any:
    """Return queries, keys and values joined group by group."""
    if query is None:
        return None
    groups = spec.num_kv_heads
    parts = [tensor.chunk(groups) for tensor in (query, key, value)]
    return torch.cat([part for group in zip(*parts, strict=True) for part in group])


def stacked(theirs: Mapping[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return the tensors with those of all layers stacked, as Megatron-core saves equal layers."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.items():
        if not name.startswith("decoder.layers."):
            out[name] = tensor
        elif name.startswith("decoder.layers.0."):
            each = [theirs[name.replace(".0.", f".{layer}.", 1)] for layer in range(layers)]
            out[name.replace(".0.", ".", 1)] = torch.stack(each)
    return out


# ---- files as Megatron-core writes them


def saved(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def grid(tensor: torch.Tensor, name: str, parts: int) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return chunks of a tensor with their places: one of each layer, divided over `parts` ranks.

    A layer's own first or last dimension is divided, as tensor parallelism does.
    """
    is_stacked = name.split(".layers.")[-1][0].isalpha() and ".layers." in name
    counts = [len(tensor) if is_stacked and n == 0 else 1 for n in range(tensor.dim())]
    divided = -1 if "linear_fc2.weight" in name or "linear_proj.weight" in name else int(is_stacked)
    if tensor.dim() > int(is_stacked) + 1 and tensor.shape[divided] % parts == 0:
        counts[divided] *= parts
    sizes = [n // count for n, count in zip(tensor.shape, counts, strict=True)]
    found = []
    for cell in itertools.product(*map(range, counts)):
        place = tuple(i * n for i, n in zip(cell, sizes, strict=True))
        slices = tuple(slice(p, p + n) for p, n in zip(place, sizes, strict=True))
        found.append((place, tensor[slices].clone()))
    return found


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    parts: int = 1,
    arguments: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
    chunks: Mapping[str, tuple[Sequence[int], list[tuple[Any, torch.Tensor]]]] | None = None,
    **attributes: Any,
) -> Path:
    """Write a checkpoint of the form `torch_dist`: each part in the file of one of two ranks.

    `objects` has what is no tensor: a value, or a file of `torch.save`.
    `chunks` has the global shape and the parts of tensors that are no grid, and `attributes` are
    those of the metadata, as Megatron-core adds some.
    """
    folder.mkdir(parents=True)
    files = [io.BytesIO(), io.BytesIO()]
    listed: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}

    def put(index: MetadataIndex, content: bytes) -> None:
        number = len(places) % 2
        where = _StorageInfo(f"__{number}_0.distcp", files[number].tell(), len(content))
        files[number].write(content)
        places[index] = where

    every = {name: (tensor.shape, grid(tensor, name, parts)) for name, tensor in tensors.items()}
    for name, (shape, found) in (every | dict(chunks or {})).items():
        listed[name] = TensorStorageMetadata(
            TensorProperties(dtype=found[0][1].dtype), torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(p), t.shape) for p, t in found],
        )  # fmt: skip
        for place, tensor in found:
            put(MetadataIndex(name, torch.Size(place)), saved(tensor))
    for name, value in (objects or {}).items():
        listed[name] = BytesStorageMetadata()
        is_file = isinstance(value, bytes)
        put(MetadataIndex(name), value if is_file else saved([io.BytesIO(saved(value))]))
    for number, file in enumerate(files):
        (folder / f"__{number}_0.distcp").write_bytes(file.getvalue())
    metadata = Metadata(listed, storage_data=places)
    vars(metadata).update(attributes)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    common: dict[str, Any] = {"iteration": 7, "checkpoint_version": 3.0}
    if arguments is not None:
        common["args"] = Namespace(**arguments)
    (folder / "common.pt").write_bytes(saved(common))
    return folder


def settings_file(folder: Path, spec: GPTSpec) -> Path:
    """Write a YAML with a model's settings, as of a run that does not keep them."""
    file = folder / "settings.yaml"
    tree = {"encoder_seq_length": 32, **tree_of_spec(spec)}
    file.write_text(yaml.safe_dump({"defaults": ["pretrain_gpt", "_self_"], "model": tree}))
    return file


def imported(folder: Path) -> Reader:
    return Reader(folder / "checkpoints/step_00000000")


def assert_holds(folder: Path, spec: GPTSpec, ours: Mapping[str, torch.Tensor]) -> None:
    """The imported model has this shape and these weights, bit for bit, and can be built."""
    reader = imported(folder)
    assert shape_of(reader) == replace(
        shape_of(reader), **{n: v for n, v in vars(spec).items() if n in tree_of_spec(spec)}
    )
    for name, tensor in ours.items():
        assert torch.equal(reader.read_values(f"model/{name}"), tensor), name
    assert load_model(reader, torch.float32, torch.device("cpu"))


CASES: dict[str, tuple[GPTSpec, int, bool]] = {
    "gpt": (GPT, 1, True),
    "gpt of 2 ranks": (GPT, 2, True),
    "llama": (LLAMA, 1, True),
    "llama of 2 ranks": (LLAMA, 2, True),
    "llama, layer by layer": (LLAMA, 2, False),
    "experts in one layer": (EXPERTS, 2, False),
    "experts in all layers": (ALL_EXPERTS, 2, True),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_come_bit_for_bit(name: str, tmp_path: Path) -> None:
    spec, parts, is_stacked = CASES[name]
    ours = weights_of(spec)
    theirs = in_megatron(spec, ours)
    theirs = stacked(theirs, spec.num_layers) if is_stacked else theirs
    half = {n: t if "expert_bias" in n else t.bfloat16() for n, t in theirs.items()}
    folder = write_checkpoint(tmp_path / "theirs", half, parts=parts)
    new = tmp_path / "new"
    command = ["import", str(folder), str(new), "--settings", str(settings_file(tmp_path, spec))]
    assert main(command) == 0
    assert_holds(new, spec, ours)


# ---- what is read beside the weights


def half_llama() -> dict[str, torch.Tensor]:
    theirs = stacked(in_megatron(LLAMA, weights_of(LLAMA)), 2)
    return {name: tensor.bfloat16() for name, tensor in theirs.items()}


def with_masters(prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return weights of ours that BF16 does not hold, and theirs in BF16 with these as masters."""
    ours = {name: tensor * (1 + 2**-12) for name, tensor in weights_of(LLAMA).items()}
    theirs = stacked(in_megatron(LLAMA, ours), 2)
    half = {name: tensor.bfloat16() for name, tensor in theirs.items()}
    moments = {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in theirs.items()}
    return ours, half | moments | {f"{prefix}{name}": tensor for name, tensor in theirs.items()}


def run(*words: str | Path) -> int:
    return main(["import", *map(str, words)])


@pytest.mark.parametrize(
    "prefix",
    ["optimizer.state.fp32_param.", "optimizer.state.param.", "chained_1.optimizer.state.param."],
)
def test_master_weights_are_read_where_they_are(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, tensors = with_masters(prefix)
    folder = write_checkpoint(tmp_path / "theirs", tensors, parts=2, arguments=ARGUMENTS)
    assert run(folder, tmp_path / "new") == 0
    assert_holds(tmp_path / "new", LLAMA, ours)
    said = capsys.readouterr().out
    assert f"read: {len(ours)} tensors, {len(ours)} of them from the optimizer's master" in said
    assert "left: 11 of the optimizer" in said, said


def test_master_weights_that_are_stored_as_rows_of_cells(tmp_path: Path) -> None:
    """Megatron-core until 0.13 stores each rank's cell of a tensor as parts of one row."""
    ours, tensors = with_masters("optimizer.state.fp32_param.")
    rows, shapes = {}, {}
    for name in [name for name in tensors if name.startswith("optimizer.state.fp32_param.")]:
        found = grid(tensors.pop(name), name, 2)
        whole = stacked(in_megatron(LLAMA, ours), 2)[name.split("fp32_param.")[1]].shape
        cell = found[0][1].shape
        counts = [n // m for n, m in zip(whole, cell, strict=True)]
        chunks = []
        for place, tensor in found:
            number = [p // m for p, m in zip(place, cell, strict=True)]
            flat, cut = tensor.reshape(-1), tensor.numel() // 3
            for begin, end in ((cut, tensor.numel()), (0, cut)):  # two data-parallel ranks
                shape = (*[1] * len(cell), end - begin)
                chunks.append(((*number, begin), flat[begin:end].clone().view(shape)))
        rows[name] = ((*counts, found[0][1].numel()), chunks)
        shapes[name] = {"nd_reformulated_orig_global_shape": tuple(whole)}
    folder = write_checkpoint(
        tmp_path / "theirs", tensors, chunks=rows, arguments=ARGUMENTS, mcore_data=shapes
    )
    assert run(folder, tmp_path / "new") == 0
    assert_holds(tmp_path / "new", LLAMA, ours)


def test_what_is_left_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_x.bucket_idx_0.param"
    objects = {
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": {"amax": torch.ones(3)},
        "rng_state/shard_0_1": [1],
        "something/shard_0_1": 2,
    }
    tensors = half_llama() | {bucket: torch.ones(9)}
    folder = write_checkpoint(tmp_path / "theirs", tensors, arguments=ARGUMENTS, objects=objects)
    assert run(folder, tmp_path / "new") == 0
    said = capsys.readouterr().out
    for line in ("left: 1 of the optimizer", "left: 1 _extra_state", "left: 1 of random numbers",
                 "left: 1 such as something/shard_0_1", "in buckets", "0 of them"):  # fmt: skip
        assert line in said, said


WIDE = replace(LLAMA, vocab_size=320)
JOB = ["model.data.data_prefix=mock", "model.tokenizer.vocab_size=300", "trainer.max_steps=1",
       "trainer.accelerator=cpu", "model.global_batch_size=2", "model.micro_batch_size=1",
       "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0",
       "exp_manager.name=r"]  # fmt: skip


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    theirs = stacked(in_megatron(WIDE, weights_of(WIDE)), 2)
    return write_checkpoint(tmp_path / "theirs", theirs, arguments=ARGUMENTS)


def test_a_run_starts_from_the_folder_as_from_its_import(
    wide: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On one rank and on two the same command with another path ends with the same bits."""
    new, seen = tmp_path / "new", dict[str, Reader]()
    assert run(wide, new) == 0
    assert f"megafp8 pretrain --config-dir {new} --config-name model" in capfd.readouterr().out
    start = ["--config-dir", str(new), "--config-name", "model", *JOB]
    for name, words in {
        "import": [],
        "import of two": ["trainer.devices=2"],
        "direct": [f"restore_from_path={wide}"],
        "direct of two": [f"restore_from_path={wide}", "trainer.devices=2"],
    }.items():
        home = tmp_path / name
        assert pretrain([*start, *words, f"exp_manager.exp_dir={home}"]) == 0
        out = capfd.readouterr().out
        is_theirs = name.startswith("direct")
        assert (f"loaded the weights from {wide}\n" in out) is is_theirs
        assert ("read: 25 tensors" in out) is is_theirs, out
        assert not (home / "r/.imported").exists()
        seen[name] = Reader(home / "r/checkpoints/step_00000001")
    for name in seen["import"].names():
        if name.startswith(("model/", "optimizer/")):
            assert torch.equal(seen["import"].read(name), seen["direct"].read(name)), name
            two = [seen[f"{each} of two"].read(name) for each in ("import", "direct")]
            assert torch.equal(*two), name


def test_a_run_that_does_not_fit_the_folder_is_refused_and_leaves_nothing(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(wide, tmp_path / "new") == 0
    start = ["--config-dir", str(tmp_path / "new"), "--config-name", "model", *JOB]
    start += [f"restore_from_path={wide}", f"exp_manager.exp_dir={tmp_path / 'runs'}"]
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/.metadata").write_bytes(b"")
    for words, said in {
        ("model.ffn_hidden_size=32",): f"ffn_hidden_size=32: the model in {wide} has 24. Set",
        ("model.rotary_base=500",): "rotary_base=500.0: the weights were trained with 10000",
        ("model.tokenizer.vocab_size=500",): f"restore_from_path={wide}: its vocabulary has 320",
        (f"restore_from_path={tmp_path / 'cut'}",): "cut/.metadata: cannot be read: ",
    }.items():
        is_refused = words != ("model.rotary_base=500",)
        assert pretrain([*start, *words]) == (2 if is_refused else 0)
        shown = capfd.readouterr()
        assert said in (shown.err if is_refused else shown.out), shown
        assert (tmp_path / "runs/r").exists() is not is_refused
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    monkeypatch.setattr("megafp8.neighbours.is_there", lambda module: False)
    assert pretrain(start) == 2
    error = capfd.readouterr().err
    assert f"error: restore_from_path={wide} needs the package megafp8_migrate" in error
    assert "pip install" in error and not (tmp_path / "runs/r").exists()


def test_fine_tuning_and_resuming_name_the_command_that_imports(
    wide: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They take the model's shape, or all of a run, from what they start from."""
    job = [*JOB, f"exp_manager.exp_dir={tmp_path / 'runs'}"]
    asked = [f"restore_from_path={wide}", "model.data.train_ds.file_names=x.jsonl"]
    for words in (asked, [f"model.resume_from_checkpoint={wide}"]):
        assert pretrain([*job, *words]) == 2
        assert f"megafp8 import {wide} imported" in capfd.readouterr().err


def test_an_import_holds_few_tensors_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that is written has one tensor here; beside it are a chunk and what is read of it."""
    deep = replace(LLAMA, num_layers=6)
    ours = weights_of(deep)
    theirs = in_megatron(deep, ours)
    half = {name: tensor.bfloat16() for name, tensor in stacked(theirs, 6).items()}
    folder = write_checkpoint(tmp_path / "theirs", half, arguments=ARGUMENTS | {"num_layers": 6})
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 1)
    with LiveBytes() as live:
        live.begin()
        assert run(folder, tmp_path / "new") == 0
    assert_holds(tmp_path / "new", deep, ours)
    largest, whole = (f(tensor.nbytes for tensor in theirs.values()) for f in (max, sum))
    assert live.most <= 3 * largest < whole / 2


# ---- which model it is


def nemo_1(folder: Path, weights: Path) -> Path:
    tree = {"target": "MegatronGPTModel", "mcore_gpt": True, "encoder_seq_length": 32}
    (folder / "model_config.yaml").write_text(yaml.safe_dump(tree | tree_of_spec(LLAMA)))
    weights.rename(folder / "model_weights")
    return folder


def nemo_2(folder: Path, weights: Path) -> Path:
    config = {
        "_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig",
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 8, "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_partial_": True},
        "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
        "qk_layernorm": True, "position_embedding_type": "rope", "rotary_base": 10000,
        "share_embeddings_and_output_weights": False, "max_position_embeddings": 32,
        "seq_length": 32,
    }  # fmt: skip
    (folder / "context").mkdir()
    tree = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": config}
    (folder / "context/model.yaml").write_text(yaml.safe_dump(tree))
    weights.rename(folder / "weights")
    return folder


def of_bridge(folder: Path, weights: Path) -> Path:
    nemo_2(folder, weights)
    tree = yaml.safe_load((folder / "context/model.yaml").read_text())
    home = (folder / "weights").rename(folder / "iter_0000007")
    tree = {"model": tree["config"], "train": {"train_iters": 9}}
    (home / "run_config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "latest_checkpointed_iteration.txt").write_text("7\n")
    return folder


def archive(folder: Path, weights: Path) -> Path:
    nemo_1(folder, weights)
    with tarfile.open(folder / "model.nemo", "w") as tar:
        tar.add(folder / "model_config.yaml", "./model_config.yaml")
        tar.add(folder / "model_weights", "./model_weights")
    return folder / "model.nemo"


@pytest.mark.parametrize("kind", [nemo_1, nemo_2, of_bridge, archive])
@pytest.mark.parametrize("prefix", ["model.", "module."])
def test_files_of_nemo_and_bridge_say_which_model_it_is(
    kind: Callable[[Path, Path], Path], prefix: str, tmp_path: Path
) -> None:
    tensors = {f"{prefix}{name}": tensor for name, tensor in half_llama().items()}
    weights = write_checkpoint(tmp_path / "weights of it", tensors)
    home = tmp_path / "home"
    home.mkdir()
    assert run(kind(home, weights), tmp_path / "new") == 0
    assert_holds(tmp_path / "new", LLAMA, weights_of(LLAMA))


OF_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 20, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [1e-4],
    "moe_z_loss_coeff": None, "moe_router_pre_softmax": False, "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": None, "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True, "moe_expert_capacity_factor": None, "moe_permute_fusion": True,
    "moe_router_num_groups": None, "moe_router_group_topk": None,
    "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 8,
    "moe_router_padding_for_fp8": True, "moe_router_padding_for_quantization": True,
}  # fmt: skip


def test_arguments_of_experts_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How ranks divided and filled the experts does not matter, and what drops tokens does."""
    ours = weights_of(ALL_EXPERTS)
    theirs = stacked(in_megatron(ALL_EXPERTS, ours), 2)
    arguments = ARGUMENTS | OF_EXPERTS
    assert run(write_checkpoint(tmp_path / "a", theirs, arguments=arguments), tmp_path / "b") == 0
    assert_holds(tmp_path / "b", ALL_EXPERTS, ours)
    assert yaml.safe_load((tmp_path / "b/model.yaml").read_text())["model"][
        "moe_aux_loss_coeff"
    ] == pytest.approx(1e-4)
    arguments["moe_expert_capacity_factor"] = 1.25
    assert run(write_checkpoint(tmp_path / "c", theirs, arguments=arguments), tmp_path / "d") == 2
    assert "moe_expert_capacity_factor: 1.25" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"multi_latent_attention": True}, "multi_latent_attention"),
        ({"rotary_interleaved": True}, "rotary_interleaved"),
        ({"normalization": "Other"}, "normalization"),
        ({"max_position_embeddings": None}, "does not have max_position_embeddings"),
        ({"num_attention_heads": 3}, "does not divide model.num_attention_heads"),
        ({"swiglu": False, "squared_relu": True}, "mlp.linear_fc1.weight has shape"),
        ({"num_query_groups": 4}, "linear_qkv.weight has shape"),
        ({"num_layers": 3}, "has shape"),
        ({"qk_layernorm": False}, "layernorm.weight (2 such tensors), which a model"),
        ({"untie_embeddings_and_output_weights": False}, "has output_layer.weight"),
        ({"add_bias_linear": True}, "lacks decoder.layers."),
        ({"hidden_size": ["x"]}, "hidden_size"),
        ({"hidden_size": {"x": 1}}, '"hidden_size" is no plain value'),
        ({"rotary_base": None}, "does not have rotary_base"),
        ({"hidden_size": "16; import os"}, "hidden_size"),
    ],
)
def test_arguments_of_another_model_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "theirs", half_llama(), arguments={**ARGUMENTS, **changed})
    assert run(folder, tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith(f"error: {folder}"), error
    assert "--settings" in error or "no plain value" in error, error
    assert error.count("\n") == 1 and not (tmp_path / "new").exists()


# ---- hostile and damaged files


class Gadget:
    """Call a function when the object is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def planted(mark: Path) -> dict[str, tuple[bytes, bool]]:
    """Return pickles by what an error must name, and whether unpickling each makes `mark`."""
    code = f"__import__('os').mkdir({str(mark)!r})"
    text = str(mark).encode()
    name = b"X" + len(text).to_bytes(4, "little") + text
    working = {
        "posix.mkdir": pickle.dumps(Gadget(os.mkdir, str(mark))),
        "posix.system": pickle.dumps(Gadget(os.system, f"mkdir '{mark}'")),
        "builtins.eval": pickle.dumps(Gadget(eval, code), 2),
        "builtins.exec": pickle.dumps(Gadget(exec, code), 4),
        "subprocess.call": pickle.dumps(Gadget(subprocess.call, ["mkdir", str(mark)]), 3),
        "functools.partial": pickle.dumps(Gadget(partial(os.mkdir, str(mark)))),
        "operator.methodcaller": pickle.dumps(Gadget(operator.methodcaller("mkdir"), mark)),
        "posix.chdir": pickle.dumps([Gadget(os.chdir, "."), Gadget(os.mkdir, str(mark))]),
        "os.mkdir": b"(cos\nmkdir\n" + name + b"o.",
        "the instruction INST": b"(" + name + b"ios\nmkdir\n.",
    }
    inner = b"\x8c\x13megatron.core.enums\x8c\x09os.system"
    others = {
        "os.system": b"\x80\x04cos\nsystem\n.",
        "runpy.run_path": b"\x80\x04\x8c\x05runpy\x8c\x08run_path\x93.",
        "megatron.core.enums.os.system": b"\x80\x04" + inner + b"\x93.",
        "the instruction EXT1": b"\x80\x02\x82\x01.",
        "torch.hub.load": b"ctorch.hub\nload\n(tR.",
        "torch.load": b"ctorch\nload\n(tR.",
        "numpy.fromfile": b"cnumpy\nfromfile\n(tR.",
        "torch.Size.__reduce__": b"cbuiltins\ngetattr\n(ctorch\nSize\nX\x0a\0\0\0__reduce__tR.",
        "something outside": b"X\x01\0\0\0aQ.",
    }
    return {key: (content, True) for key, content in working.items()} | {
        key: (content, False) for key, content in others.items()
    }


PLANTED = tuple(planted(Path("/nowhere")))


def archive_of(content: bytes) -> bytes:
    """Return a file of torch.save whose pickle is another one."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({}))) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, content if is_pickle else old.read(info))
        new.writestr("padding", bytes(1 << 14))  # as long as the part that it replaces
    return out.getvalue()


@pytest.mark.parametrize(
    ("named", "place"),
    [(named, ".metadata") for named in PLANTED]
    + [(named, place) for named in PLANTED[:4] for place in ("common.pt", "__0_0.distcp")],
)
def test_a_hostile_file_runs_nothing(
    named: str, place: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, works = planted(tmp_path / "was run")[named]
    (llama / place).write_bytes(content if place == ".metadata" else archive_of(content))
    if place.endswith("distcp"):  # the first part of this file is the whole archive
        metadata = pickle.loads((llama / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            if info.relative_path == place:
                info.offset, info.length = 0, (llama / place).stat().st_size
        (llama / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run(llama, tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert (
        named in error and error.startswith(f"error: {llama / place}: ") and error.count("\n") == 1
    ), error
    assert not (tmp_path / "was run").exists() and not (tmp_path / "new").exists()
    if works and place == ".metadata":
        with contextlib.suppress(Exception):
            pickle.loads(content)
        assert (tmp_path / "was run").exists(), "the pickle is a working one"


def test_arguments_are_read_from_beside_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-core from 0.19 on writes no `common.pt`; a hostile object runs nothing."""
    contents = {
        "posix.mkdir": archive_of(planted(tmp_path / "was run")["posix.mkdir"][0]),
        "--settings FILE": saved([]),
        "settings of the model: ": saved([{"args": Namespace(**ARGUMENTS)}]),
    }
    for number, (said, content) in enumerate(contents.items()):
        objects = {"common_state/shard_0_1": content}
        folder = write_checkpoint(tmp_path / f"{number}", half_llama(), objects=objects)
        (folder / "common.pt").unlink()
        assert run(folder, tmp_path / "new") == (0 if said.startswith("settings") else 2)
        out, error = capsys.readouterr()
        assert f"{folder}/__" in (error or out) and said in (error or out), (out, error)
        assert "common_state" not in out and not (tmp_path / "was run").exists()
    assert_holds(tmp_path / "new", LLAMA, weights_of(LLAMA))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "theirs", half_llama(), arguments=ARGUMENTS)


def change(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert content.count(old) and len(old) == len(new)
    file.write_bytes(content.replace(old, new))


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def not_finite(folder: Path) -> None:
    """Write a checkpoint that has a NaN in place of a number."""
    shutil.rmtree(folder)
    tensors = half_llama()
    tensors["decoder.layers.mlp.linear_fc2.weight"][1, 2, 3] = float("nan")
    write_checkpoint(folder, tensors, arguments=ARGUMENTS)


FC2 = "decoder.layers.mlp.linear_fc2.weight"


def edit(folder: Path, change: Callable[[Any, Any], Any]) -> None:
    """Change the metadata, given it and what it says of one tensor."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata, metadata.state_dict_metadata[FC2])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def elsewhere(folder: Path, **changed: Any) -> None:
    """Change where the metadata says that a part of a tensor is."""

    def change(metadata: Any, about: Any) -> None:
        index = MetadataIndex(FC2, about.chunks[0].offsets)
        vars(metadata.storage_data[index]).update(changed)

    edit(folder, change)


def outside(metadata: Any, about: Any) -> None:
    about.chunks[0].sizes = torch.Size((about.size[0] + 1, *about.size[1:]))


def with_argument(folder: Path, **changed: Any) -> None:
    shutil.rmtree(folder)
    write_checkpoint(folder, half_llama(), arguments=ARGUMENTS | changed)


def in_float8(folder: Path) -> None:
    shutil.rmtree(folder)
    tensors = half_llama()
    name = "decoder.layers.mlp.linear_fc2.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    write_checkpoint(folder, tensors, arguments=ARGUMENTS)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "metadata is cut": (lambda f: cut(f / ".metadata", 900), "not a whole pickle"),
    "metadata is empty": (lambda f: cut(f / ".metadata", 0), "not a whole pickle"),
    "metadata is text": (lambda f: (f / ".metadata").write_text("{}"), "not a whole pickle"),
    "metadata is a list": (
        lambda f: (f / ".metadata").write_bytes(pickle.dumps([1])), "not the metadata"),
    "metadata is missing": (lambda f: (f / ".metadata").unlink(), "has no .metadata"),
    "a key nests deep": (
        lambda f: (f / ".metadata").write_bytes(b"}" + b")" + b"\x85" * 200_000 + b"Ns."),
        "no plain value"),
    "a part is cut": (lambda f: cut(f / "__0_0.distcp", 3000), "__0_0.distcp: is cut off"),
    "a part is missing": (lambda f: (f / "__1_0.distcp").unlink(), "__1_0.distcp: is missing"),
    "a part is a link": (
        lambda f: ((f / "__0_0.distcp").unlink(), (f / "__0_0.distcp").symlink_to("/etc/passwd")),
        "outside of the folder"),
    "a part is a folder": (
        lambda f: ((f / "__0_0.distcp").unlink(), (f / "__0_0.distcp").mkdir()), "it is a folder"),
    "a name leads out": (
        partial(elsewhere, relative_path="../x"), "not a file name without folders"),
    "a part is compressed": (
        partial(elsewhere, transform_descriptors=["zstd"]), "compressed or encrypted"),
    "a place is negative": (partial(elsewhere, offset=-1), "is no number"),
    "a chunk is not listed": (
        partial(edit, change=lambda _, about: about.chunks.pop()),
        "linear_fc2.weight is incomplete"),
    "a chunk lies outside": (partial(edit, change=outside), "lies outside of it"),
    "a name of two lines": (
        partial(edit, change=lambda all, about: all.state_dict_metadata.update({"a\nb": about})),
        "no text of one line"),
    "a name is a number": (
        partial(edit, change=lambda all, about: all.state_dict_metadata.update({5: about})),
        "no text of one line"),
    "another dtype": (
        partial(edit, change=lambda _, about: setattr(
            about.properties, "dtype", torch.float16)), "has the dtype torch.bfloat16"),
    "an argument refers to a variable": (
        partial(with_argument, norm_epsilon="${oc.env:HOME}"), '"norm_epsilon" is no plain value'),
    "an argument has two lines": (
        partial(with_argument, normalization="a\nerror: b"), "is no plain value"),
    "an argument has too many numbers": (
        partial(with_argument, num_layers=10**5000), "it has a number of "),
    "an argument is too long": (
        partial(with_argument, moe_layer_freq=[1] * 20_000), "is no plain value"),
    "a NaN": (not_finite, "NaN or infinite"),
    "8 bits without a scale": (in_float8, "float8_e4m3fn"),
    "zarr": (
        lambda f: change(f / "metadata.json", b"torch_dist", b"zarr      "), "--ckpt-format torch"),
    "another form": (
        lambda f: change(f / "metadata.json", b"torch_dist", b"fsdp_dtens"), '"fsdp_dtens"'),
    "common.pt is missing": (lambda f: (f / "common.pt").unlink(), "--settings FILE"),
    "common.pt is damaged": (lambda f: cut(f / "common.pt", 500), "common.pt: cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_one_error_and_leaves_nothing(
    name: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said = DAMAGES[name]
    damage(llama)
    assert run(llama, tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("\n") == 1, error
    assert not (tmp_path / "new").exists()


def test_a_flipped_byte_of_a_tensor_is_found(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = half_llama()["embedding.word_embeddings.weight"]
    raw = value[0].contiguous().view(torch.uint8).numpy().tobytes()
    change(llama / "__0_0.distcp", raw, raw[:5] + bytes([raw[5] ^ 1]) + raw[6:])
    assert run(llama, tmp_path / "new") == 2
    assert "CRC" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda f: (f / "mp_rank_00").mkdir(), "pickled files of each rank (mp_rank_"),
        (lambda f: (f / "decoder.x").mkdir() or (f / "decoder.x/.zarray").touch(), '"zarr"'),
    ],
)
def test_other_forms_of_checkpoints_are_named(
    made: Callable[[Path], Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "theirs/iter_0000007"
    home.mkdir(parents=True)
    made(home)
    (tmp_path / "theirs/latest_checkpointed_iteration.txt").write_text("7")
    assert run(tmp_path / "theirs", tmp_path / "new") == 2
    error = capsys.readouterr().err
    assert said in error and "--ckpt-format torch_dist" in error, error


def test_mistakes_of_the_command_are_named(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "x.nemo").write_bytes(gzip.compress(b"x"))
    (tmp_path / "x.sh").write_text("echo")
    (tmp_path / "x.yaml").write_text("a: [")
    for words, said in {
        (llama, tmp_path / "full"): "is not empty",
        (llama, tmp_path / "new", "--settings", tmp_path / "none.yaml"): "none.yaml",
        (llama, tmp_path / "new", "--settings", tmp_path / "x.sh"): "starts no program",
        (llama, tmp_path / "new", "--settings", tmp_path / "x.yaml"): "is not YAML",
        (tmp_path / "x.nemo", tmp_path / "new"): "tar -xf",
        (tmp_path / "model", tmp_path / "new", "--settings", "x"): "has no effect",
    }.items():
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error


def test_random_damage_of_a_pickle_is_refused(llama: Path) -> None:
    """A byte that was changed is read as another value, or refused; nothing else happens."""
    content, draw = (llama / ".metadata").read_bytes(), random.Random(5)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            read_pickle(bytes(damaged))
        except ForeignFileError:
            refused += 1
    assert refused > 50


def test_the_tables_read_what_torch_reads() -> None:
    """Values of each kind are those that torch.load returns, with views and several storages."""
    base = torch.arange(24.0)
    tensors = [base.view(4, 6)[1:3, 2:].t(), torch.tensor(2, dtype=torch.int64),
               torch.ones(3, dtype=torch.float8_e5m2), torch.zeros(0, 3),
               base.half()[3:5]]  # fmt: skip
    value = {"t": tensors, "n": [1, -2, 2**70, 0.5, True, None, b"ab", "ü", (1, (2,)), {3}]}
    content = io.BytesIO(saved(value))
    read = read_saved(content)
    expected = torch.load(io.BytesIO(saved(value)), weights_only=False)
    assert read.value["n"] == expected["n"]
    for one, other in zip(read.value["t"], expected["t"], strict=True):
        assert torch.equal(read.tensor(one).float(), other.float())


# ---- Megatron-core itself


L: dict[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu",
    "num_query_groups": 2, "add_bias_linear": False,
}  # fmt: skip
M: dict[str, Any] = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": 32, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "qk_layernorm": True,
}  # fmt: skip
DIST = {"bf16": True, "optimizer": "fully_reshardable"}
IN_PARAM = {"others": "optimizer.state.param.", "experts": "optimizer.state.param."}
IN_FP32 = {name: "optimizer.state.fp32_param." for name in IN_PARAM}
CHAINED = {"others": "chained_0.optimizer.state.param.",
           "experts": "chained_1.optimizer.state.param."}  # fmt: skip
ON_TWO: dict[str, dict[str, Any]] = {
    "tensor parallel": {"config": L, "tp": 2, "masters": IN_PARAM, **DIST},
    "stages": {"config": L, "pp": 2, "bf16": True, "optimizer": "", "tied": True,
               "masters": IN_FP32},
    "expert parallel": {"config": L | M | {"moe_grouped_gemm": True}, "ep": 2,
                        "masters": CHAINED, **DIST},
}  # fmt: skip
"""Models that two ranks write."""
ON_ONE: dict[str, dict[str, Any]] = {
    "gpt": {"config": {}, "positions": "learned_absolute", "tied": True},
    "zero-centered": {"config": {"layernorm_zero_centered_gamma": True, "qk_layernorm": True,
                                 "kv_channels": 32}},
    "local layers": {"config": L, "local": True},
    "each layer and half apart": {"config": L | M | {"moe_layer_freq": [0, 1]},
                                  "metadata": {"singleton_local_shards": True}},
    "buckets": {"config": L, "bf16": True, "optimizer": "dp_reshardable"},
    "routed": {"config": L | M | ROUTED, "optimizer": ""},
    "weights in FP8": {"config": L | {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param": True},
                       "bf16": True, "own": True},
}  # fmt: skip
MEGATRONS = ON_TWO | ON_ONE
FP32 = 24 * 128 * 2.0**-24
"""Bound of logits over their largest: sums of up to 128 terms in other orders, 24 of which follow
each other in two layers with norms, each within 128 * 2^-24 of its size."""


def arguments_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """Return Megatron-LM's arguments of a model that the program makes of its configuration."""
    config = dict(case["config"])
    is_gated = config.pop("gated_linear_unit", False)
    config.pop("activation_func", None)
    names = {
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
        "num_moe_experts": "num_experts",
    }
    return {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4,
        "max_position_embeddings": 32, "normalization": "LayerNorm", "norm_epsilon": 1e-5,
        "swiglu": is_gated, "openai_gelu": False, "bias_gelu_fusion": False,
        "position_embedding_type": case.get("positions", "rope"), "rotary_base": 10000,
        "group_query_attention": "num_query_groups" in config,
        "untie_embeddings_and_output_weights": not case.get("tied", False),
    } | {names.get(name, name): value for name, value in config.items()}  # fmt: skip


OLDER: dict[str, set[str]] = {
    "0.12.3": {"buckets"}, "0.13.1": {"buckets"}, "0.14.0": {"buckets"}, "0.15.3": set()
}  # fmt: skip
"""Versions of Megatron-core beside the one that is installed, with what each cannot save here."""
NEWEST = "0.19.2"
"""It needs Python 3.12, for which torch and what the program imports are fetched: 5 GB, or less
if PIP_EXTRA_INDEX_URL names an index with CPU builds."""
NEEDED = (f"torch=={torch.__version__.partition('+')[0]}", "einops", "psutil", "pydantic",
          "pyyaml", "safetensors")  # fmt: skip


def let_megatron_write(
    folder: Path, cases: Mapping[str, dict[str, Any]], ranks: int = 1, version: str = ""
) -> None:
    """Let Megatron-core write checkpoints, and read those that are there; a test may be skipped."""
    pytest.importorskip("megatron.core", reason="needs the package megatron-core")
    from te_cpu.versions import DEFAULT_VERSION

    need_sources(DEFAULT_VERSION)
    told = {name: case | {"arguments": arguments_of(case)} for name, case in cases.items()}
    python, paths = another_megatron(version) if version else (sys.executable, [])
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "te_cpu", "run"]
    command += [str(Path(__file__).with_name("megatron_writer.py")), str(folder)]
    paths += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [*command, json.dumps(told)], capture_output=True, text=True,
        env=PYENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]


PYENV = os.environ | {"PYENV_VERSION": "3.12"}  # else pyenv's `python3.12` may not run


def another_megatron(version: str) -> tuple[str, list[str]]:
    """Return a Python and a folder with another version, fetched once; else the test is skipped."""
    is_newest = version == NEWEST and sys.version_info < (3, 12)
    python = (shutil.which("python3.12") or "") if is_newest else sys.executable
    if not python:
        pytest.skip(f"megatron-core {version} needs python3.12, which is not on the PATH")
    folder = cache_folder() / "megatron-core" / version
    if not folder.is_dir():
        with built_beside(folder) as made:
            pip = [python, "-m", "pip", "install", "--target", str(made)]
            pip += [f"megatron-core=={version}", *(NEEDED if is_newest else ["--no-deps"])]
            done = subprocess.run(pip, capture_output=True, text=True, env=PYENV)
            if done.returncode:
                pytest.skip(f"megatron-core {version}: {done.stderr[-300:]}")
    return python, [str(folder)]


@pytest.fixture(scope="module", params=["", *OLDER, NEWEST])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints that Megatron-core wrote on two ranks and on one."""
    folder = tmp_path_factory.mktemp("megatron")
    without = OLDER.get(request.param, set())
    let_megatron_write(folder, ON_TWO, 2, request.param)
    cases = {name: case for name, case in MEGATRONS.items() if name not in without}
    let_megatron_write(folder, cases, version=request.param)
    for name in without:
        (folder / f"not {name}").touch()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MEGATRONS)
def test_the_model_is_that_of_megatron_core(
    name: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits are those of Megatron-core's own model that its own reader has loaded.

    Where the optimizer has master weights, Megatron's model gets those too.
    """
    case, new = MEGATRONS[name], tmp_path / "new"
    if (written / f"not {name}").exists():
        pytest.skip("this version of Megatron-core cannot save it on a CPU")
    assert run(written / name, new) == 0
    said = capsys.readouterr().out
    assert ("read: " in said) and (" 0 of them" in said) is ("masters" not in case), said
    reader = imported(new)
    model = load_model(reader, torch.float32, torch.device("cpu"))
    theirs = load_file(f"{written / name}.safetensors")
    if case.get("own"):
        spec = shape_of(reader)
        ours = {n: reader.read_values(f"model/{n}") for n in logical_shapes(spec)}
        found = in_megatron(spec, ours)
        assert found.keys() == theirs.keys()
        for key, value in theirs.items():
            step = 2.0**-8 if value.dim() > 1 else 0.0  # Megatron rounds what FP8 holds to BF16
            assert ((found[key] - value).abs() <= step * value.abs()).all(), key
        return
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        logits = model.forward_stage(tokens, None, None)
    expected = theirs["logits"]
    assert logits.shape == expected.shape and expected.std() > 0.5
    assert (logits - expected).abs().max() <= FP32 * expected.abs().max()


NESTED = b"(ccollections\nOrderedDict\n](" + b")" + b"\x85" * 50_000 + b"N\x86e\x85R."
DOUBLED = b"0cpathlib\nPosixPath\nh\0h\0\x86Rq\0"
COPIED = b"0cbuiltins\nset\nh\1\x85R"
ALIKE = b"".join(b"\x8a\x09" + (n * (2**61 - 1)).to_bytes(9, "little") + b"N" for n in range(1, 9))
SMALL: dict[str, tuple[bytes, str]] = {
    "nested tuples": (NESTED, "items before it is made"),
    "a doubled path": (
        b"X\xe8\x03\0\0" + b"a" * 1000 + b"q\0" + DOUBLED * 18 + b".", "far more values"),
    "copies of a list": (
        b"](" + b"K\1" * 3000 + b"eq\1" + COPIED * 3000 + b".", "far more values"),
    "a doubled list in a message": (b"](K\1eq\0" + b"0(h\0h\0lq\0" * 60 + b")R.", "it calls"),
    "keys of one hash": (b"}(" + ALIKE + b"u.", "no plain value"),
    "a long key": (b"}((" + b"N" * 3000 + b"tNu.", "no plain value"),
    "a number of 5,000 digits": (pickle.dumps(10**5000), "bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_small_file_is_no_crash_and_takes_no_time_or_memory_without_end(name: str) -> None:
    content, said = SMALL[name]
    with pytest.raises(ForeignFileError, match=said):
        read_pickle(content)


def test_an_archive_whose_list_would_never_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its second file has a size below zero, after which a reader of tar reads the first again."""
    first, second = tarfile.TarInfo("a"), bytearray(tarfile.TarInfo("b").tobuf())
    second[124:136] = b"\xff" * 10 + b"\xfe\0"
    second[148:156] = b"        "
    second[148:156] = b"%06o\0 " % sum(second[:512])
    (tmp_path / "x.nemo").write_bytes(first.tobuf() + bytes(second))
    assert run(tmp_path / "x.nemo", tmp_path / "new") == 2
    assert "no uncompressed tar archive" in capsys.readouterr().err
