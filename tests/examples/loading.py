"""Load an example's functions as a training run does."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spangrad.user_code import load_callable

EXAMPLES = Path(__file__).parents[2] / "examples"


def from_example(example: str, name: str) -> Callable[..., Any]:
    """`name` is `module:function`."""
    module, function = name.split(":")
    return load_callable(f"{example}/{module}.py:{function}", str(EXAMPLES))


def module_of(example: str, name: str) -> Any:
    """A module of an example whose name no other example has."""
    folder = str(EXAMPLES / example)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
