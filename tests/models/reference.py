"""A GPT of every option, slow and obvious: logical tensors in, FP64 loss out, head by head."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megafp8.specs import GPTSpec, MoESpec

Tensors = Mapping[str, torch.Tensor]
Mask = Callable[[str, float, tuple[int, ...]], torch.Tensor | float]  # site, p, shape -> factors


def no_dropout(site: str, p: float, shape: tuple[int, ...]) -> float:
    return 1.0


def loss_of(
    spec: GPTSpec,
    w: Tensors,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
    documents: torch.Tensor | None = None,
    dropout: Mask = no_dropout,
) -> torch.Tensor:
    """Nats, summed over targets that are not -100."""
    batch, seq = tokens.shape
    if positions is None:
        positions = torch.arange(seq).expand(batch, seq)
    if documents is None:
        documents = torch.zeros(batch, seq)
    x = w["embedding.word.weight"][tokens]
    if spec.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position.weight"][positions]
    x = x * dropout("embedding.dropout", spec.hidden_dropout, tuple(x.shape))

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        out = torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"])
        is_qkv = name.endswith(("attention.query", "attention.key", "attention.value"))
        return out + w[f"{name}.bias"] if spec.bias or (is_qkv and spec.add_qkv_bias) else out

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = w[f"{name}.weight"]
        weight = weight + 1 if spec.layernorm_zero_centered_gamma else weight
        if spec.normalization == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + spec.layernorm_epsilon).sqrt() * weight
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.square().mean(-1, keepdim=True)
        return centered / (variance + spec.layernorm_epsilon).sqrt() * weight + w[f"{name}.bias"]

    is_post = spec.transformer_block_type == "post_ln"
    for i in range(spec.num_layers):
        name = f"layers.{i}"
        h = x if is_post else norm(f"{name}.attention_norm", x)
        q, k, v = (linear(f"{name}.attention.{part}", h) for part in ("query", "key", "value"))
        size, heads = spec.head_size, spec.num_attention_heads
        share = heads // (spec.num_query_groups or heads)
        site = f"{name}.attention.dropout"
        kept = dropout(site, spec.attention_dropout, (batch, heads, seq, seq))
        outs = []
        for head in range(heads):
            group = head // share
            own = slice(head * size, (head + 1) * size)
            shared = slice(group * size, (group + 1) * size)
            queries, keys, values = q[..., own], k[..., shared], v[..., shared]
            if spec.qk_layernorm:
                queries = norm(f"{name}.attention.query_norm", queries)
                keys = norm(f"{name}.attention.key_norm", keys)
            if spec.position_embedding_type == "rope":
                queries, keys = turn(spec, queries, positions), turn(spec, keys, positions)
            scores = queries @ keys.transpose(1, 2) / math.sqrt(size)
            if spec.position_embedding_type == "alibi":
                slope = 2 ** (-8 * (head + 1) / heads)  # for a power of two of heads
                scores = scores - slope * (torch.arange(seq)[:, None] - torch.arange(seq)).abs()
            for b in range(batch):
                for s in range(seq):
                    seen = [t <= s and bool(documents[b, t] == documents[b, s]) for t in range(seq)]
                    if has_window(spec, i):
                        assert spec.window_size is not None
                        seen = [s - t <= spec.window_size[0] and x for t, x in enumerate(seen)]
                    blocked = ~torch.tensor(seen)
                    scores = scores.index_put(
                        (torch.tensor(b), torch.tensor(s), blocked.nonzero().flatten()),
                        torch.tensor(-math.inf, dtype=scores.dtype),
                    )
            weights = scores.softmax(-1)
            weights = weights * (kept if isinstance(kept, float) else kept[:, head])
            outs.append(weights @ values)
        out = linear(f"{name}.attention.projection", torch.cat(outs, -1))
        site = f"{name}.attention.out_dropout"
        x = x + out * dropout(site, spec.hidden_dropout, tuple(out.shape))
        x = norm(f"{name}.attention_norm", x) if is_post else x
        h = x if is_post else norm(f"{name}.mlp_norm", x)
        if spec.moe is not None and spec.moe.layers[i]:
            out = experts(spec, f"{name}.mlp", w, linear, h)
        else:
            inner = mlp(spec, f"{name}.mlp", linear, h)
            inner = inner * dropout(f"{name}.mlp.fc2.dropout", spec.ffn_dropout, tuple(inner.shape))
            out = linear(f"{name}.mlp.fc2", inner)
        x = x + out * dropout(f"{name}.mlp.out_dropout", spec.hidden_dropout, tuple(out.shape))
        x = norm(f"{name}.mlp_norm", x) if is_post else x
    x = x if is_post else norm("final_norm", x)
    tied = spec.share_embeddings_and_output_weights
    logits = x @ w["embedding.word.weight" if tied else "head.weight"].t()
    total = torch.zeros((), dtype=logits.dtype)
    for b in range(batch):
        for s in range(seq):
            if targets[b, s] != -100:
                total = total + logits[b, s].logsumexp(0) - logits[b, s, targets[b, s]]
    return total


def has_window(spec: GPTSpec, layer: int) -> bool:
    """By `is_layer_window_attention` of Megatron-core, which counts layers from 1."""
    if spec.window_size is None or spec.window_attn_skip_freq is None:
        return spec.window_size is not None
    if isinstance(spec.window_attn_skip_freq, int):
        return (layer + 1) % spec.window_attn_skip_freq > 0
    return spec.window_attn_skip_freq[layer] == 1


def mlp(
    spec: GPTSpec, name: str, linear: Callable[[str, torch.Tensor], torch.Tensor], h: torch.Tensor
) -> torch.Tensor:
    """What FC2 reads."""

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2

    def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    if spec.activation in ("geglu", "geglu-tanh", "swiglu", "reglu"):
        gate, up = linear(f"{name}.gate", h), linear(f"{name}.up", h)
        if spec.activation.startswith("geglu"):
            return (gelu(gate) if spec.activation == "geglu" else gelu_tanh(gate)) * up
        return (gate * torch.sigmoid(gate) if spec.activation == "swiglu" else gate.clamp(0)) * up
    inner = linear(f"{name}.fc1", h)
    if spec.activation == "squared-relu":
        return inner.clamp(0) ** 2
    return gelu(inner) if spec.activation == "gelu" else gelu_tanh(inner)


def experts(
    spec: GPTSpec,
    name: str,
    w: Tensors,
    linear: Callable[[str, torch.Tensor], torch.Tensor],
    h: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, one token and one expert at a time."""
    moe = spec.moe
    assert moe is not None
    out = torch.zeros_like(h)
    if moe.shared_ffn_hidden_size is not None:
        out = linear(f"{name}.shared.fc2", mlp(spec, f"{name}.shared", linear, h))
    for b in range(h.shape[0]):
        for s in range(h.shape[1]):
            x = h[b : b + 1, s : s + 1]
            for e, p in weights_of(moe, w[f"{name}.router.weight"] @ x.flatten()).items():
                inner = mlp(spec, f"{name}.experts.{e}", linear, x)
                row = p * linear(f"{name}.experts.{e}.fc2", inner)
                place = (torch.tensor(b), torch.tensor(s))
                out = out.index_put(place, row.flatten(), accumulate=True)
    return out


def weights_of(moe: MoESpec, logits: torch.Tensor, bias: Sequence[float] = ()) -> dict[int, Any]:
    """The experts of a token and their weights, from the definition of each mode."""
    count = len(logits)
    softmax = [x.exp() / logits.exp().sum() for x in logits]
    scores = [1 / (1 + (-x).exp()) for x in logits] if moe.score_function == "sigmoid" else softmax
    ranks = [score.item() + (bias[e] if bias else 0) for e, score in enumerate(scores)]
    chosen = sorted(sorted(range(count), key=lambda e: (-ranks[e], e))[: moe.top_k])
    divides = moe.top_k > 1 if moe.score_function == "sigmoid" else not moe.pre_softmax
    total = sum(scores[e] for e in chosen) if divides else 1.0
    return {e: moe.scaling_factor * scores[e] / total for e in chosen}


def turn(spec: GPTSpec, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE by complex numbers: features i and i + R/2 are one; angles FP32, as is the rule."""
    size = int(spec.head_size * spec.rotary_percentage)
    half = size // 2
    place = positions.float() / (spec.seq_len_interpolation_factor or 1)
    speeds = torch.tensor(
        [speed(spec, i, spec.rotary_base ** (-2 * i / size)) for i in range(half)]
    )
    angles = (place[..., None] * speeds).double()
    length = 1.0
    if spec.yarn_rotary_scaling_factor is not None:
        length = spec.yarn_attention_factor or 0.1 * math.log(spec.yarn_rotary_scaling_factor) + 1
    turned = torch.complex(x[..., :half], x[..., half:size]) * torch.polar(
        length * torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag, x[..., size:]), -1)


def speed(spec: GPTSpec, pair: int, plain: float) -> float:
    """The radians that a pair of features turns from one position to the next."""
    turns = spec.original_max_position_embeddings * plain / (2 * math.pi)
    if spec.scale_positional_embedding:
        low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
        if turns > high:
            return plain
        if turns < low:
            return plain / spec.rope_scaling_factor
        part = (turns - low) / (high - low)
        return part * plain + (1 - part) * plain / spec.rope_scaling_factor
    if spec.yarn_rotary_scaling_factor is None:
        return plain

    def pair_of(times: float) -> float:
        """Where a frequency turns so often: base ** (-2 pair / size) * length = 2 pi times."""
        longest = spec.original_max_position_embeddings / (2 * math.pi * times)
        return spec.rotary_size * math.log(longest, spec.rotary_base) / 2

    first = max(math.floor(pair_of(spec.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_of(spec.yarn_beta_slow)), spec.rotary_size - 1)
    if pair <= first:
        return plain
    if pair >= last:
        return plain / spec.yarn_rotary_scaling_factor
    slower = (pair - first) / (last - first)
    return slower * plain / spec.yarn_rotary_scaling_factor + (1 - slower) * plain
