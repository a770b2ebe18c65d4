"""Replace functions of other people's classes and modules, and put them back.

Invariants: a name is replaced once; the replacement has the original's name, signature and documentation; put
back is only what still is ours: whoever wrapped it after us keeps working, with our part doing nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

_IS_COROUTINE = 0x80  # inspect.CO_COROUTINE


class Patches:
    """What one module has replaced."""

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self._originals: dict[tuple[Any, str], Any] = {}
        self.is_on = False
        """Set it before `replace`. False after `undo`: what could not be put back calls the original."""

    def replace(
        self,
        owner: Any,
        name: str,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        as_made: bool = False,
    ) -> None:
        """Replace `owner.name` by `make(original)`; no effect if it is not there or replaced already.

        Args:
            owner: Class or module.
            name: Of the function in `owner`.
            make: Gives what is called instead.
            as_made: It is put there itself, for callers that try with how many arguments it can be called.
                It has the original's parameters, is a coroutine function if that is one, and minds `is_on`.
        """
        original = vars(owner).get(name)
        if original is None or not self.is_on or (owner, name) in self._originals:
            return
        replacement = make(original)
        if not as_made:
            make_replacement = self._coroutine if _is_coroutine(original) else self._function
            replacement = make_replacement(original, replacement)
        replacement = functools.wraps(original)(replacement)
        self._originals[owner, name] = original
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put back every function that still is ours."""
        self.is_on = False
        for (owner, name), original in list(self._originals.items()):
            if getattr(vars(owner).get(name), "__wrapped__", None) is original:
                setattr(owner, name, original)
                del self._originals[owner, name]

    def _function(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.is_on else original)(*args, **kwargs)

        return replacement

    def _coroutine(self, original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        async def replacement(*args: Any, **kwargs: Any) -> Any:
            return await (ours if self.is_on else original)(*args, **kwargs)

        return replacement


def _is_coroutine(function: Any) -> bool:
    """Servers look at that. As `inspect.iscoroutinefunction`, which is not light."""
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & _IS_COROUTINE)
