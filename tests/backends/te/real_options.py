"""Walk all options of the model: Transformer Engine's layers compute each, or the table refuses it.

An option that they did not know would otherwise be ignored. So each option's other value, and each
choice that it has, is asked for with `model.fp8_backend=te`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib

import pytest
import torch

from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.schema import all_keys
from megafp8.config.te_layers import findings
from megafp8.config.te_settings import settings_of
from megafp8.models.init import pieces_of
from megafp8.parallel.mesh import single_rank
from megafp8.specs import RunSpec
from megafp8.train.build import build
from megafp8.train.state import TrainState
from megafp8.train.step import forward_backward
from tests.backends.te.real import forget_other_models as forget_other_models
from tests.backends.te.real import need_head_norms, spec_of
from tests.backends.te.real_nemo import assert_near, logical
from tests.config import helpers
from tests.models.test_model_options import BASE, MARKED, OTHER, VOCAB
from tests.tiny import microbatch

run_spec = functools.cache(helpers.run_spec)  # loading settings takes most of the time here
TE, SIZES = "model.fp8_backend=te", [*BASE[1:], "model.init_method_std=0.1"]
CHOICES = ("activation", "normalization", "position_embedding_type", "transformer_block_type")
"""The options whose values are names."""
REFUSED = {
    "openai_gelu=False",
    "add_qkv_bias=True",
    "yarn_rotary_scaling_factor=2.0",
    "yarn_beta_fast=8.0",
    "yarn_beta_slow=4.0",
    "yarn_attention_factor=2.0",
    "transformer_block_type=post_ln",
    "ffn_dropout=0.2",
    "apply_query_key_layer_scaling=True",
    "fp32_residual_connection=True",
}
DRAWN = {"hidden_dropout=0.2", "attention_dropout=0.2"}
"""Only training draws, and attention's draws are those of each backend; they are compared without
dropout, as in validation."""
WITH = {"apply_query_key_layer_scaling": ["trainer.precision=16"]}


def asked() -> dict[str, list[str]]:
    """The settings of each case, by its option and value."""
    found = {}
    for name, (value, more) in OTHER.items():
        values = [value]
        if name in CHOICES:
            valid = all_keys()[f"model.{name}"].valid
            assert valid is not None
            values += [word for word in re.findall(r"[\w-]+", valid.text) if word != "or"]
        for one in values:
            # The default job's tanh form has no effect without GELU.
            gated = [] if name != "activation" or "ge" in str(one) else ["model.openai_gelu=False"]
            rest = [word for word in more if not word.startswith("model.openai_gelu")]
            found[f"{name}={one}"] = [*rest, *gated, *WITH.get(name, []), f"model.{name}={one}"]
    return found


CASES = asked()


def refusals(given: list[str]) -> list[str]:
    """The options that the checks refuse, each by a row of Transformer Engine's table."""
    try:
        run_spec(*SIZES, *given, TE)
    except (SettingError, CombinedConfigError) as error:
        problems = error.problems if isinstance(error, CombinedConfigError) else [error]
        values = settings_of(run_spec(*SIZES, *given, "model.fp8_backend=native"))
        reasons = {found.reason for found in findings(values)}
        assert {problem.reason for problem in problems} <= reasons
        return [problem.key.removeprefix("model.") for problem in problems]
    return []


def state_of(given: list[str], backend: str) -> TrainState:
    """The model of some settings in FP32, with the same random weights for each backend."""
    model = run_spec(*SIZES, *given, f"model.fp8_backend={backend}").model
    plain: RunSpec = spec_of(backend, None)
    sized = dataclasses.replace(model, vocab_size=VOCAB)
    state = build(dataclasses.replace(plain, model=sized), single_rank())
    with torch.no_grad():
        for param in state.model.parameters():
            for piece in pieces_of(param):
                drawn = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
                part = param[piece.local]
                part.add_(0.1 * torch.randn(part.shape, generator=drawn))
    return state


def test_every_option_and_choice_is_asked_for() -> None:
    assert {case.partition("=")[0] for case in CASES} == set(OTHER) >= MARKED
    assert CASES.keys() >= REFUSED | DRAWN | {"activation=swiglu", "position_embedding_type=none"}


@pytest.mark.parametrize("case", CASES)
def test_an_option_is_computed_or_refused(case: str) -> None:
    """FP32, of the same random weights: the loss within 1e-6 of our own layers', and every gradient
    within 1e-5 of its largest number. Our own layers compute what the option says."""
    given = CASES[case]
    if case in REFUSED:
        yarn = "yarn_rotary_scaling_factor"  # its other options come with it
        name = case.partition("=")[0]
        assert refusals(given) == [yarn if name.startswith("yarn") else name]
        return
    if case == "qk_layernorm=True":
        need_head_norms()
    assert refusals(given) == []
    if case in DRAWN:
        given = []
    theirs, ours = state_of(given, "te"), state_of(given, "native")
    loss, other = (forward_backward(state, [microbatch(0)])[0].item() for state in (theirs, ours))
    assert loss == pytest.approx(other, rel=1e-6)
    for state in (theirs, ours):
        state.masters.collect_grads()
    assert_near(logical(theirs), logical(ours), 1e-5)
