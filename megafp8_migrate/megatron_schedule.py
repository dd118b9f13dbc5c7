"""Translate the length of a run of Megatron's and the schedule of its learning rate."""

from __future__ import annotations

from typing import Any

from megafp8_migrate.megatron_settings import MegatronSettings
from megafp8_migrate.report import Migration

_SCHED = "model.optim.sched."
_NAMES = {
    "cosine": "CosineAnnealing", "linear": "WarmupAnnealing", "constant": "WarmupPolicy",
    "inverse-square-root": "InverseSquareRootAnnealing", "WSD": "WSD",
}  # fmt: skip
_OF_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_samples", "lr_wsd_decay_style")
_BEGINS = "the warm-up's rates are lr (s + 1) / (W + 1) at step s of W, and Megatron's are lr s / W"


def schedule(s: MegatronSettings, m: Migration) -> None:
    """Translate the number of steps, the warm-up and the decay, in steps of the global batch."""
    steps = _steps(s, m, "train_iters", "train_samples")
    if steps is not None:
        names = [n for n in ("train_iters", "train_samples") if n in s.given]
        m.change(s.label(*names), s.given[names[0]].value, {"trainer.max_steps": steps})
    style = s.get("lr_decay_style", "linear" if s.source else None)
    if style is None:
        return
    if not isinstance(style, str) or style not in _NAMES:
        known = ", ".join(_NAMES)
        m.decide(s.label("lr_decay_style"), style, "is not supported", f"Give one of {known}")
        return
    decay = _steps(s, m, "lr_decay_iters", "lr_decay_samples")
    warmup = _warmup(s, m, decay if decay is not None else steps)
    new: dict[str, Any] = {_SCHED + "name": _NAMES[style]}
    if warmup is not None:
        new[_SCHED + "warmup_steps"] = warmup
    note = _BEGINS if warmup else ""
    constant = steps - decay if steps is not None and decay is not None else 0
    if constant and style == "cosine" and constant > 0:
        new[_SCHED + "constant_steps"], note = constant, ""
    elif constant and style != "constant":
        new[_SCHED + "max_steps"] = decay
    if style == "WSD":
        _wsd(s, m, new)
        note = ""
    else:
        for name in _OF_WSD:
            if s.get(name) is not None:
                m.drop(s.label(name), s.get(name), "the schedule is not WSD")
    shown = s.label(*[n for n in ("lr_decay_style", "lr_decay_iters", "lr_decay_samples",
                                  "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction",
                                  *(_OF_WSD if style == "WSD" else ()))
                      if n in s.given] or ["lr_decay_style"])  # fmt: skip
    m.change(shown, style, new, note=note)


def _steps(s: MegatronSettings, m: Migration, by_steps: str, by_samples: str) -> int | None:
    """Return a number of steps that is given as such or in samples of the global batch."""
    steps, samples = s.number(by_steps, m), s.number(by_samples, m)
    if samples is None or steps is not None:
        return None if steps is None else int(steps)
    batch = s.number("global_batch_size", m)
    s.taken.discard("global_batch_size")
    if not isinstance(batch, int) or batch < 1:
        m.decide(s.label(by_samples), samples, "counts samples, and the batch is not known",
                 f"Give {by_steps}")  # fmt: skip
        return None
    if s.has("rampup_batch_size"):
        m.decide(s.label(by_samples), samples, "counts samples of a batch that grows",
                 f"Give {by_steps}")  # fmt: skip
        return None
    return int(samples) // batch


def _warmup(s: MegatronSettings, m: Migration, decay: int | None) -> int | None:
    share = s.number("lr_warmup_fraction", m)
    warmup = _steps(s, m, "lr_warmup_iters", "lr_warmup_samples")
    if share is not None and decay is not None:
        return int(share * decay)
    if share is not None:
        m.decide(s.label("lr_warmup_fraction"), share, "is a share of a decay that is not known",
                 "Give model.optim.sched.warmup_steps")  # fmt: skip
        return None
    return warmup if warmup is not None else (0 if s.source else None)


def _wsd(s: MegatronSettings, m: Migration, new: dict[str, Any]) -> None:
    last = _steps(s, m, "lr_wsd_decay_iters", "lr_wsd_decay_samples")
    if last is None:
        m.decide("lr_wsd_decay_iters", "???", "is not given, which Megatron's WSD needs",
                 "Give model.optim.sched.wsd_decay_steps")  # fmt: skip
    else:
        new[_SCHED + "wsd_decay_steps"] = last
    new[_SCHED + "wsd_decay_style"] = s.get("lr_wsd_decay_style", "exponential")
