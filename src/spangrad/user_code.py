"""Load a function that a config or a command line names: an agent, a reward, a verifier.

`path/to/file.py:name` loads a file under its own module name (its folder goes on
`sys.path`, so that it can import its neighbours); `package.module:name` imports.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spangrad.errors import ConfigError


def load_callable(spec: str, base_dir: str = ".") -> Callable[..., Any]:
    """The function that `spec` names.

    Raises:
        ConfigError: No such file, module or name, or it can't be called.
    """
    target, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{spec!r} names no function; expected 'path/to/file.py:name' or 'package.module:name'"
        )
    try:
        module = (
            _load_file(Path(base_dir, target)) if target.endswith(".py") else importlib.import_module(target)
        )
    except ImportError as error:
        raise ConfigError(f"{spec!r} can't be imported: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"{spec!r}: {target!r} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def is_async(function: Callable[..., Any]) -> bool:
    """True if calling it gives something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an instance with an async __call__
    )


def _load_file(file: Path) -> Any:
    file = file.resolve()
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} does not exist")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"spangrad_user_{abs(hash(str(file)))}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
