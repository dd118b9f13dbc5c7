"""Damage good files of every kind that others write, and read them as a user's command does."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file, save_file

from megafp8.checkpoint.huggingface import mapping
from megafp8.checkpoint.huggingface_files import write_folder
from megafp8.checkpoint.manifest import Manifest, check_state, read_manifest, write_manifest
from megafp8.cli import commands, report, runs
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.data.dataset import load_sidecar, recorded_vocab_size
from megafp8.data.indexed import IndexedDataset, write_index
from megafp8.data.library_tokenizers import load_tiktoken
from megafp8.data.tokenize import byte_tokenizer, load_json
from megafp8.specs.parameters import logical_shapes
from megafp8.train.huggingface import import_model
from tests.foreign.fuzz import Tally, attempt
from tests.foreign.made import make_model
from tests.foreign.test_checkpoint_meta import GOOD
from tests.foreign.test_tokenizers import BYTES, SIDECAR
from tests.report.made import make_run
from tests.tiny import gpt_spec

NAN, INF = float("nan"), float("inf")
LEAVES: list[Any] = [NAN, INF, -INF, -1, 0, 2.7, 10**30, 2**63, "false", "", "x" * 5000, "\ud800"]
LEAVES += [None, True, False, [], {}, [[[]]], {"a": {"b": []}}, "../../x", "a\x00b", -5, 1e308]
LARGEST = 2**53
TAIL = b"\x00\xff{}[]\"'\\&*:\n"


@dataclass(frozen=True)
class Kind:
    """Describe one kind of files.

    Attributes:
        make: Writes a good folder.
        read: Reads the folder as a command does; returns what is absurd in the result, or None.
        trees: The files that are JSON, of which single values are replaced.
        raw: The files of which bytes are changed, or that become something else than a file.
    """

    make: Callable[[Path], object]
    read: Callable[[Path], str | None]
    trees: tuple[str, ...]
    raw: tuple[str, ...] = ()


def try_files(tally: Tally, count: int, random: Random, folder: Path) -> None:
    """Try `count` damaged files, kind after kind, in `folder`; count how each one ends."""
    names = list(KINDS)
    for name in names:
        KINDS[name].make(folder / "good" / name)
    for number in range(count):
        name = names[number % len(names)]
        case = folder / f"case{number}"
        shutil.copytree(folder / "good" / name, case / name, symlinks=True)
        what = _damage(case / name, KINDS[name], random)
        attempt(tally, name, what, lambda name=name, case=case: KINDS[name].read(case / name))
        shutil.rmtree(case, ignore_errors=True)


# --- damage ---------------------------------------------------------------------------------------


def _damage(folder: Path, kind: Kind, random: Random) -> str:
    """Damage one file in one way, and return what was done."""
    if kind.trees and random.random() < 0.6:
        path = folder / random.choice(kind.trees)
        return f"{path.name}: {_change_tree(path, random)}"
    path = folder / random.choice((*kind.trees, *kind.raw))
    if random.random() < 0.25:
        return f"{path.name}: {_make_special(path, random)}"
    return f"{path.name}: {_change_bytes(path, random)}"


def _change_tree(path: Path, random: Random) -> str:
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    number = random.randrange(len(lines))
    tree = copy.deepcopy(json.loads(lines[number]))
    *above, last = random.choice(list(_places(tree, ())) or [()]) or [None]
    if last is None:
        tree, what = random.choice(LEAVES), "all"
    else:
        node = tree
        for step in above:
            node = node[step]
        what = f"{'/'.join(map(str, (*above, last)))}"
        if random.random() < 0.1:
            del node[last]
            what += " removed"
        else:
            node[last] = random.choice(LEAVES)
            what += f" = {str(node[last])[:40]!r}"
    lines[number] = json.dumps(tree)
    if random.random() < 0.05:
        lines[number] = lines[number].replace("1", "9" * 5000, 1)
        what += ", with 5,000 digits"
    path.write_text("\n".join(lines) + "\n")
    return what


def _places(tree: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items)[:300]:
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from _places(value, (*above, key))


def _change_bytes(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    how = random.choice(("cut", "flip", "insert", "repeat", "nest", "empty", "letters"))
    at = random.randrange(len(content) + 1)
    match how:
        case "cut":
            del content[at:]
        case "flip":
            for _ in range(random.randint(1, 8)):
                content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        case "insert":
            content[at:at] = random.randbytes(random.randint(1, 20))
        case "repeat":
            content[at:at] = content[at : at + random.randint(1, 200)] * random.randint(1, 50)
        case "nest":
            content[at:at] = random.choice((b"[", b"{", b'{"a":', b"- ", b"&a [*a, ")) * 3000
        case "empty":
            content.clear()
        case _:
            content[at:at] = bytes(random.choices(TAIL, k=random.randint(1, 30)))
    path.write_bytes(content)
    return f"{how} at {at}"


def _make_special(path: Path, random: Random) -> str:
    path.unlink()
    how = random.choice(("FIFO", "device", "link", "circle", "folder", "missing"))
    match how:
        case "FIFO":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "link":
            path.symlink_to("/etc/passwd")
        case "circle":
            path.symlink_to(path.name)
        case "folder":
            path.mkdir()
    return how


# --- kinds ----------------------------------------------------------------------------------------


def _make_indexed_model(folder: Path) -> None:
    make_model(folder)
    tensors = load_file(folder / "model.safetensors")
    parts = {"a.safetensors": list(tensors)[:5], "b.safetensors": list(tensors)[5:]}
    for name, names in parts.items():
        save_file({key: tensors[key] for key in names}, folder / name)
    (folder / "model.safetensors").unlink()
    where = {key: name for name, names in parts.items() for key in names}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _make_qwen(folder: Path) -> None:
    """Write a model with windows, a head that the tied model has twice, and both old sections."""
    spec = gpt_spec(
        normalization="rmsnorm", activation="swiglu", position_embedding_type="rope", bias=False,
        qk_layernorm=True, window_size=(3, 0), window_attn_skip_freq=2, layernorm_epsilon=1e-6,
        seq_len_interpolation_factor=2.0,
    )  # fmt: skip
    names = [name for entry in mapping(spec) for name in entry.ours]
    own = {name: torch.full(logical_shapes(spec)[name], 0.01) for name in names}
    write_folder(folder, spec, own.__getitem__, dtype=torch.float32, eod_id=3)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, folder / "model.safetensors")


def _read_model(folder: Path) -> str | None:
    target = folder.parent / "imported"
    import_model(folder, target)
    model = yaml.safe_load((target / "model.yaml").read_text())["model"]
    for key, value in model.items():
        wrong = isinstance(value, float) and not 0 <= value <= 1e9
        wrong |= type(value) is int and not 0 < value <= LARGEST
        if wrong or value != value:
            return f"{key} = {value}"
    for path in (target / "checkpoints").rglob("*.safetensors"):
        for name, tensor in load_file(path).items():
            if not bool(torch.isfinite(tensor).all()):
                return f"{name} is not finite"
    secret = Path("/etc/passwd").read_bytes()
    if any(path.is_file() and secret in path.read_bytes() for path in target.rglob("*")):
        return "a copy of a private file"
    return None


def _make_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    byte_tokenizer().save(folder / "tokenizer.json")


def _read_tokenizer(folder: Path) -> str | None:
    size = load_json(folder / "tokenizer.json").vocab_size
    return None if 0 < size <= 2**24 + 1 else f"a vocabulary of {size}"


def _make_tiktoken(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "x.tiktoken").write_text("".join(f"{token} {rank}\n" for token, rank in BYTES))


def _read_tiktoken(folder: Path) -> str | None:
    size = load_tiktoken(folder / "x.tiktoken").vocab_size
    return None if 0 < size <= 2**24 + 2 else f"a vocabulary of {size}"


def _make_description(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps(SIDECAR))


def _read_description(folder: Path) -> str | None:
    size = recorded_vocab_size(folder / "d")
    if size is not None and not 0 < size <= 2**24:
        return f"vocab_size {size}"
    found = load_sidecar(folder / "dataset.json")
    counts = (found.num_documents, found.num_tokens, found.num_bytes)
    return None if all(type(n) is int and n >= 0 for n in counts) else f"counts {counts}"


def _make_meta(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps(GOOD))


def _read_meta(folder: Path) -> str | None:
    """Write the damaged scalars into a manifest of a right hash, and read that."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None  # no manifest can hold it
    folder.joinpath("step").mkdir()
    try:
        write_manifest(folder / "step", Manifest(step=1, meta=meta, shards=()))
    except (ValueError, UnicodeEncodeError):  # NaN, which no manifest holds
        return None
    found = read_manifest(folder / "step").meta
    check_state(found, folder)
    counts = [found[key] for key in ("consumed_samples", "num_updates", "num_skipped")]
    return None if all(type(n) is int and 0 <= n <= LARGEST for n in counts) else f"{counts}"


def _make_run(folder: Path) -> None:
    make_run(folder)
    (folder / "sweep.json").write_text("[]")


def _read_run(folder: Path) -> str | None:
    codes = (runs.main([str(folder)]), report.main([str(folder)]))
    return None if codes == (0, 0) else f"exit codes {codes} for a folder with a run"


def _make_sweep(folder: Path) -> None:
    make_run(folder / "0")
    result = {"job": 0, "overrides": ["a=1"], "directory": "0", "code": 0, "outcome": "finished"}
    result |= {"val_loss": 1.5, "train_loss": None, "tokens_per_second": 9.0, "wall_seconds": 1.0}
    (folder / "sweep.json").write_text(json.dumps([result | {"problem": None, "began": True}]))


def _make_yaml(folder: Path) -> None:
    folder.mkdir(parents=True)
    tree = {"defaults": ["pretrain_gpt", "_self_"], "model": {"num_layers": 2, "fp8": True}}
    tree |= {"trainer": {"max_steps": 3}}
    (folder / "own.yaml").write_text(json.dumps(tree))  # JSON is YAML, too


def _read_yaml(folder: Path) -> str | None:
    tree = load(config_dir=folder, config_name="own")
    resolve(tree, lambda: False)
    layers = tree["model.num_layers"]
    return None if type(layers) is int and 0 < layers <= LARGEST else f"num_layers {layers}"


def _make_nemos(folder: Path) -> None:
    folder.mkdir(parents=True)
    model = {"num_layers": 2, "hidden_size": 64, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}}
    tree = {"name": "x", "trainer": {"devices": 1, "max_steps": 3}, "model": model}
    (folder / "nemo.yaml").write_text(json.dumps(tree))


def _read_nemos(folder: Path) -> str | None:
    code = commands.main(["migrate", str(folder / "nemo.yaml")])
    return None if code in (0, 2) else f"exit code {code}"


def _make_indexed(folder: Path) -> None:
    folder.mkdir(parents=True)
    np.arange(40, dtype=np.uint16).tofile(folder / "d.bin")
    write_index(folder / "d.idx", np.dtype(np.uint16), np.full(4, 10, np.int32), np.arange(5))


def _read_indexed(folder: Path) -> str | None:
    data = IndexedDataset(folder / "d")
    return None if data.num_tokens < LARGEST else f"{data.num_tokens} tokens"


KINDS = {
    "model": Kind(
        make_model,
        _read_model,
        ("config.json", "tokenizer.json", "tokenizer_config.json"),
        ("model.safetensors",),
    ),
    "model of today": Kind(
        _make_qwen,
        _read_model,
        ("config.json", "generation_config.json"),
        ("model.safetensors",),
    ),
    "model with an index": Kind(
        _make_indexed_model,
        _read_model,
        ("config.json", "model.safetensors.index.json"),
        ("a.safetensors", "b.safetensors"),
    ),
    "tokenizer.json": Kind(_make_tokenizer, _read_tokenizer, ("tokenizer.json",)),
    "tiktoken": Kind(_make_tiktoken, _read_tiktoken, (), ("x.tiktoken",)),
    "dataset.json": Kind(_make_description, _read_description, ("dataset.json",)),
    "indexed dataset": Kind(_make_indexed, _read_indexed, (), ("d.idx", "d.bin")),
    "manifest's meta": Kind(_make_meta, _read_meta, ("meta.json",)),
    "run": Kind(
        _make_run,
        _read_run,
        (
            "run.json",
            "summary.json",
            "metrics.jsonl",
            "health.jsonl",
            "events.jsonl",
            "samples.jsonl",
        ),
        ("config.yaml", "console.log"),
    ),
    "sweep": Kind(_make_sweep, _read_run, ("sweep.json",)),
    "YAML": Kind(_make_yaml, _read_yaml, ("own.yaml",)),
    "NeMo's YAML": Kind(_make_nemos, _read_nemos, ("nemo.yaml",)),
}
