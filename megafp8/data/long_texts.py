"""Tokenize a long text in parts, cut where the tokenizer cuts it anyway, to need little memory.

The `tokenizers` library needs 100 to 250 bytes for each character of the texts that it has at once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from megafp8.data.tokenize import JsonTokenizer, Tokenizer, byte_tokenizer

LONG = 1 << 19  # characters; a longer text is tokenized in parts of about as many
_AROUND = 256  # characters on each side of a cut, in which the tokenizer must agree to it
_TRIES = 1000
_NOTED = 1 << 24  # characters; a longer text that cannot be cut is worth a line
_NEXT = r"\x00-/:-@\[-^`{-\x7f\u3000-\u3002\uff01\uff0c"
_CUT = re.compile(rf"[^\W\d_](?=[{_NEXT}])")
"""After a letter, before a character that neither combines with it nor continues its word."""
Agrees = Callable[[str, str], bool]


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return `tokenizer.encode_batch(texts)`."""
    agrees = _rule_of(tokenizer) if any(len(text) > LONG for text in texts) else None
    if agrees is None:
        return [*tokenizer.encode_batch(texts)]
    rest = iter(tokenizer.encode_batch([text for text in texts if len(text) <= LONG]))
    all_ids: list[Sequence[int]] = []
    for text in texts:
        if len(text) <= LONG:
            all_ids.append(next(rest))
            continue
        ids = array("i")  # a list takes nine times as much
        for part in _parts(text, agrees):
            ids.extend(tokenizer.encode_batch([part])[0])
        all_ids.append(ids)
    return all_ids


def parts_to_train_on(text: str) -> Iterator[str]:
    """Yield parts of a text from which `train_tokenizer` learns what it learns from the whole."""
    return _parts(text, _rule_of_training()) if len(text) > LONG else iter((text,))


def noted(
    lists: Iterable[list[str]], tokenizer: Tokenizer, notify: Callable[[str], None]
) -> Iterator[list[str]]:
    """Yield the lists; the first text that is very long and cannot be cut is a line."""
    is_noted = not isinstance(tokenizer, JsonTokenizer)
    for texts in lists:
        text = "" if is_noted else max(texts, key=len)
        if len(text) > _NOTED and (longest := _uncut(text, _rule_of(tokenizer))) > _NOTED:
            is_noted = True
            notify(
                f"a text of {longest / 1e6:.0f} million characters is tokenized at once, as this "
                "tokenizer may join any parts of it, which takes some "
                f"{longest / 1e7:.0f} to {longest / 4e6:.0f} GB of memory"
            )
        yield texts


def _uncut(text: str, agrees: Agrees | None) -> int:
    """Return the characters before the first cut of a text."""
    return len(text) if agrees is None else len(next(_parts(text, agrees)))


@cache
def _rule_of_training() -> Agrees:
    agrees = _rule_of(byte_tokenizer())  # which cuts texts as every tokenizer trained here
    assert agrees is not None
    return agrees


def _rule_of(tokenizer: Tokenizer) -> Agrees | None:
    """Return what says whether two neighbouring texts are tokenized as their sum is.

    None: the tokenizer has no rule that cuts a text before it merges anything, or it changes texts
    in a way that may depend on what is far away.
    """
    rust = tokenizer._rust if isinstance(tokenizer, JsonTokenizer) else None
    if rust is None or type(rust.normalizer).__name__ not in ("NoneType", "NFC"):
        return None
    cutter = rust.pre_tokenizer
    if cutter is None:
        return None

    def words(text: str) -> list[str]:
        return [word for word, _ in cutter.pre_tokenize_str(text)]

    def agrees(left: str, right: str) -> bool:
        encode = tokenizer.encode  # which also knows of added tokens, inside of which no cut may be
        is_cut = words(left + right) == words(left) + words(right)
        return is_cut and encode(left + right) == encode(left) + encode(right)

    return agrees


def _parts(text: str, agrees: Agrees) -> Iterator[str]:
    start = 0
    while len(text) - start > LONG:
        for _, found in zip(range(_TRIES), _CUT.finditer(text, start + LONG - 1), strict=False):
            at = found.end()
            if agrees(text[max(start, at - _AROUND) : at], text[at : at + _AROUND]):
                yield text[start:at]
                start = at
                break
        else:
            break
    yield text[start:]
