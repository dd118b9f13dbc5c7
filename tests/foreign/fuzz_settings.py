"""Try settings: each key with values of every kind, right, wrong and absurd."""

from __future__ import annotations

from random import Random

from megafp8.config.errors import CombinedConfigError, SettingError
from megafp8.config.keys import Key
from megafp8.config.load import load
from megafp8.config.resolve import resolve
from megafp8.config.schema import all_keys
from tests.foreign.fuzz import Tally, attempt

GROUP = 10
"""The number of settings that are given together; the errors of all are reported together."""

NEGATIVE = {
    "exp_manager.checkpoint_callback_params.save_top_k",
    "model.fp8_margin",
    "model.optim.moment_exponent",
    "trainer.max_epochs",
}
"""The keys of numbers for which some negative value has a meaning."""

NOT_FINITE = ("nan", "inf", "-inf", "1e400", "-1e400")
NO_NUMBERS = ("abc", "[1]", "{a:1}", "'1 2'", "''", "0x", "1e", "--1", "[[[]]]")
LARGE = (str(2**70), str(10**30), "9" * 400, "1e30", "1e300")
BROKEN = (
    "[" * 300 + "]" * 300,
    "${nope}",
    "${.x}",
    "${.}",
    "???",
    "${multiply:a,b}",
    "{a:{b:{c:1}}}",
)
FINE = ("0", "1", "2", "8", "0.5", "1e-5", "True", "False", "null", "fp32", "bf16", "a", "[1,2]")
POOL = (*NOT_FINITE, *NO_NUMBERS, *LARGE, *BROKEN, *FINE, "-1", "-0.5", "-7", "2.7", "1,2,3", "~")


def try_settings(tally: Tally, count: int, random: Random) -> None:
    """Try `count` settings in groups, and count how each one ends."""
    keys = list(all_keys().values())
    deck: list[Key] = []
    for _ in range(-(-count // GROUP)):
        if len(deck) < GROUP:
            deck = random.sample(keys, len(keys))
        group = [deck.pop() for _ in range(min(GROUP, len(keys)))]
        _try_group(tally, [(key, _value(key, random)) for key in group])


def _value(key: Key, random: Random) -> str:
    if random.random() < 0.2:
        numbers = (random.randint(-(2**64), 2**64), random.gauss(0, 10 ** random.randint(0, 20)))
        return str(random.choice(numbers))
    if random.random() < 0.2 and isinstance(key.default, str | int | float):
        return str(key.default)
    return random.choice(POOL)


def _try_group(tally: Tally, group: list[tuple[Key, str]]) -> None:
    words = [f"{key.path}={value}" for key, value in group]
    refused: set[str] = set()

    def call() -> str | None:
        try:
            resolve(load(words), lambda: False)
        except CombinedConfigError as error:
            refused.update(problem.key for problem in error.problems)
        except SettingError as error:
            refused.add(error.key)
        for key, value in group:
            if key.path not in refused and (why := absurd(key, value)):
                return f"{key.path}={value[:40]}, {why}"
        return None

    one = Tally()
    attempt(one, "settings", " ".join(word[:80] for word in words), call)
    if one.failures:
        tally.failures += one.failures
        tally.add("settings", "failed")
    num_refused = sum(key.path in refused for key, _ in group)
    tally.add("settings", "refused", num_refused)
    tally.add("settings", "read", len(group) - num_refused - len(one.failures))


def absurd(key: Key, value: str) -> str | None:
    """Return why a value cannot have a meaning for a key, judged by its type; None if it might."""
    kind, base = key.type_text, key.type_text.removesuffix(", or null")
    if value == "null":
        if key.path == "model.fp8":  # no format of Megatron's is no FP8
            return None
        return None if kind != base or kind == "a value" or key.required else "null for a value"
    if base == "True or False" and value not in ("True", "False", "0", "1"):
        return "neither True nor False"
    if base not in ("a whole number", "a number"):
        return None
    number = _number(value)
    if number is None:
        return None if value.startswith("${") else "no number"
    if number != number or number in (float("inf"), float("-inf")):
        return "not finite"
    if base == "a whole number" and number != int(number):
        return "a fraction"
    if abs(number) > 2**64:
        return "beyond 64 bits"
    return "negative" if number < 0 and key.path not in NEGATIVE else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
