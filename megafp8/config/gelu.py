"""Say which form of GELU the settings of a NeMo file ask for: the exact one or the tanh form.

`model.activation=gelu` alone is the exact form, x * Phi(x), in NeMo and here. `model.openai_gelu`
is the tanh form in both. `model.bias_activation_fusion`, NeMo's default, takes a kernel there that
computes the tanh form whatever `openai_gelu` says, also where a file leaves the key out; so do
Transformer Engine's whole layers.
`model.onnx_safe` is the exact form in other operations, and NeMo does not read it with GELU.
Without these rules a file of NeMo would train another function here, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megafp8.config.errors import DEFAULT, Origin
from megafp8.config.keys import Values
from megafp8.config.values import GELUS, spell_activation

ACTIVATION, GELU, FUSION = "model.activation", "model.openai_gelu", "model.bias_activation_fusion"
BIAS, NAME, CORE = "model.bias", "model.name", "model.mcore_gpt"
TANH_GELU = f"{GELU}=True, the tanh form of GELU"
_WHOLE_TE_LAYERS = "megatron_gpt_full_te_layer_autocast"


class Asks(NamedTuple):
    """Name a key of NeMo that asks for another form of GELU, its value, and its layer."""

    key: str
    value: Any
    origin: Origin


def asks_for_tanh(
    read: Callable[[str], Any], origins: Mapping[str, Origin], nemos: Origin | None
) -> Asks | None:
    """Return the setting of NeMo that asks for GELU's tanh form where `openai_gelu` is False.

    Transformer Engine's whole layers are what NeMo makes for one name of a model, and with
    `transformer_engine` without Megatron Core. A stronger layer that sets `openai_gelu` decides
    itself.

    Args:
        read: Returns the value of a key; None if it has none.
        origins: The layer of each key that a layer sets.
        nemos: The layer that is a file of NeMo, whose keys have NeMo's defaults; None: there is
            none.

    Returns:
        The setting, which can be a default of NeMo; None if there is none.
    """
    activation = read(ACTIVATION)
    if not isinstance(activation, str) or spell_activation(activation) not in GELUS:
        return None
    if read(GELU) is not False:
        return None
    layers = dict(origins)
    if FUSION not in layers and nemos is not None:
        text = f"NeMo's default, as {nemos} leaves the key out"
        layers[FUSION] = Origin(text, nemos.strength)
    fuses = read(FUSION) is True or FUSION not in origins
    without_core = read(CORE) is False and read("model.transformer_engine") is True
    asks = {
        FUSION: fuses and not _lacks_bias(activation, read(BIAS)),
        NAME: read(NAME) == _WHOLE_TE_LAYERS,
        CORE: without_core,
    }
    own = origins.get(GELU, DEFAULT).strength
    asking = (key for key, does in asks.items() if does and key in layers)
    key = next((key for key in asking if layers[key].strength >= own), None)
    if key is None:
        return None
    return Asks(key, True if key == FUSION else read(key), layers[key])


def can_fuse(value: Any, values: Values) -> bool:
    """Whether NeMo takes a value of `bias_activation_fusion` with the other settings."""
    return value is True and not _lacks_bias(values[ACTIVATION], values[BIAS])


def _lacks_bias(activation: str, bias: bool | None) -> bool:
    """Whether NeMo has no fused kernel: plain GELU is fused with a bias alone."""
    return activation == "gelu" and bias is False
