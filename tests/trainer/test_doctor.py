import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spangrad.trainer import doctor
from spangrad.trainer.doctor import Check, State, examine, is_broken

ROOT = Path(__file__).resolve().parents[2]


def test_looks_for_everything_that_the_package_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [re.split(r"[<>=!\[; ]", requirement)[0] for requirement in project["dependencies"]]
    assert sorted(doctor.REQUIRED) == sorted(required)
    extras = project["optional-dependencies"]
    optional = {
        re.split(r"[<>=!\[; ]", requirement)[0]: extra
        for extra in ("train", "agents")
        for requirement in extras[extra]
    }
    assert optional == doctor.OPTIONAL


def test_every_line_that_is_not_ok_says_what_to_do(tmp_path: Path) -> None:
    checks = examine(tmp_path / "not" / "there" / "yet")
    assert not [check for check in checks if check.state is not State.OK and not check.fix]
    assert {"python", "store", "loopback", "cores", "disk"} <= {check.name for check in checks}
    assert not is_broken(checks), [check for check in checks if check.state is State.BROKEN]


def test_only_a_broken_line_makes_it_fail() -> None:
    lines = [Check("works", "x", state, "") for state in (State.OK, State.HINT, State.MISSING)]
    assert not is_broken(lines)
    assert is_broken([*lines, Check("works", "x", State.BROKEN, "", "do something")])


def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL", {"surely-not-installed-here": "train"})
    (line,) = [check for check in examine() if check.name == "surely-not-installed-here"]
    assert line.state is State.MISSING
    assert line.fix == "pip install 'spangrad[train]'"


def test_a_plugin_that_is_shut_out_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (line,) = [check for check in examine() if check.name == "vllm plugin"]
    assert line.state is State.BROKEN
    assert "VLLM_PLUGINS" in line.fix


def test_does_not_import_vllm_or_start_ray() -> None:
    program = (
        "import sys\nfrom spangrad.trainer.doctor import examine\nexamine()\n"
        "assert not {'vllm', 'ray'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
