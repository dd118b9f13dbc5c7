"""Turn settings of NeMo, Megatron and Bridge into ours, layer by layer, before layers are merged.

`translate` reads one layer: what a setting means whatever other layers say. `beside_others` reads
all layers: what a setting of NeMo means only with some value of another key. Both return layers of
our settings, so that neither the merge nor a rule knows another program's names. The start of a run
names what was translated. The names themselves are in `megatron_names`, nemo_inert.yaml and `gelu`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megafp8.config import gelu, megatron_names
from megafp8.config.errors import DEFAULT, Origin, SettingError
from megafp8.config.keys import Values, needs
from megafp8.config.layers import Layer
from megafp8.config.merged import NO_LAYER, Merged, merge
from megafp8.config.nemo import nemo_keys, nemos_file
from megafp8.config.rules import Unused
from megafp8.config.settings import UNREADABLE, Setting, optional_sections, read_value
from megafp8.config.values import plain
from megafp8.specs.data import MOCK_DATA

SAMPLES = "model.data.seq_length"
SEQUENCE = "model.encoder_seq_length"
VALIDATES, VALIDATES_ON = "trainer.val_check_interval", "trainer.limit_val_batches"
POSITIONS = "model.max_position_embeddings"
IMPL, PREFIX = "model.data.data_impl", "model.data.data_prefix"
MASK_FUSION = "model.get_attention_mask_from_fusion"
DISTRIBUTED = "mcore_distributed_optim"
_VALUES: dict[str, dict[Any, Any]] = {
    "model.optim.name": {DISTRIBUTED: "distributed_fused_adam"},
    "model.position_embedding_type": {"ALiBi": "alibi", "RoPE": "rope"},
    "model.fsdp_grad_reduce_dtype": {"fp32": 32, "fp16": 16},
}
"""NeMo's values by key. Both optimizers are Adam with decoupled weight decay whose states are
sharded over replicas; NeMo compares the names of positions without their case."""

_IDLE_IN_NEMO = (
    # In NeMo these graphs are Transformer Engine's and change times only. Here they would make
    # `auto` leave Transformer Engine for native layers, unless someone chose these.
    ("model.enable_cuda_graph", "model.fp8_backend", "native"),
    # NeMo then gives its layers no mask, and they attend over whole samples.
    ("model.data.reset_attention_mask", MASK_FUSION, False),
    # NeMo rotates by the place in the sample, and its biases are of distances in the sample.
    ("model.data.reset_position_ids", "model.position_embedding_type", "learned_absolute"),
)
"""Keys that a NeMo file may set without effect, unless another key has a value."""

LAUNCHER_GIVES = "NeMo's launcher gives the value"
LAUNCHER_PATHS = ("data_dir", "base_results_dir", "launcher_scripts_path")
"""Names that the launcher's files refer to, as `${data_dir}`; the launcher gives their values."""

_OWN_NAME = re.compile(r"\$\{training\.")


class Translated(NamedTuple):
    """Hold a setting as it was written, and the value that stands for it."""

    setting: Setting
    value: Any


@dataclass
class Translation:
    """Hold settings of ours, and what is reported about those for which they stand.

    Attributes:
        layers: The settings by layers.
        translated: The given values that another program spells in another way.
        idle: The given settings that had no effect in the other program, and have none here.
        notes: Lines about the translations.
        problems: Settings that contradict each other.
    """

    layers: list[Layer] = field(default_factory=list)
    translated: list[Translated] = field(default_factory=list)
    idle: list[tuple[Setting, Unused]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[SettingError] = field(default_factory=list)

    def add(self, *settings: Setting) -> None:
        """Add settings that replace those of all layers, whatever layer has them."""
        self.layers.append(Layer(NO_LAYER, settings))


# --- one layer ------------------------------------------------------------------------------------


def translate(layers: Sequence[Layer]) -> Translation:
    """Return each layer in the schema's spelling.

    `${training.model.seed}` is `${model.seed}`: NeMo's launcher puts a file below `training`. A
    file that validates on no batches may leave the steps between two validations open.
    """
    found = Translation()
    for layer in layers:
        found.problems += _contradictions(layer.settings)
        found.layers.append(Layer(layer.origin, tuple(_translated(layer.settings, found))))
    return found


def _translated(settings: Sequence[Setting], found: Translation) -> Iterator[Setting]:
    given = [replace(s, value=_without_root(s.value)) if _refers(s.value) else s for s in settings]
    said = {s.key: s.value for s in given}
    for setting in given:
        key, value = setting.key, setting.value
        meaning = megatron_names.meaning(key, value)
        if meaning is not None:
            for name, item in meaning.items():
                found.translated.append(Translated(setting, f"{name}={item}"))
                yield Setting(name, item, setting.origin)
            continue
        if (key, value) == ("model.normalization", "layernorm1p"):
            value = "layernorm"
            yield Setting("model.layernorm_zero_centered_gamma", True, setting.origin)
        if isinstance(value, str):
            value = _VALUES.get(key, {}).get(value, value)
        if key == "model.optim.dtype" and said.get("model.optim.name") == DISTRIBUTED:
            value = "fp32"  # Megatron's optimizer ignores this key and has FP32 states
        if (key, value) == (VALIDATES, None) and said.get(VALIDATES_ON) == 0:
            value = 1
        if value is not setting.value and value != setting.value:
            found.translated.append(Translated(setting, value))
            setting = Setting(key, value, setting.origin)
        yield setting


def _contradictions(settings: Sequence[Setting]) -> list[SettingError]:
    origins = {s.key: s.origin for s in settings}
    found = megatron_names.contradictions((s.key, s.value) for s in settings)
    return [SettingError(*one, origin=origins[one.key]) for one in found]


def _refers(value: Any) -> bool:
    return not isinstance(value, (bool, int, float)) and "${training." in str(value)


def _without_root(value: Any) -> Any:
    if isinstance(value, str):
        return _OWN_NAME.sub("${", value)
    if isinstance(value, list):
        return [_without_root(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_root(item) for key, item in value.items()}
    return value


# --- a setting beside those of other layers -------------------------------------------------------


def beside_others(layers: Sequence[Layer]) -> Translation:
    """Return one more layer for each setting that means something else beside other settings.

    The settings that a run has recorded are not a file of NeMo, and are left as they are.
    """
    found = Translation()
    given = {s.key for layer in layers if layer.origin != DEFAULT for s in layer.settings}
    if any(layer.origin.is_nemos for layer in layers) or given & _MEANS_MORE:
        together = merge(layers)
        for read in (without_idle, with_tanh_gelu, with_length_of_samples, with_mock_data):
            read(together, found)
    return found


_MEANS_MORE = {gelu.FUSION, gelu.NAME, gelu.CORE, SAMPLES, IMPL}
"""Keys with such a meaning in any file, and on the command line."""


def without_idle(together: Merged, found: Translation) -> None:
    """Switch off what a NeMo file asks for without effect in NeMo."""
    if nemos_file(together.origins) is None:
        return
    for key, other, value in _IDLE_IN_NEMO:
        origin = together.origins.get(key, DEFAULT)
        if not origin.is_nemos or together.read(key) is not True:
            continue
        with suppress(*UNREADABLE):  # `Merged.values` reports it
            has = read_value(together.tree, other)
            if has != value:
                found.add(Setting(key, False, NO_LAYER))
                idle = Unused(key, needs(other, value), f"{other}={plain(has)}")
                found.idle.append((Setting(key, True, origin), idle))


def with_tanh_gelu(together: Merged, found: Translation, nemos: Origin | None = None) -> None:
    """Ask for the tanh form of GELU where a setting of NeMo means it.

    `nemos` is the layer that is a file of NeMo; None: the weakest that has a key of NeMo's alone.
    """
    nemos = nemos or nemos_file(together.origins)
    asks = gelu.asks_for_tanh(together.read, together.origins, nemos)
    if asks is not None:
        found.add(Setting(gelu.GELU, True, asks.origin))
        found.translated.append(Translated(Setting(*asks), gelu.TANH_GELU))


def with_length_of_samples(together: Merged, found: Translation) -> None:
    """Give sequences the length of samples where a file states a shorter one for these.

    NeMo cuts samples by `model.data.seq_length`, and makes a model of `model.encoder_seq_length`
    positions. So the model keeps that number of positions here. A longer length is left as it is,
    which a rule reports.
    """
    samples, sequence, positions = map(together.read, (SAMPLES, SEQUENCE, POSITIONS))
    whole = all(type(length) is int for length in (samples, sequence, positions))
    if not whole or not 0 < samples < sequence:
        return
    origin = together.origins.get(SAMPLES, DEFAULT)
    found.add(
        Setting(SEQUENCE, samples, origin),
        Setting(POSITIONS, positions, together.origins.get(POSITIONS, DEFAULT)),
    )
    found.notes.append(
        f"translated: {SAMPLES}={samples} ({origin}): {SEQUENCE}={samples} instead of {sequence}, "
        f"and {POSITIONS}={positions}"
    )


def with_mock_data(together: Merged, found: Translation) -> None:
    """Let `model.data.data_prefix` say `mock` where NeMo's `data_impl` does.

    NeMo then reads none of the data that the prefix names. It is a problem if a stronger layer
    names data, which would not be read.
    """
    origin, names_data = (together.origins.get(key, DEFAULT) for key in (IMPL, PREFIX))
    if origin == DEFAULT or together.read(IMPL) != MOCK_DATA:
        return
    found.add(Setting(IMPL, MOCK_DATA, NO_LAYER))
    given = together.read(PREFIX)
    if names_data.strength > origin.strength and given != MOCK_DATA:
        reason = f"is not read with {IMPL}={MOCK_DATA} ({origin})"
        hint = f"Give {IMPL}=mmap too, or leave it out"
        found.problems.append(SettingError(PREFIX, given, reason, hint, origin=names_data))
        return
    found.add(Setting(PREFIX, MOCK_DATA, origin))
    found.notes.append(
        f"translated: {IMPL}={MOCK_DATA} ({origin}): {PREFIX}={MOCK_DATA}; no data are read"
    )


# --- keys without effect, and paths of NeMo's launcher --------------------------------------------


def inert_settings(merged: Merged, values: Values) -> tuple[list[Setting], list[SettingError]]:
    """Return NeMo's keys without effect that were given, and errors for those of wrong values.

    `values` are those of the schema's keys.
    """
    inert, refused = list[Setting](), list[SettingError]()
    for path, origin in merged.origins.items():
        if path in optional_sections():
            inert.append(Setting(path, None, origin))
        key = nemo_keys().get(path)
        if key is None:
            continue
        try:
            value = read_value(merged.tree, path)
        except UNREADABLE as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            refused.append(SettingError(path, None, reason, key.hint, origin=origin))
            continue
        if key.passes(value, values):
            inert.append(Setting(path, value, origin))
        else:
            refused.append(key.problem(value, origin))
    order = {key: number for number, key in enumerate(nemo_keys())}
    return sorted(inert, key=lambda setting: order.get(setting.key, len(order))), refused


def launcher_paths_once(problems: Sequence[SettingError]) -> list[SettingError]:
    """Return the problems with one for all settings that refer to a path of the launcher's.

    NeMo's launcher fills in `${data_dir}` and others; without it they have no value.
    """
    missing = {name: f"mandatory value: {name}" for name in LAUNCHER_PATHS}
    users = [p for p in problems if any(text in p.reason for text in missing.values())]
    if not users:
        return list(problems)
    names = {n: None for p in users for n, text in missing.items() if text in p.reason}
    give = " and ".join(f"{name}=PATH" for name in names)
    found = SettingError(
        " and ".join(names),
        None,
        f"{LAUNCHER_GIVES}, and {', '.join(dict.fromkeys(p.key for p in users))} refer to it",
        f"Give {give} on the command line, or write the paths into the file",
        origin=next((p.origin for p in users if p.origin), ""),
    )
    return [found, *(p for p in problems if p not in users)]
