"""Call a function once a module has been imported, without importing it.

Knows the import system only. Invariants: the module's loader keeps its type; a callback that fails is
logged and does not fail the import; nothing is called before the module has run to its end.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

Callback = Callable[[ModuleType], object]


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` after the import of `name`; at once if it is imported."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _call(callback, module)
        return
    _finder.callbacks.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _call(callback: Callback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception:  # the boundary: an import must not fail because of us
        logger.warning("spangrad could not attach to %r", module.__name__, exc_info=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            self._watch(fullname, spec.loader)
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        def exec_module(module: ModuleType) -> None:
            if own is None:  # not `run`: of a proxy's loader (wrapt's hooks) that would call itself
                del loader.exec_module
            else:
                loader.exec_module = own
            run(module)
            while callbacks := self.callbacks.pop(name, []):  # a callback may add others
                for callback in callbacks:
                    _call(callback, module)

        try:
            run = loader.exec_module
            own = vars(loader).get("exec_module")
            loader.exec_module = exec_module
        except (AttributeError, TypeError):  # somebody's loader that has or takes no such thing
            logger.warning("spangrad could not watch the import of %r", name, exc_info=True)


_finder = _Finder()
