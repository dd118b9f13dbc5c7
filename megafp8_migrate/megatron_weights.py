"""Find the tensors of a model of ours in a distributed checkpoint of Megatron's.

Megatron-core stacks the tensors of all layers along a first dimension where all layers are alike,
and those of the experts of a layer too. Queries, keys and values are joined group by group, and the
gate and the other half of a gated MLP one after the other. In this file `theirs` marks names of
Megatron's, and `ours` logical names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from megafp8.checkpoint.huggingface_files import StoredTensor
from megafp8.config.api import MAX_VOCABULARY
from megafp8.errors import CheckpointError
from megafp8.specs import GPTSpec
from megafp8.specs.parameters import HEAD, POSITION, WORD, logical_shapes
from megafp8_migrate.torch_dist import DTYPES, DistCheckpoint

_EMBEDDING = "embedding.word_embeddings.weight"
_WHOLE = {
    WORD: _EMBEDDING,
    POSITION: "embedding.position_embeddings.weight",
    HEAD: "output_layer.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
}
_OF_LAYERS = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "attention.projection": ("self_attention.linear_proj.",),
    "attention.query_norm": ("self_attention.q_layernorm.",),
    "attention.key_norm": ("self_attention.k_layernorm.",),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "mlp.fc2": ("mlp.linear_fc2.",),
    "mlp.shared.fc2": ("mlp.shared_experts.linear_fc2.",),
    "mlp.router": ("mlp.router.",),
}
"""Tensors of a layer, by our names, with their names up to the last word, `weight` or `bias`."""
_QKV = {"attention.query": 0, "attention.key": 1, "attention.value": 2}
_FC1 = {
    "mlp": "mlp.linear_fc1.",
    "mlp.shared": "mlp.shared_experts.linear_fc1.",
    "mlp.experts": "mlp.experts.experts.linear_fc1.",
}
_HALVES = {"gate": "_w", "up": "_v"}
"""The halves of a gated MLP, with the ends of their names where each has a tensor of its own."""
_MASTER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_PREFIXES = ("", "model.", "module.", "model.module.")
"""What stands before names: nothing in Megatron's files, a word in those of NeMo."""


class _Place(NamedTuple):
    """Say where a logical tensor is: in which tensor, at which place, and which part of it.

    `lead` are the numbers of a layer and an expert in a stacked tensor. `rows` are the first row
    and the number of all rows of the tensor's own first dimension. `part` is what of the joined
    queries, keys and values is meant, if it is one of them.
    """

    theirs: str
    lead: tuple[int, ...]
    first_row: int
    shape: tuple[int, ...]
    part: int | None = None


@dataclass
class Found:
    """Hold what was found of a model.

    Attributes:
        tensors: All its tensors.
        num_masters: How many are read from the optimizer's master weights.
        left: Names of what is in the checkpoint and was not read.
        has_buckets: Whether the optimizer's tensors are joined in an order that no file has.
    """

    tensors: list[StoredTensor] = field(default_factory=list)
    num_masters: int = 0
    left: list[str] = field(default_factory=list)
    has_buckets: bool = False


def vocabulary_of(checkpoint: DistCheckpoint) -> int:
    """Return the rows of the embedding.

    Raises:
        CheckpointError: There is none: it is no model, or one of another kind.
    """
    rows = checkpoint.tensors[prefix_of(checkpoint) + _EMBEDDING].shape[:1]
    if not rows or not 0 < rows[0] <= MAX_VOCABULARY:
        raise _misfit(checkpoint, f"has {_EMBEDDING} of {rows} rows")
    return rows[0]


def prefix_of(checkpoint: DistCheckpoint) -> str:
    """Return what stands before all names; `CheckpointError` says that it is no GPT."""
    for prefix in _PREFIXES:
        if prefix + _EMBEDDING in checkpoint.tensors:
            return prefix
    some = next(iter(checkpoint.tensors), "no tensor")
    raise CheckpointError(
        checkpoint.files.shown(""), f"has no {_EMBEDDING}, and begins with {some}",
        "Give a checkpoint of a GPT of Megatron-core",
    )  # fmt: skip


def find_tensors(spec: GPTSpec, checkpoint: DistCheckpoint) -> Found:
    """Return where the tensors of a model are; none is read yet.

    Names, shapes and dtypes of all tensors have been checked. A tensor of which the optimizer has
    master weights in FP32 is read from those.

    Raises:
        CheckpointError: The tensors are not those that `spec` has.
    """
    prefix = prefix_of(checkpoint)
    masters = {match[1]: name for name in checkpoint.tensors if (match := _MASTER.fullmatch(name))}
    found, used = Found(), set[str]()
    search = _Search(spec, checkpoint, prefix)
    for name, shape in _shapes(spec).items():
        place = search.place(name, shape)
        used.add(place.theirs)
        master = masters.get(place.theirs)
        if master is not None:
            search.check(place, master)
            place = place._replace(theirs=master)
            found.num_masters += 1
        read = partial(_read, spec, checkpoint, place)
        found.tensors.append(StoredTensor(name, shape, read))
    rest = [name for name in checkpoint.tensors if name not in used]
    others = [name for name in rest if not _OPTIMIZER.match(name)]
    tied = prefix + _WHOLE[HEAD]
    if spec.share_embeddings_and_output_weights and tied in others:
        raise _misfit(checkpoint, f"has {tied}, and the model's head is its embedding")
    if others:
        named = f"{others[0]} ({len(others)} such tensors)" if len(others) > 1 else others[0]
        raise _misfit(checkpoint, f"has {named}, which a model of these settings does not have")
    found.has_buckets = any("bucket_idx_" in name for name in rest)
    found.left = [name for name in rest if name not in masters.values()] + sorted(
        checkpoint.objects
    )
    return found


def _misfit(checkpoint: DistCheckpoint, reason: str) -> CheckpointError:
    """Return the error of a checkpoint whose tensors are not those of its settings."""
    hint = "Give `megafp8 import` --settings FILE: the launch script or the YAML of the model's run"
    return CheckpointError(checkpoint.files.shown(""), reason, hint)


def _shapes(spec: GPTSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by our names, and of routers' biases, no parameters here."""
    shapes = {name: tuple(shape) for name, shape in logical_shapes(spec).items()}
    if spec.moe is not None and spec.moe.has_expert_bias:
        for layer, has_experts in enumerate(spec.moe.layers):
            if has_experts:
                shapes[f"layers.{layer}.mlp.router.bias"] = (spec.moe.num_experts,)
    return shapes


@dataclass
class _Search:
    """Find the place of each logical tensor."""

    spec: GPTSpec
    checkpoint: DistCheckpoint
    prefix: str

    def place(self, ours: str, shape: tuple[int, ...]) -> _Place:
        """Return the first place that there is among those where a tensor may be."""
        candidates = list(self._candidates(ours, shape))
        for place in candidates:
            if place.theirs in self.checkpoint.tensors:
                self.check(place, place.theirs)
                return place
        lacking = candidates[0].theirs
        raise _misfit(self.checkpoint, f"lacks {lacking}, which a model of these settings has")

    def _candidates(self, ours: str, shape: tuple[int, ...]) -> Iterator[_Place]:
        """Yield the places where a tensor may be: layers and experts are joined in some files."""
        if ours in _WHOLE:
            yield _Place(self.prefix + _WHOLE[ours], (), 0, shape)
            return
        _, number, rest = ours.split(".", 2)
        module, _, end = rest.rpartition(".")
        expert = None
        if (match := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", module)) is not None:
            expert, module = int(match[1]), f"mlp.experts.{match[2]}"
        for theirs, first_row, part in self._modules(module, end, shape):
            layers = self.prefix + "decoder.layers."
            lead = () if expert is None else (expert,)
            yield _Place(f"{layers}{theirs}", (int(number), *lead), first_row, shape, part)
            yield _Place(f"{layers}{number}.{theirs}", lead, first_row, shape, part)
            if expert is not None:
                alone = theirs.replace("experts.experts.", f"experts.experts.{expert}.")
                yield _Place(f"{layers}{number}.{alone}", (), first_row, shape, part)

    def _modules(
        self, module: str, end: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, int, int | None]]:
        """Yield names within a layer, each with the first row and the part of QKV."""
        if module in _QKV:
            yield f"self_attention.linear_qkv.{end}", 0, _QKV[module]
            return
        home, _, last = module.rpartition(".")
        if home in _FC1 and last in ("gate", "up", "fc1"):
            yield f"{_FC1[home]}{end}", shape[0] * (last == "up"), None
            if last in _HALVES:
                yield f"{_FC1[home]}{end}{_HALVES[last]}", 0, None
        elif module == "mlp.experts.fc2":
            yield f"mlp.experts.experts.linear_fc2.{end}", 0, None
        else:
            end = "expert_bias" if (module, end) == ("mlp.router", "bias") else end
            for begin in _OF_LAYERS[module]:
                yield f"{begin}{end}", 0, None

    def check(self, place: _Place, theirs: str) -> None:
        """Raise `CheckpointError` if a tensor has another shape or dtype than it must."""
        stored = self.checkpoint.tensors[theirs]
        if stored.dtype not in DTYPES:
            reason = f"{theirs} has the dtype {stored.dtype}, for whose scales there is no place"
            hint = "Save the model in BF16 or FP32, as Megatron does with its own FP8 weights"
            raise CheckpointError(self.checkpoint.files.shown(""), reason, hint)
        whole, lead = self._whole(place), place.lead
        stacked = stored.shape[: len(lead)]
        fits = len(stored.shape) == len(lead) + len(whole) and stored.shape[len(lead) :] == whole
        counts = self._counts(lead, place)
        if not fits or stacked != counts:
            reason = f"{theirs} has shape {stored.shape}; the settings ask for {counts + whole}"
            raise _misfit(self.checkpoint, reason)
        self.checkpoint.check(theirs)

    def _counts(self, lead: tuple[int, ...], place: _Place) -> tuple[int, ...]:
        experts = (self.spec.moe.num_experts,) if self.spec.moe is not None else ()
        of_layer = re.search(r"decoder\.layers\.\d", place.theirs) is not None
        return ((self.spec.num_layers, *experts) if not of_layer else experts)[: len(lead)]

    def _whole(self, place: _Place) -> tuple[int, ...]:
        """Return the shape of all rows of the tensor of which a place is a part."""
        rows, *rest = place.shape
        if place.part is not None:
            rows = self.spec.query_size + 2 * self.spec.kv_size
        elif (
            self.spec.is_gated
            and "linear_fc1." in place.theirs
            and place.theirs.endswith(("fc1.weight", "fc1.bias"))
        ):
            rows *= 2
        return (rows, *rest)


def _read(spec: GPTSpec, checkpoint: DistCheckpoint, place: _Place) -> torch.Tensor:
    """Return a logical tensor in FP32."""
    lead, shape = place.lead, place.shape
    ones, zeros = (1,) * len(lead), (0,) * (len(shape) - 1)
    if place.part is None:
        at = (*lead, place.first_row, *zeros)
        return checkpoint.read(place.theirs, at, (*ones, *shape)).view(shape)
    groups, width = spec.num_kv_heads, spec.head_size
    heads = spec.num_attention_heads // groups
    rows = groups * (heads + 2) * width
    joined = checkpoint.read(place.theirs, (*lead, 0, *zeros), (*ones, rows, *shape[1:]))
    by_group = joined.view(groups, (heads + 2) * width, *shape[1:])
    begin = (0, heads * width, (heads + 1) * width)[place.part]
    count = math.prod(shape[:1]) // groups
    return by_group[:, begin : begin + count].reshape(shape)
