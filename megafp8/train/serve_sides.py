"""Hold the model of a run and the one that serves it, whose linears can take each rule by itself.

Both sides multiply as the project's emulated products do, on a CPU: equal operands give equal bits.
The trained side is the run's own model in an evaluation. The served one has the bytes that an
export writes, inputs cast by the export's format, and all else in BF16; the router's factors
multiply what an expert returns, and not what its second linear reads, as in training.

A rule is what the two differ in.
"""

# T tokens  K in features  N out features  V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8_numerics.cast import Fp8Tensor, amax_of
from fp8_numerics.formats import E4M3
from fp8_numerics.gemm import Operand
from megafp8.checkpoint.huggingface import ConversionError, mapping, to_theirs
from megafp8.checkpoint.reader import Reader
from megafp8.checkpoint.serving import (
    Read,
    ServingFormat,
    ServingWeights,
    scale_of,
    single_linears,
)
from megafp8.checkpoint.serving_blocks import BlockFormat
from megafp8.config.resolve import has_our_casts, resolve
from megafp8.fp8.linear import Linear
from megafp8.models.gpt import GPT
from megafp8.models.loss import plain_matmul
from megafp8.models.moe import MoE
from megafp8.models.parts import Parts
from megafp8.parallel.mesh import single_rank
from megafp8.specs import GPTSpec, ParallelSpec
from megafp8.specs.layer import LayerLinear, SubLinear
from megafp8.specs.parameters import HEAD
from megafp8.specs.recipes import names_code
from megafp8.train.build import build
from megafp8.train.load_model import load_model, read_tensor, shape_of
from megafp8.train.recorded import recorded_recipes, recorded_settings, recorded_values
from megafp8.train.serve_casts import (
    NOTHING,
    Apart,
    Form,
    apart,
    are_other,
    encoded,
    is_turned,
    rescaled,
    rescaled_fp8,
    rule_of,
    rule_of_form,
)
from megafp8.train.served import cast_and_multiply, joined, layers_of_experts, multiply
from megafp8.train.state import TrainState
from megafp8.train.state_dict import load_checkpoint

TRAINED, SERVED = "trained", "served"


class Way(NamedTuple):
    """Name how a linear's weight and input are cast: `TRAINED`, `SERVED`, or a key of a rule.

    So is named what becomes of a router's weights, too.
    """

    weight: str = SERVED
    input: str = SERVED
    routing: str = SERVED


AS_TRAINED = Way(TRAINED, TRAINED, TRAINED)
RULES: dict[str, tuple[Way, str]] = {
    "turned": (Way("turned"), "weights that lie transposed"),
    "joined": (Way("joined"), "scales of joined weights (QKV, gate and up)"),
    "masters": (Way("masters"), "weights cast from FP32 masters, not from the run's dtype"),
    "static": (Way(SERVED, "static"), "inputs' scales: static or dynamic"),
    "weight scales": (Way("scales"), "rule of the weights' scales"),
    "input scales": (Way(SERVED, "scales"), "rule of the inputs' scales"),
    "weight groups": (Way("groups"), "which numbers of a weight share a scale"),
    "input groups": (Way(SERVED, "groups"), "which numbers of an input share a scale"),
    "kept": (Way("kept", "kept"), "linears in high precision on one side alone"),
    "router": (Way(routing="router"), "the router's parameters: FP32 or BF16"),
    "place": (
        Way(routing="place"),
        "the router's factors: before or after an expert's second linear",
    ),
    "weights": (Way(TRAINED), "weights, all rules"),
    "inputs": (Way(SERVED, TRAINED), "inputs, all rules"),
    "routing": (Way(routing=TRAINED), "router, all rules"),
    "rest": (Way(), "dtype of embedding, norms, attention and head"),
}
"""The rules by key, the narrow ones first: what is set as in training, and the rule in words."""


class Switched(nn.Module):
    """Compute one linear as it was trained, as it is served, or with one rule as in training.

    Attributes:
        own: The run's own linear.
        weights: The weight by each way that has another one than the served.
        inputs: What casts an input [T, K] by each way.
        way: The present way.
        seen: The bytes of inputs that differ, counted where the present way is the trained one.
        other: The ways of inputs that were another cast than the served one there.
    """

    def __init__(self, own: Linear, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.own, self.bias = own, bias
        self.weights: dict[str, Operand] = {}
        self.inputs: dict[str, Callable[[torch.Tensor], Operand]] = {TRAINED: self._trained_input}
        self.way, self.seen, self.other = Way(TRAINED, TRAINED), NOTHING, set[str]()

    def _trained_input(self, x_TK: torch.Tensor) -> Operand:
        if self.own.quantizer is None:
            return x_TK
        return self.own.quantizer.operands("input", x_TK, with_first=False)[0].along_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear's output by the present way: [..., K] -> [..., N]."""
        if self.way == AS_TRAINED:
            if x.numel():
                self._look(x.flatten(0, -2))
            out: torch.Tensor = self.own(x)
            return out
        weight = self.weights.get(self.way.weight, self.weights[SERVED])
        cast = self.inputs.get(self.way.input, self.inputs[SERVED])
        return cast_and_multiply(x, cast, weight, self.bias)

    def _look(self, x_TK: torch.Tensor) -> None:
        """Compare the casts of an input of the trained model."""
        served = self.inputs[SERVED](x_TK)
        self.seen += apart(self._trained_input(x_TK), served)
        rest = self.inputs.keys() - {SERVED} - self.other
        self.other |= {way for way in rest if are_other(self.inputs[way](x_TK), served)}


def trained_state(reader: Reader, notify: Callable[[str], None]) -> TrainState:
    """Return the state of a checkpoint's run on this CPU, as one rank that evaluates in FP8.

    Raises:
        UserError: Its layers are others', or a recipe is code.
    """
    values, spec = recorded_values(reader), shape_of(reader)
    if not has_our_casts(backend := values["model.fp8_backend"]):
        raise _refusal(
            reader, f"has layers of model.fp8_backend={backend}, whose casts are not seen from here"
        )
    if code := [name for name in recorded_recipes(values) if names_code(name)]:
        raise _refusal(reader, f"was trained in {code[0]}, which is code, and is not imported")
    settings = recorded_settings(
        reader, {"trainer.accelerator": "cpu", "model.use_autocast_during_eval": True}
    )
    run = resolve(settings, lambda: False)
    train = replace(run.train, compile="off", cuda_graph=False)
    run = replace(run, model=spec, parallel=ParallelSpec(), train=train)
    state = build(run, single_rank())
    load_checkpoint(reader.path, state, notify)
    return state


def _refusal(reader: Reader, reason: str) -> ConversionError:
    return ConversionError(f"{reader.path} {reason}. Serve-diff compares no such run")


@dataclass
class Sides:
    """Hold both models of a run, whose linears are the same objects."""

    state: TrainState
    spec: GPTSpec
    read: Read
    trained: GPT
    served: GPT
    linears: dict[str, Switched] = field(default_factory=dict)
    routed: list[tuple[MoE, torch.Tensor]] = field(default_factory=list)
    form: Form = None
    head: Operand | None = None  # in the form, in a pass that has it so

    @classmethod
    def of(cls, reader: Reader, notify: Callable[[str], None]) -> Sides:
        """Return the models of a checkpoint; `serve` says how it is served."""
        state = trained_state(reader, notify)
        assert isinstance(state.model, GPT)
        plain = load_model(reader, torch.bfloat16, torch.device("cpu"))
        sides = cls(state, shape_of(reader), partial(read_tensor, reader), state.model, plain)
        sides.trained.eval()
        for path, own in [*sides.trained.named_modules()]:
            if not isinstance(own, Linear):
                continue
            bf16: Any = plain.get_submodule(path)
            switched = sides.linears[own.name] = Switched(own, bf16.bias)
            switched.weights["bf16"] = bf16.weight.detach()
            for model in (sides.trained, plain):
                parent, _, last = path.rpartition(".")
                setattr(model.get_submodule(parent), last, switched)
        for model in (sides.trained, plain):
            for experts in layers_of_experts(model):  # their linears run one by one
                experts.of_experts = partial(Parts.of_experts, model.parts)
                sides.routed.append((experts, experts.router.weight.detach().clone()))
        plain.head_loss.matmul = sides._head_product
        return sides

    def serve(self, form: Form, *, only: bool = False) -> None:
        """Take a form, whose weights are the bytes that an export writes; with `only` no rules."""
        self.form = form
        tensors = self._exported()
        for linear in single_linears(self.spec):
            self._set(linear, self.linears[linear.name], tensors, only)

    def _head_product(self, a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
        if self.head is None or self.form is None:
            return plain_matmul(a, b, **how)
        product: torch.Tensor = multiply(
            self.form.input_operand(a.float(), None), self.head, None, a.dtype
        )
        return product

    @contextmanager
    def head_in_form(self) -> Iterator[None]:
        """Let the head of the served model be in the form, inside the context."""
        form, weight_VD = self.form, self.served.output_weight.detach().float()
        assert form is not None
        vocab, width = weight_VD.shape
        linear = LayerLinear(HEAD, width, (SubLinear(HEAD, vocab),), False, 0.0)
        self.head = joined(encoded(form, linear, lambda _: weight_VD))
        try:
            yield
        finally:
            self.head = None

    def _exported(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors of an export by our names of the weights."""
        if self.form is None:
            return {}
        weights, found = ServingWeights(self.spec, self.read, self.form), {}
        for entry in mapping(self.spec):
            made = weights.encode(entry, to_theirs(entry, self.read))
            module = entry.theirs.removesuffix("weight")
            found[entry.ours[0]] = {name.removeprefix(module): t for name, t in made.items()}
        return found

    def _set(
        self,
        linear: LayerLinear,
        switched: Switched,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        only: bool,
    ) -> None:
        """Give a linear its weights and casts by each way."""
        own, form, bf16 = switched.own, self.form, switched.weights["bf16"]
        work = self.trained.parts.dtype
        trained = own.weight_form.operands(own.weight, work, 0).along_last
        switched.weights = {"bf16": bf16, TRAINED: trained, SERVED: bf16}
        switched.inputs = {TRAINED: switched.inputs[TRAINED], SERVED: lambda x: x.bfloat16()}
        switched.seen, switched.other = NOTHING, set()
        is_kept = form is None or linear.name in form.kept
        if is_kept != (own.quantizer is None or not isinstance(trained, Fp8Tensor)):
            switched.weights["kept"], switched.inputs["kept"] = trained, switched.inputs[TRAINED]
        if form is None:
            return
        if is_kept:
            if form.input_name is None:
                switched.weights["form"] = joined(encoded(form, linear, self.read))
                switched.inputs["form"] = lambda x: form.input_operand(x.float(), None)
            return
        tensors_of = [tensors[f"{part.name}.weight"] for part in linear.parts]
        scale = None if form.input_name is None else tensors_of[0][form.input_name]
        parts = [form.weight_operand(each) for each in tensors_of]
        switched.weights[SERVED] = joined(parts)
        switched.inputs[SERVED] = lambda x: form.input_operand(x.float(), scale)
        if not only:
            self._set_weights(linear, switched, form, parts)
            self._set_inputs(linear, switched, form, scale)

    def _set_weights(
        self,
        linear: LayerLinear,
        switched: Switched,
        form: ServingFormat | BlockFormat,
        parts: Sequence[Fp8Tensor],
    ) -> None:
        """Give a linear the weights of each rule by itself."""
        served, trained = switched.weights[SERVED], switched.weights[TRAINED]
        assert isinstance(served, Fp8Tensor)
        rule = rule_of(switched.own)
        # A form that a run was trained in casts weights of the run's own dtype already.
        masters = [self.read(f"{p.name}.weight").to(form.source).float() for p in linear.parts]
        master_NK = torch.cat(masters)
        if served.block is None:
            switched.weights["scales"] = rescaled(master_NK, served, rule)
        elif rule is not None and served.fmt is E4M3:
            pairs = zip(masters, parts, strict=True)
            switched.weights["scales"] = joined([rescaled_fp8(*pair, rule) for pair in pairs])
        if isinstance(trained, Fp8Tensor) and trained.block != served.block:
            switched.weights["groups"] = rescaled(master_NK, trained, rule_of_form(form))
        work = self.trained.parts.dtype
        of_dtype = encoded(form, linear, lambda name: self.read(name).to(work).float())
        switched.weights["masters"] = joined(of_dtype)
        one = replace(linear, parts=(SubLinear(linear.name, linear.out_features),))
        if len(linear.parts) > 1 and (isinstance(form, ServingFormat) or form.tp == 1):
            switched.weights["joined"] = joined(encoded(form, one, lambda _: master_NK))
        if linear.in_features == linear.out_features and is_turned(served, master_NK):
            switched.weights["turned"] = trained

    def _set_inputs(
        self,
        linear: LayerLinear,
        switched: Switched,
        form: ServingFormat | BlockFormat,
        scale: torch.Tensor | None,
    ) -> None:
        """Give a linear the casts of its input by each rule."""
        cast, own_cast = switched.inputs[SERVED], switched.inputs[TRAINED]
        rule = rule_of(switched.own)
        if (static := self._static(linear, switched.own, scale)) is not None:
            switched.inputs["static"] = static
        if scale is not None:
            return
        if "groups" in switched.weights:
            of_inputs = rule_of_form(form, is_input=True)
            switched.inputs["groups"] = lambda x: rescaled(x, own_cast(x), of_inputs)
        if rule is not None:
            switched.inputs["scales"] = lambda x: rescaled(x, cast(x), rule)

    def _static(
        self, linear: LayerLinear, own: Linear, scale: torch.Tensor | None
    ) -> Callable[[torch.Tensor], Operand] | None:
        """Return the cast of an input whose scale is static where the served is not, or reverse."""
        form = self.form
        quantizer = own.quantizer
        has_history = quantizer is not None and quantizer.tensors["input"].slot is not None
        if scale is None:
            is_fp8 = isinstance(form, ServingFormat)
            return self.linears[linear.name].inputs[TRAINED] if is_fp8 and has_history else None
        if has_history or quantizer is None:
            return None
        if isinstance(form, ServingFormat):
            return lambda x: form.input_operand(x.float(), scale_of(amax_of(x)).reshape(1))
        assert form is not None

        def dynamic(x: torch.Tensor) -> Operand:
            now = replace(form, input_amaxes={linear.name: float(amax_of(x))})
            return now.input_operand(x.float(), now.input_scale(linear.name))

        return dynamic

    def rules(self) -> list[str]:
        """Return the keys of the rules in which something differs."""
        parts, found = self.trained.parts, []
        for key, (way, _) in RULES.items():
            has = bool(self.places(key)) or (way.routing != SERVED and bool(self.routed))
            if key == "rest":
                dtypes = {parts.dtype, parts.whole_dtype, parts.residual_dtype}
                has = dtypes != {torch.bfloat16}
            if has:
                found.append(key)
        return found

    def places(self, key: str) -> list[str]:
        """Return the linears in which a rule has another cast than the served one."""
        return [name for name, each in self.linears.items() if self._has(each, RULES[key][0])]

    def _has(self, switched: Switched, way: Way) -> bool:
        """Whether a linear has another cast by a way than the served one."""
        served, other = switched.weights[SERVED], switched.weights.get(way.weight)
        if way.weight != SERVED and other is not None and are_other(other, served):
            return True
        return way.input in switched.other

    def left(self, key: str) -> Apart:
        """Return the bytes of all weights that differ with a rule as in training."""
        total = NOTHING
        for switched in self.linears.values():
            weight = switched.weights.get(RULES[key][0].weight, switched.weights[SERVED])
            total += apart(switched.weights[TRAINED], weight)
        return total

    def logits(self, model: GPT, way: Way, batch: Any) -> torch.Tensor:
        """Return the logits [T, V] in FP32 of a model whose linears take a way."""
        for switched in self.linears.values():
            switched.way = way
        for experts, weight_ED in self.routed:
            experts.weighs_output = way.routing in (SERVED, "router")
            in_bf16 = way.routing in (SERVED, "place")
            experts.router.weight.copy_(weight_ED.bfloat16() if in_bf16 else weight_ED)
        out = model.forward_stage(batch.tokens_BS, None, None, **batch.documents)
        return out.flatten(0, 1)
