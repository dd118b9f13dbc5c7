"""An import holds one part of the checkpoint in memory, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8.checkpoint import huggingface as hf
from megafp8.checkpoint import huggingface_files
from megafp8.checkpoint.reader import Reader
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import logical_shapes
from megafp8.train import huggingface
from megafp8.train.huggingface import import_model
from megafp8.train.live_bytes import LiveBytes

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
SHARD, READ = 300_000, 20_000
GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "vocab_size": 512,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 640,
    "max_position_embeddings": 64,
}  # fmt: skip


def spec_of(config: dict[str, object]) -> GPTSpec:
    return hf.from_config(config, Path("config.json"))


def made_model(folder: Path, spec: GPTSpec, dtype: torch.dtype, file_bytes: int) -> dict[str, int]:
    """Write a model of random weights in several files; return the bytes of each tensor in FP32."""
    drawn = torch.Generator().manual_seed(3)

    def draw(name: str) -> torch.Tensor:
        return torch.rand(logical_shapes(spec)[name], generator=drawn)

    huggingface_files.write_folder(
        folder, spec, draw, dtype=dtype, eod_id=3, max_file_bytes=file_bytes
    )
    assert len(list(folder.glob("*.safetensors"))) > 2
    names = [name for entry in hf.mapping(spec) for name in entry.ours]
    return {name: hf_bytes(spec, name) for name in names}


def hf_bytes(spec: GPTSpec, name: str) -> int:
    return torch.Size(logical_shapes(spec)[name]).numel() * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [QWEN3, GPT2], ids=["qwen3", "gpt2"])
def test_live_tensors_are_one_part_and_a_few_rows(
    config: dict[str, object], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored tensor that is mapped counts as a whole, though its rows are read one by one.

    Some rows exist in the mask of what is finite too, and as stored or transposed.
    """
    spec = spec_of(config)
    sizes = made_model(tmp_path / "theirs", spec, dtype, 100_000)
    monkeypatch.setattr(huggingface, "SHARD_BYTES", SHARD)
    monkeypatch.setattr(huggingface_files, "_READ_BYTES", READ)
    with LiveBytes() as live:
        live.begin()
        imported = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert max(sizes.values()) < SHARD < sum(sizes.values()) / 2
    theirs = [load_file(path) for path in (tmp_path / "theirs").glob("*.safetensors")]
    stored = {name: tensor for file in theirs for name, tensor in file.items()}
    mapped = max(tensor.nbytes for tensor in stored.values())
    assert SHARD / 2 < live.most <= SHARD + mapped + 4 * READ
    files = [load_file(path) for path in sorted(imported.checkpoint.glob("*.safetensors"))]
    assert all(sum(t.nbytes for t in file.values()) <= SHARD for file in files)
    reader = Reader(imported.checkpoint)
    stored = {
        k: v for p in (tmp_path / "theirs").glob("*.safetensors") for k, v in load_file(p).items()
    }
    for entry in hf.mapping(spec):
        back = hf.to_theirs(entry, lambda name: reader.read(f"model/{name}"))
        assert torch.equal(back, stored[entry.theirs].float()), entry.theirs


def test_a_tensor_larger_than_a_part_is_a_part_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(QWEN3)
    sizes = made_model(tmp_path / "theirs", spec, torch.bfloat16, 100_000)
    largest = max(sizes.values())
    monkeypatch.setattr(huggingface, "SHARD_BYTES", largest // 4)
    monkeypatch.setattr(huggingface_files, "_READ_BYTES", READ)
    with LiveBytes() as live:
        live.begin()
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert largest <= live.most <= largest + largest // 2 + 4 * READ


PROGRAM = """
import json, sys
from pathlib import Path
from megafp8.train import huggingface
from megafp8.train.huggingface import import_model

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

small, large, out, shard = sys.argv[1:]
import_model(Path(small), Path(out) / "small")  # loads what an import needs
huggingface.SHARD_BYTES = int(shard)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = status("VmRSS:")
import_model(Path(large), Path(out) / "large")
print(json.dumps(status("VmHWM:") - before))
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc to reset a peak"
)
def test_a_process_grows_by_one_part_and_one_tensor(tmp_path: Path) -> None:
    """The resident memory of a process that imports a synthetic model of several files.

    Files that are mapped count while a tensor of them is read. 24 MiB are for what is read at a
    time (16 MiB in FP32, with its source and mask) and for the allocator.
    """
    large = QWEN3 | {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 2048}
    spec = spec_of(large)
    sizes = made_model(tmp_path / "large", spec, torch.bfloat16, 16 * MIB)
    made_model(tmp_path / "small", spec_of(QWEN3), torch.bfloat16, 100_000)
    shard, largest = 32 * MIB, max(sizes.values())
    words = [str(tmp_path / name) for name in ("small", "large", "out")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, str(shard)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown = json.loads(done.stdout.splitlines()[-1])
    bound = shard + largest + 24 * MIB
    assert 4 * MIB < grown < bound < 0.6 * sum(sizes.values()), (grown, bound, sum(sizes.values()))
