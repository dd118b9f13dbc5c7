"""Compare the forward pass that a run was trained with with the one that an export is served with.

What a rule explains is how much smaller the KL is when this rule alone is set as in training, and
all others stay as served (`serve_sides.py`).
"""

# T tokens  V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megafp8.checkpoint.serving import (
    planned_bytes,
)
from megafp8.data.loader import Microbatch
from megafp8.errors import UserError
from megafp8.models.attention import AttentionCore
from megafp8.models.gpt import GPT
from megafp8.models.router import Router
from megafp8.train.serve_casts import (
    Apart,
    Form,
    apart,
    in_e4m3,
)
from megafp8.train.serve_sides import (
    AS_TRAINED,
    RULES,
    SERVED,
    TRAINED,
    Sides,
    Way,
)
from megafp8.train.step import local_batch

KV = "keys and values in E4M3"
ROUTER = "the router's logits in BF16"
KEPT = "head and linears in BF16 in the form too"
_CHUNK = 256  # tokens whose probabilities are in FP64 at a time


@dataclass
class Distance:
    """Add up how far served probabilities are from the trained ones, over counted tokens.

    Attributes:
        kl: KL (trained || served), in nats, summed.
        absolute: |log-probability of the target, trained - served|, summed.
        largest: The largest of these.
        agree: The tokens whose likeliest successor is the same.
        loss: The cross entropy as served, summed.
        tokens: How many tokens there are.
    """

    kl: float = 0.0
    absolute: float = 0.0
    largest: float = 0.0
    agree: int = 0
    loss: float = 0.0
    tokens: int = 0

    def add(
        self, trained_TV: torch.Tensor, served_TV: torch.Tensor, targets_T: torch.Tensor
    ) -> None:
        """Add tokens by both sides' logits [T, V], in FP64."""
        for t_CV, s_CV, own in zip(
            trained_TV.split(_CHUNK), served_TV.split(_CHUNK), targets_T.split(_CHUNK), strict=True
        ):
            log_t, log_s = (x.double().log_softmax(-1) for x in (t_CV, s_CV))
            at = own[:, None]
            gap = (log_t.gather(1, at) - log_s.gather(1, at)).abs()
            self.kl += float((log_t.exp() * (log_t - log_s)).sum())
            self.absolute += float(gap.sum())
            self.largest = max(self.largest, float(gap.max()))
            self.agree += int((t_CV.argmax(-1) == s_CV.argmax(-1)).sum())
            self.loss -= float(log_s.gather(1, at).sum())
            self.tokens += len(own)

    def as_json(self) -> dict[str, float]:
        """Return the means over tokens, and the largest difference."""
        return {
            "kl": self.kl / self.tokens,
            "logprob_mean_difference": self.absolute / self.tokens,
            "logprob_largest_difference": self.largest,
            "first_choice_agrees": self.agree / self.tokens,
            "loss": self.loss / self.tokens,
        }


@dataclass
class Result:
    """Hold what a comparison found.

    Attributes:
        trained: The trained side beside itself, which has its loss.
        served: The served side.
        rules: By key, the served side with one rule set as in training.
        more: What else a server may do, by what it is: the served side with it.
        weights: The bytes of each linear's weight that differ.
        left: By rule, those of all weights that still differ.
        inputs: The bytes of each linear's inputs that differ; both casts read the trained input.
        places: By rule, the linears in which it has another cast.
        num_bytes: The bytes of the export's tensors.
        num_samples: The samples of validation data.
    """

    trained: Distance
    served: Distance
    rules: dict[str, Distance]
    more: dict[str, Distance]
    weights: dict[str, Apart]
    left: dict[str, Apart]
    inputs: dict[str, Apart]
    places: dict[str, list[str]] = field(default_factory=dict)
    num_bytes: int = 0
    num_samples: int = 0

    def explained(self, key: str) -> float:
        """Return the KL of a token that a rule explains."""
        return (self.served.kl - self.rules[key].kl) / self.served.tokens

    def ranked(self) -> list[str]:
        """Return the rules, the one that explains most first; of equals the narrower one."""
        unit = self.served.kl / self.served.tokens / 1000 or 1.0
        order = list(RULES)
        return sorted(self.rules, key=lambda k: (-round(self.explained(k) / unit), order.index(k)))

    def cause(self) -> str | None:
        """Return the rule that explains most, or a narrower one that explains half of that.

        None says that no rule by itself makes the difference smaller.
        """
        ranked = self.ranked()
        if not ranked or not self.served.kl or self.explained(ranked[0]) <= 0:
            return None
        first, most = RULES[ranked[0]][0], self.explained(ranked[0])
        if TRAINED not in first:
            return ranked[0]
        narrower = (
            key
            for key in ranked
            if [part == SERVED for part in RULES[key][0]] == [part == SERVED for part in first]
            and TRAINED not in RULES[key][0]
            and self.explained(key) >= most / 2
        )
        return next(narrower, ranked[0])


@torch.no_grad()
def compare(
    sides: Sides, form: Form, batches: Sequence[Microbatch], *, only: bool = False
) -> Result:
    """Return how far the run is from a form that serves it; with `only` without rules.

    Raises:
        UserError: The data have no token.
    """
    sides.state.scaling.begin_microbatch(0)
    with sides.state.scaling.evaluation():
        sides.serve(form, only=only)
        result = Result(Distance(), Distance(), {}, {}, {}, {}, {})
        result.num_bytes = planned_bytes(sides.spec, form)
        locals_ = [local_batch(batch, sides.state.mesh) for batch in batches]
        for batch in locals_:
            is_counted = batch.targets_BS.flatten() >= 0
            targets_T = batch.targets_BS.flatten()[is_counted]
            if not len(targets_T):
                continue
            trained_TV = sides.logits(sides.trained, AS_TRAINED, batch)[is_counted]
            result.trained.add(trained_TV, trained_TV, targets_T)
            for distance, other, model, context in _others(sides, result, only):
                with context:
                    served_TV = sides.logits(model, other, batch)[is_counted]
                distance.add(trained_TV, served_TV, targets_T)
        if not result.trained.tokens:
            raise UserError("the run's validation data have no token to compare. Give more samples")
        for name, switched in sides.linears.items():
            weight = switched.weights
            result.weights[name] = apart(weight[TRAINED], weight[SERVED])
            result.inputs[name] = switched.seen
        result.left = {key: sides.left(key) for key in result.rules}
        result.places = {key: sides.places(key) for key in result.rules}
    return result


def _others(
    sides: Sides, result: Result, only: bool
) -> Iterator[tuple[Distance, Way, GPT, AbstractContextManager[Any]]]:
    """Yield the passes beside the trained one: what takes their distance, and how they run."""
    before = replace(result.served)  # that of a rule in which nothing has differed so far
    yield result.served, Way(), sides.served, ExitStack()
    if only:
        return
    for key in sides.rules():
        model = sides.trained if key == "rest" else sides.served
        distance = result.rules.setdefault(key, replace(before))
        yield distance, RULES[key][0], model, ExitStack()
    if sides.form is not None and sides.form.input_name is None:
        way = Way("form", "form")
        yield result.more.setdefault(KEPT, Distance()), way, sides.served, sides.head_in_form()
    for name in (KV, ROUTER) if sides.routed else (KV,):
        hooks = _hooked(sides.served, name)
        yield result.more.setdefault(name, Distance()), Way(), sides.served, hooks


@contextmanager
def _hooked(model: GPT, name: str) -> Iterator[None]:
    """Let a model compute what `KV` or `ROUTER` says, inside the context."""
    with ExitStack() as hooks:
        for module in model.modules():
            if name == KV and isinstance(module, AttentionCore):
                hooks.callback(module.register_forward_pre_hook(in_e4m3).remove)
            if name == ROUTER and isinstance(module, Router):
                hooks.callback(module.register_forward_hook(_in_bf16).remove)
        yield


def _in_bf16(_module: nn.Module, _args: object, logits_TE: torch.Tensor) -> torch.Tensor:
    return logits_TE.bfloat16().float()
