"""Triton's interpreter, made quicker: what it does to Triton's language at every call is done once a launch.

It tells the language's functions that they are interpreted by replacing some hundred attributes of its modules: at a
launch, and anew, with the same outcome, whenever a kernel calls a function such as tl.sum. That took a third of its
time.
"""

from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Leave out what has been done. Changes nothing in a Triton whose interpreter is made in another way."""
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang = _missing_only(interpreter._patch_lang, interpreter._LangPatchScope)


def _missing_only(patch: Any, nothing: Any) -> Any:
    @cache
    def languages(fn: Any) -> tuple[Any, ...]:
        """The modules that `patch` sees to: those among the globals of `fn`."""
        return tuple(module for module in (tl, tl.core) if any(value is module for value in fn.__globals__.values()))

    def patch_missing(fn: Any) -> Any:
        there = languages(fn)
        if there and not any(tl.core.is_builtin(module.load) for module in there):
            return nothing()  # a scope that has nothing to restore
        return patch(fn)

    return patch_missing
