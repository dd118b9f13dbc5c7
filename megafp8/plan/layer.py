"""Compute what one layer keeps for its backward pass, and what that pass holds at each moment.

The backward pass frees what a part of the layer has kept when it has passed that part. FSDP's bytes
come to these (`plan/fsdp.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megafp8.specs import RunSpec
from megafp8.specs.backends import BACKENDS
from megafp8.specs.layer import num_experts
from megafp8.specs.rank_shape import (
    FP32,
    LayerShape,
    LinearShape,
    compute_itemsize,
    copies_weights,
    layer_shapes,
    microbatch_tokens,
    num_microbatches,
    residual_itemsize,
    sequence_shards,
)
from megafp8.specs.traits import GemmName, Scales

INDEX_BYTES = 8  # of a row's place in the order of experts

# ---- What a layer keeps


def layer_bytes(spec: RunSpec, layer: int, *, keeps_core: bool = True) -> int:
    """Return what one layer keeps between its forward and its backward pass.

    Without `keeps_core` backward recomputes attention.
    """
    return sum(_kept_parts(spec, layer, keeps_core=keeps_core).values())


def norm_bytes(spec: RunSpec) -> int:
    """Return what a norm keeps: its input and FP32 statistics of each token."""
    tokens = microbatch_tokens(spec) // sequence_shards(spec)
    return layer_input_bytes(spec) + tokens * FP32 * _norm_statistics(spec)


def layer_input_bytes(spec: RunSpec) -> int:
    """Return the bytes of the residual stream of one microbatch on one rank."""
    tokens = microbatch_tokens(spec) // sequence_shards(spec)
    return tokens * spec.model.hidden_size * residual_itemsize(spec)


def _kept_parts(spec: RunSpec, layer: int, *, keeps_core: bool) -> dict[str, int]:
    """Return what the parts of a layer keep, by name: norms, linears' inputs, and what is between.

    The projection keeps no input where that is attention's output itself. With sequence parallelism
    it reads the tokens of all sequences of a microbatch in another order, which takes a copy.
    """
    model, shape = spec.model, layer_shapes(spec)[layer]
    tokens, between = microbatch_tokens(spec), microbatch_tokens(spec) // sequence_shards(spec)
    is_copied = sequence_shards(spec) > 1 and spec.train.micro_batch_size > 1
    kept = {
        "attention": _attention_bytes(spec, keeps_core=keeps_core),
        "ffn_dropout": tokens * shape.mlp.read if model.ffn_dropout else 0,
        "router": _routing_bytes(spec, layer),
    }
    for name, branch in (("mlp", shape.mlp), ("experts", shape.experts)):
        activated = branch.written + (branch.read if model.is_gated else 0)  # the gate, too
        kept[name] = tokens * compute_itemsize(spec) * activated
    for name in ("attention", "mlp"):
        kept[f"{name}_norm"] = norm_bytes(spec)
        kept[f"{name}_dropout"] = between * model.hidden_size if model.hidden_dropout else 0
    for linear in shape.linears:
        is_shared = linear.whole.is_column and not linear.whole.is_expert
        kept[linear.names[0]] = _input_bytes(spec, linear, between if is_shared else tokens)
    kept["weighted"] = tokens * compute_itemsize(spec) * shape.experts.read
    for linear in shape.attention.rows:
        if keeps_core and not is_copied and _keeps_input_as_it_is(spec, linear):
            kept[linear.names[0]] = 0
    return kept


def _routing_bytes(spec: RunSpec, layer: int) -> int:
    """Return what the router of a layer keeps, and the weights of its choice; 0 without experts.

    They are its input in FP32, an order and a weight for each row of an expert, the scores of which
    weights are made, and those of each loss, if they are others.
    """
    moe, tokens = spec.model.moe, microbatch_tokens(spec) // sequence_shards(spec)
    if moe is None or not (experts := num_experts(spec.model, layer)):
        return 0
    are_logits = moe.score_function == "softmax" and not moe.pre_softmax
    scores = 1 + (moe.router_loss != "none") + (moe.z_loss_coeff > 0 and not are_logits)
    kept = tokens * (spec.model.hidden_size + scores * experts) * FP32
    orders = 3 + (spec.parallel.ep > 1)  # also that of the rows that other ranks have sent
    return kept + tokens * moe.top_k * (orders * INDEX_BYTES + 2 * FP32)


def _keeps_input_as_it_is(spec: RunSpec, linear: LinearShape) -> bool:
    """Whether a linear keeps its input in the compute dtype."""
    traits = BACKENDS[spec.precision.backend]
    return traits.keeps_inputs or "grad_weight" not in linear.fp8_products


def _input_bytes(spec: RunSpec, linear: LinearShape, tokens: int) -> int:
    """Return the bytes of a linear's input as its weight gradient reads it."""
    tokens = linear.whole.per_token(tokens)
    if _keeps_input_as_it_is(spec, linear):
        return tokens * linear.in_features * compute_itemsize(spec)
    assert linear.traits is not None
    return _operand_bytes(linear.traits.input.first, linear.in_features, tokens)


def _operand_bytes(scales: Scales, rows: int, inner: int) -> int:
    """Return the bytes of an FP8 operand, and of its scales if it has several."""
    return rows * inner + (0 if scales.is_one else FP32 * scales.count(rows, inner))


def _norm_statistics(spec: RunSpec) -> int:
    """Return how many numbers a norm keeps of each vector: its scale and, if it has one, mean."""
    return 2 if spec.model.normalization == "layernorm" else 1


def _attention_bytes(spec: RunSpec, *, keeps_core: bool) -> int:
    """Return what attention keeps: queries, keys, values and, with `keeps_core`, what follows.

    These are the normalized and rotated queries and keys, attention's output and one FP32 number
    for each query of each head.
    """
    model, tp, tokens = spec.model, spec.parallel.tp, microbatch_tokens(spec)
    size = compute_itemsize(spec)
    query, pair = model.query_size // tp, 2 * model.kv_size // tp
    kept = tokens * (query + pair) * size
    if not keeps_core:
        return kept
    if model.position_embedding_type == "rope" or model.qk_layernorm:
        # The rotated queries and keys are new tensors; the values stay in the packed one.
        kept += tokens * (query + pair // 2) * size
    if model.qk_layernorm:
        heads = (model.num_attention_heads + model.num_kv_heads) // tp
        kept += tokens * heads * FP32 * _norm_statistics(spec)
    return kept + tokens * (query * size + FP32 * (model.num_attention_heads // tp))


# ---- What its backward pass holds


def forward_work(spec: RunSpec, layer: int) -> int:
    """Return what the last product of a layer's forward pass finds beside what the layer keeps.

    In FP8 these are the MLP's input and its own in high precision, its cast for this product, and
    the weight's casts.
    """
    mlp, work = layer_shapes(spec)[layer].mlp, 0
    for linear in mlp.linears:
        tokens = microbatch_tokens(spec) // (sequence_shards(spec) if linear.whole.is_column else 1)
        if not _keeps_input_as_it_is(spec, linear):
            work += tokens * linear.read * compute_itemsize(spec)
    last, rows = mlp.linears[-1], mlp.linears[-1].whole.per_token(microbatch_tokens(spec))
    if last.traits is not None and "output" in last.fp8_products:
        work += _operand_bytes(last.traits.input.last, rows, last.in_features)
    return work + (last.weight_copies(last.fp8_products) if _casts_weight(spec) else 0)


def experts_forward_work(spec: RunSpec, layer: int) -> int:
    """Return what a layer's experts need, as they end their forward pass, beside what stays.

    These are the experts' input, order and rows, and their results with the FP32 sums of tokens, or
    as other ranks get them in order and as these send theirs.
    """
    size, (columns, rows) = compute_itemsize(spec), layer_shapes(spec)[layer].experts
    if not columns:
        return 0
    assert spec.model.moe is not None
    own = microbatch_tokens(spec) // sequence_shards(spec)
    inputs = own * spec.model.hidden_size
    work = inputs * size + own * spec.model.moe.top_k * INDEX_BYTES
    for linear in (*columns, *rows):
        if not _keeps_input_as_it_is(spec, linear):
            work += microbatch_tokens(spec) * linear.read * size
    outer = microbatch_tokens(spec) * sum(linear.read for linear in columns)
    copies = 2 * (spec.parallel.ep > 1)
    return work + outer * size + max(copies * outer * size, inputs * (FP32 + size))


def backward_instants(
    spec: RunSpec, layer: int, *, keeps_core: bool, scores: int, held: int
) -> Iterator[int]:
    """Yield by how much more a layer's backward pass holds than at its beginning, to its end.

    At the beginning there are all that the layer keeps and its output's gradient, of which somebody
    else holds `held` bytes until the end. At the end there are its input's gradient and those of
    its parameters. `scores` is the working memory of attention.
    """
    kept = _kept_parts(spec, layer, keeps_core=keeps_core)
    size, width, shape = compute_itemsize(spec), spec.model.hidden_size, layer_shapes(spec)[layer]
    tokens, between = microbatch_tokens(spec), microbatch_tokens(spec) // sequence_shards(spec)
    stream = layer_input_bytes(spec)
    stays = spec.parallel.fsdp is not None  # gradients of parameters, until FSDP reduces a layer's
    norm_gradients = stays * _norm_statistics(spec) * width * size
    core = _attention_bytes(spec, keeps_core=True) - kept["attention"]  # what is recomputed
    now = 0
    for name, branch in (("mlp", shape.mlp), ("attention", shape.attention)):
        written, read = tokens * size * branch.written, tokens * size * branch.read
        # The branch's own gradient: a tensor beside the stream's if dropout or a cast makes one.
        has_own = bool(kept[f"{name}_dropout"]) or stream != between * width * size
        own = has_own * between * width * size
        yield now + own
        now += own - kept[f"{name}_dropout"]
        for linear in reversed(branch.rows):
            yield now + _products_bytes(spec, linear)
            now += tokens * size * linear.read
            now += stays * _gradient_bytes(spec, linear) - kept[linear.names[0]]
        now -= own
        if name == "mlp":
            yield now + (read if kept["ffn_dropout"] else 0)
            now -= kept["ffn_dropout"]
            yield now + written
        else:
            now += core
            yield now + written + scores + _ring_bytes(spec)
            now -= core
        now += written - read - kept[name]
        for linear in reversed(branch.columns):
            yield now + _products_bytes(spec, linear)
            now += stays * _gradient_bytes(spec, linear) - kept[linear.names[0]]
            now -= tokens * size * linear.written
        if name == "mlp" and shape.experts.linears:
            own_input = bool(branch.linears) * between * width * size
            for more in _experts_instants(spec, shape, kept):
                yield now + own_input + more
            now += more
        now += between * width * size  # the gradient of what they read
        yield now + stream + (stream if stream != between * width * size else 0)
        now += norm_gradients - between * width * size - kept[f"{name}_norm"]
        now += held if name == "mlp" else 0  # the sum of both branches' gradients is a new tensor
    yield now


def _experts_instants(spec: RunSpec, shape: LayerShape, kept: Mapping[str, int]) -> Iterator[int]:
    """Yield what `backward_instants` does, for a layer's experts and their router.

    Gradients of the rows of all experts lie in one tensor, for which those of each are joined. What
    weighs rows is in FP32. At the end the gradient of the experts' input is not counted.
    """
    size, tokens = compute_itemsize(spec), microbatch_tokens(spec)
    (columns, rows), now = shape.experts, 0
    own = tokens // sequence_shards(spec) * spec.model.hidden_size
    written, read = tokens * shape.experts.written, tokens * shape.experts.read
    outer = tokens * sum(linear.read for linear in columns)
    now += outer * size  # the gradients of the rows, copied from those of tokens
    passing = (spec.parallel.ep > 1) * 2 * outer * size  # in order, and as ranks get or send them
    yield now + passing
    for linears, made, taken in ((rows, read, outer), (columns, outer, written)):
        for linear in reversed(linears):
            yield now + _products_bytes(spec, linear)
        yield now + 2 * made * size  # of each expert, and all of them
        now += (made - taken) * size - sum(kept[linear.names[0]] for linear in linears)
        if linears is columns:
            break
        now += read * (FP32 - size)
        # The gradients of rows and, before their sum, of weights; those of rows are then rounded.
        yield now + read * (2 * FP32 + size * (size < FP32))
        now += read * (size - FP32) - kept["weighted"]
        yield now + written * size
        now += (written - read) * size - kept["experts"]
    yield now + max(passing, own * (FP32 + size))  # the sums of a token's rows
    now -= outer * size
    yield now + own * (FP32 + size)  # the gradient of what the router reads
    yield now - kept["router"]


def _ring_bytes(spec: RunSpec) -> int:
    """Return what attention's backward pass needs where ranks pass keys and values around.

    They are two blocks of keys and values, sums of all gradients in FP32, of those of keys and
    values two more, and a block's own gradients, those of keys and values twice.
    """
    if spec.parallel.cp == 1:
        return 0
    model, tokens = spec.model, microbatch_tokens(spec)
    queries, pairs = (tokens * x // spec.parallel.tp for x in (model.query_size, 2 * model.kv_size))
    blocks = 4 * pairs + queries // 2
    return blocks * compute_itemsize(spec) + FP32 * (queries + 3 * pairs)


def _gradient_bytes(spec: RunSpec, linear: LinearShape) -> int:
    """Return the bytes of the gradients that a linear's backward pass makes of weight and bias.

    With FSDP they are in the compute dtype. Otherwise there are FP32 sums over microbatches: the
    first product of a step writes into the sum, and a later one makes an FP32 tensor, which is then
    added. FP8-LM's levels without such sums have such a tensor in each microbatch.
    """
    storage, size = spec.optim.storage, compute_itemsize(spec)
    itemsize = size
    if spec.parallel.fsdp is None:
        has_sums = storage.main_grads == "fp32" or storage.sums_in_fp32
        is_written = has_sums and num_microbatches(spec) == 1
        made = BACKENDS[spec.precision.backend].weight_gradients
        itemsize = {"fp32": 0 if is_written else FP32, "added": 0, "work": size}[made]
    biases = linear.whole.experts * linear.whole.has_bias * linear.out_features
    return itemsize * linear.weight_elements + size * biases


def _products_bytes(spec: RunSpec, linear: LinearShape) -> int:
    """Return what the two products of a linear's backward pass need, and what they make.

    They read casts of the gradient and of the weight, which is cast for each use. With sequence
    parallelism ranks gather the tokens of the gradient of a linear whose output they sum, and the
    kept input of one whose input they gather, after they have sent off that input's gradient.
    """
    size, products, traits = compute_itemsize(spec), linear.fp8_products, linear.traits
    all_rows = linear.whole.per_token(microbatch_tokens(spec))
    tokens = all_rows // linear.whole.experts  # those of one expert, in balance
    out, shards = linear.out_features, 1 if linear.whole.is_expert else sequence_shards(spec)
    is_column, rows = linear.whole.is_column, tokens // shards
    need = FP32 * out * linear.whole.has_bias  # sums of columns
    own = tokens if is_column else rows
    gathers = shards > 1 and not is_column
    pairs: tuple[tuple[GemmName, bool], ...] = (("grad_input", False), ("grad_weight", True))
    for product, is_first in pairs:
        if product not in products or traits is None:
            continue
        scales = traits.grad_output.first if is_first else traits.grad_output.last
        for count in (own, tokens) if gathers else (own,):
            need += _operand_bytes(scales, *((out, count) if is_first else (count, out)))
    if gathers and len(products & {"grad_input", "grad_weight"}) < 2:
        need += tokens * out * size
    if _casts_weight(spec):
        need += linear.weight_copies(products & {"grad_input"})
    gradients = _gradient_bytes(spec, linear) // linear.whole.experts  # one after the other
    whole = all_rows * linear.in_features * size
    if shards == 1 or not is_column:
        return need + whole + gradients
    sent = rows * linear.in_features * size
    kept_as_it_is = _keeps_input_as_it_is(spec, linear)
    gathered = whole if kept_as_it_is else _input_bytes(spec, linear, tokens)
    return need + sent + max(whole, gathered + gradients)


def _casts_weight(spec: RunSpec) -> bool:
    """Whether FSDP gathers weights in high precision, which linears cast to FP8 for a use."""
    recipe = spec.precision.fp8
    if spec.parallel.fsdp is None or copies_weights(spec):
        return False
    is_gathered_in_fp8 = recipe is not None and recipe.params_in_fp8
    return BACKENDS[spec.precision.backend].copies_weights and not is_gathered_in_fp8
