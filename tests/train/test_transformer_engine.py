"""Whole runs with Transformer Engine's own Python code on a CPU, each in its own process."""

from __future__ import annotations

import signal

import pytest

from megafp8.specs.te_versions import DEFAULT_VERSION
from tests.te_sources import need_sources
from tests.train.runs import TWO_RANKS, Place, assert_same
from tests.train.test_opt_levels import LEVEL, SHORT, assert_killed_is_whole

TE = ("model.fp8_backend=te", "model.openai_gelu=True", "model.ffn_dropout=0.0")
WHAT = f"Transformer Engine {DEFAULT_VERSION}, its own Python; kernels emulated on the CPU"


def slow(value: object) -> object:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _sources() -> None:
    need_sources(DEFAULT_VERSION)


@pytest.mark.parametrize("ranks", [[], pytest.param(TWO_RANKS, marks=pytest.mark.slow)])
def test_a_run_says_what_it_is(place: Place, ranks: list[str]) -> None:
    """Header and summary name the backend; the FP8 fraction is that counted at the products."""
    done = place.run(*TE, *ranks, "trainer.max_steps=4")
    assert done.code == 0, done.output
    assert f"; {WHAT}" in done.output and "te emulated" in done.output
    summary = place.summary()
    assert WHAT in summary["precision"]
    planned, counted = summary["fp8_share_planned"], summary["fp8_share_of_gemm_flops"]
    assert summary["fp8_share_by_kernel"] == {"te emulated": counted}
    assert counted == pytest.approx(planned, rel=1e-6) and planned > 0.5


def test_a_run_keeps_documents_apart(place: Place) -> None:
    """In training and in validation; the header says by what, and losses differ from those of
    whole samples."""
    found = {}
    for name, apart in (("apart", "True"), ("whole", "False")):
        flags = [f"model.data.reset_attention_mask={apart}", "trainer.max_steps=2"]
        done = place.run(*TE, *flags, f"exp_manager.name={name}")
        assert done.code == 0, done.output
        assert ("by Transformer Engine's thd and padding_causal" in done.output) is (
            apart == "True"
        )
        assert "validation loss" in done.output
        found[name] = [row["loss"] for row in place.metrics(name) if "loss" in row]
    assert len(found["apart"]) == 2 and found["apart"] != found["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [["killed_in_write", 3], ["signalled", int(signal.SIGTERM), 5]])
def test_a_run_that_ends_early_continues_bit_for_bit(
    place: Place, tmp_path_factory: pytest.TempPathFactory, fault: list[object]
) -> None:
    """Dropout is on; its masks follow from the position in the run, also after a restart."""
    undisturbed = Place(place.driver, place.data, tmp_path_factory.mktemp("undisturbed"))
    assert undisturbed.run(*TE).code == 0
    assert place.run(*TE, fault=fault).code != 0
    done = place.run(*TE)
    assert done.code == 0, done.output
    assert_same(place, undisturbed)


def test_the_preset_of_fp8_lm_with_it_says_what_runs(place: Place) -> None:
    done = place.run("precision=fp8_lm_te", *TE[1:], "trainer.max_steps=2")
    assert done.code == 0, done.output
    assert f"; {WHAT}" in done.output
    assert "FP8-LM: gradients of linears in fp8, their masters in fp16" in done.output
    assert ": 6.0 bytes a parameter of the linears" in done.output
    assert "validation loss" in done.output


@pytest.mark.parametrize("level", [*map(slow, ("O1", "O3")), "O2"])
def test_a_killed_run_at_a_level_continues_bit_for_bit(place: Place, level: str) -> None:
    """A run is killed between two microbatches of its fourth step, and begins that step again."""
    flags = [*TE, *SHORT, f"{LEVEL}={level}", "model.optim.stochastic_rounding=True"]
    done = place.run(*flags, "exp_manager.name=whole")
    assert done.code == 0, done.output
    killed = place.run(*flags, "exp_manager.name=killed", fault=["killed_in_microbatch", 4, 1])
    assert killed.code == -9 and place.steps("killed") == [2], killed.output
    assert place.run(*flags, "exp_manager.name=killed").code == 0
    assert_killed_is_whole(place)


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ([f"{LEVEL}=O2", "model.fsdp=True"], "model.fsdp=True"),
        ([f"{LEVEL}=O2", "model.fp8_params=True"], "model.fp8_params=True"),
    ],
)
def test_what_no_level_can_be_with_is_refused_by_name(
    place: Place, flags: list[str], key: str
) -> None:
    done = place.run(*TE, *flags)
    assert done.code == 2 and key in done.output and "Traceback" not in done.output, done.output


def test_a_model_that_its_layers_do_not_make_is_refused_before_they_are_loaded(
    place: Place,
) -> None:
    done = place.run(TE[0], TE[2], "model.openai_gelu=False", "model.te_version=9.9.9")
    assert done.code == 2 and "tanh form" in done.output


def test_a_version_that_is_not_there_is_named(place: Place) -> None:
    done = place.run(*TE, "model.te_version=2.9.9")
    assert done.code == 2 and "transformer-engine=2.9.9" in done.output, done.output
    assert not place.dir().exists()
