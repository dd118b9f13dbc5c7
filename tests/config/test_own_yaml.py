"""Test that any YAML of a user gives a tree or an error that the user can correct."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.load import load_all
from megafp8.config.nemo import nemo_keys
from megafp8.config.schema import all_keys
from megafp8.config.settings import flatten, known_sections
from megafp8.errors import UserError

KEYS = st.sampled_from([*all_keys(), *nemo_keys(), *known_sections(), "model.fp9", "x.y", "name.z"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 600),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.sampled_from(
        ["${model.seed}", "${nope}", "${.num_layers}", "${sum:1,2}", "${multiply:${model.seed},x}",
         "${sum:", "???", "bf16", "1e-5", "${name}", "${model}"]
    ),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["a", "enabled", 1]), st.integers(), max_size=2),
)  # fmt: skip


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        node = tree
        *sections, leaf = path.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                break
        else:
            node[leaf] = value
    return tree


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(KEYS, VALUES, max_size=5),
    st.sampled_from([None, ["pretrain_gpt", "_self_"], ["pretrain_gpt", {"model": "gpt3_125m"}]]),
    st.sampled_from(
        [[], ["model=gpt3_5b"], ["precision=fp32"], ["model.nsys_profile.enabled=True"]]
    ),
)
def test_any_yaml_ends_in_a_tree_or_a_user_error(
    leaves: dict[str, Any], defaults: list[Any] | None, overrides: list[str]
) -> None:
    tree = nested(leaves)
    start = {} if defaults is None else {"defaults": defaults}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.yaml").write_text(yaml.safe_dump(start | tree))
        try:
            loaded = load_all(overrides, Path(folder), "mine")
        except UserError as error:
            assert str(error)
            return
    given_keys = {setting.key for setting in flatten("", tree)}
    inert = {setting.key for setting in loaded.inert}
    assert given_keys <= inert | all_keys().keys() | {"hydra"}, "nothing is ignored in silence"
