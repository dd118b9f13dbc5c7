"""Let Triton's interpreter prepare its language once a launch, in place of once a function call.

It looks through all names of the language at each call of a device function, though the launch has
replaced them already; that takes a third of the time of our kernels' tests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def prepare_once() -> None:
    """Change the interpreter of this process; without effect where Triton compiles kernels."""
    import triton.language as tl
    from triton.runtime import interpreter

    names = vars(interpreter)
    prepare: Callable[[Any], Any] = names["_patch_lang"]
    launch = interpreter.GridExecutor.__call__
    prepared: set[object] = set()  # in this launch

    @functools.cache
    def languages(function: Any) -> frozenset[str]:
        modules = [each for each in function.__globals__.values() if inspect.ismodule(each)]
        return frozenset(each.__name__ for each in modules if each is tl or each is tl.core)

    def once(function: Any) -> Any:
        if not prepared:  # the kernel itself, whose changes are undone after the launch
            prepared.add("launch")
            return prepare(function)
        if languages(function) not in prepared:
            prepared.add(languages(function))
            prepare(function)
        return None

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            prepared.clear()

    names["_patch_lang"] = once
    interpreter.GridExecutor.__call__ = launched
