"""A schedule of precision under Transformer Engine's own classes: stop, edit and restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafp8.backends.te.names import import_te
from megafp8.train import state_dict
from megafp8.train.report.fp8 import share_of
from tests.backends.te.real import VERSION
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.ranks import Rank
from tests.tiny import microbatch
from tests.train import precision_schedule_work as work
from tests.train.precision_schedule_work import (
    LAST,
    SCHEDULE,
    SWITCH,
    built,
    continue_at_every_step,
    different,
    run_steps,
    saved,
)

TE = ["model.fp8_backend=te", f"model.te_version={VERSION}"]
BF16 = "model.fp8=False"
HAS_NVFP4 = hasattr(import_te().recipe, "NVFP4BlockScaling")
PAIRS = [
    ("tensorwise", "bf16"),
    ("tensorwise", "blockwise"),
    ("bf16", "mxfp8"),
    ("nvfp4" if HAS_NVFP4 else "mxfp8", "tensorwise"),
]
WIDER = {"hidden_size": 128, "ffn_hidden_size": 256, "micro_batch_size": 8, "global_batch_size": 16}
"""Sizes that are whole blocks, in tokens too."""


@pytest.fixture
def whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [s for s in work.SIZES if s.partition("=")[0].removeprefix("model.") not in WIDER]
    wider = [f"model.{key}={value}" for key, value in WIDER.items()]
    monkeypatch.setattr(work, "SIZES", [*sizes, *wider])
    monkeypatch.setattr(work, "microbatch", lambda seed, _: microbatch(seed, 8))


def settings_of(precision: str) -> list[str]:
    return [BF16] if precision == "bf16" else [f"model.fp8_recipe={precision}"]


@pytest.mark.usefixtures("whole_blocks")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_switch_is_a_stop_an_edit_and_a_restart(tmp_path: Path, first: str, second: str) -> None:
    entries = f"{{from: {SWITCH}, recipe: {second}}}"
    own = settings_of(first)
    if first == "bf16":
        entries, own = f"{{from: 0, recipe: bf16}}, {entries}", settings_of("mxfp8")
    whole = built(*TE, *own, f"{SCHEDULE}[{entries}]")
    stopped = built(*TE, *settings_of(first))
    losses = run_steps(whole, LAST)
    assert losses[:SWITCH] == run_steps(stopped, SWITCH)
    edited = built(*TE, *settings_of(second))
    state_dict.load_checkpoint(saved(stopped, tmp_path), edited, lambda _: None)
    assert losses[SWITCH:] == run_steps(edited, LAST)
    assert different(whole, edited) == []
    assert losses[SWITCH:] != run_steps(stopped, LAST)  # the switch matters
    share = share_of(whole.backend.spec, whole)
    assert share is not None and (share.share == 0) == (second == "bf16")


@pytest.mark.parametrize("more", [[], ["model.activations_checkpoint_granularity=full",
                                       "model.activations_checkpoint_method=uniform"]],
                         ids=["", "recomputed"])  # fmt: skip
def test_a_run_that_continues_has_the_same_bits(tmp_path: Path, more: list[str]) -> None:
    many = (
        "[{from: 0, recipe: bf16}, {from: 1, recipe: tensorwise}, {from: 3, recipe: mxfp8}, "
        "{from: 5, recipe: bf16}]"
    )
    settings = [*TE, "model.fp8_recipe=tensorwise", SCHEDULE + many, *more]
    found = continue_at_every_step(Rank(0, 1), settings, str(tmp_path))
    assert {what: names for what, names in found.items() if names} == {}


def test_layers_that_were_kept_out_of_fp8_stay_out(tmp_path: Path) -> None:
    kept = "model.first_last_layers_bf16=True"
    layers = "model.num_layers=3"
    entry = f"{SCHEDULE}[{{from: 1, recipe: mxfp8}}]"
    state = built(*TE, "model.fp8_recipe=tensorwise", kept, layers, entry)
    run_steps(state, 2)
    assert [bool(p.fp8) for p in state.backend.planned(state.model)] == [False, True, False]
    assert torch.isfinite(torch.tensor(run_steps(state, 3))).all()
