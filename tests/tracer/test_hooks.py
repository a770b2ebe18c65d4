"""Imports that `hooks.py` watches work as without it, whoever else watches them."""

import importlib
import sys
import uuid
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spangrad.tracer.hooks import when_imported


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"watched_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_a_module_that_wrapt_watches_too_is_imported(module: str, is_ours_first: bool) -> None:
    wrapt: Any = pytest.importorskip("wrapt")
    seen: list[str] = []
    wrapt.register_post_import_hook(lambda found: seen.append("wrapt"), module)
    when_imported(module, lambda found: seen.append("ours"))
    asked = ["spangrad", "wrapt"] if is_ours_first else ["wrapt", "spangrad"]

    def place(finder: Any) -> int:
        top = type(finder).__module__.partition(".")[0]
        return asked.index(top) if top in asked else len(asked)

    sys.meta_path.sort(key=place)
    assert importlib.import_module(module).value == 1
    assert sorted(seen) == ["ours", "wrapt"]


def test_a_loader_that_takes_no_hook_loads_as_ever() -> None:
    module = "loaded_without_attributes"

    class Loader:
        __slots__ = ()

        def create_module(self, spec: ModuleSpec) -> None:
            return None

        def exec_module(self, module: ModuleType) -> None:
            vars(module)["value"] = 2

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            loader: Any = Loader()
            return ModuleSpec(name, loader) if name == module else None

    finder: Any = Finder()
    sys.meta_path.append(finder)  # ours is asked first
    when_imported(module, lambda found: None)
    try:
        assert importlib.import_module(module).value == 2
    finally:
        sys.meta_path.remove(finder)
        sys.modules.pop(module, None)
