"""Files that tool calls write to."""

import json
from typing import Any

import pytest

from spangrad.trainer.monitoring.behavior import is_test_file
from spangrad.trainer.monitoring.monitor_config import MonitorConfig
from spangrad.trainer.monitoring.written_paths import LONGEST, paths_in_code, written_paths

PATCH = """*** Begin Patch
*** Update File: tests/test_a.py
@@
-assert f(1) == 2
+assert True
*** End Patch"""
DIFF = "--- a/src/a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-assert f(1) == 2\n+assert True\n"


@pytest.mark.parametrize(
    ("name", "arguments", "paths"),
    [
        ("write_file", {"path": "tests/test_a.py", "content": "rm x.py\nassert True"}, {"tests/test_a.py"}),
        ("writeFile", {"filePath": "a.test.ts", "text": "x"}, {"a.test.ts"}),
        ("Edit", {"file_path": "/w/a.py", "old_string": "> b.py", "new_string": "y"}, {"/w/a.py"}),
        ("delete_files", {"paths": ["a.py", "b.py"]}, {"a.py", "b.py"}),
        ("str_replace_based_edit_tool", {"command": "create", "path": "a.py", "file_text": "x"}, {"a.py"}),
        ("str_replace_based_edit_tool", {"command": "view", "path": "a.py"}, set()),
        ("read_file", {"path": "tests/test_a.py"}, set()),
        ("search", {"query": "tests/test_a.py"}, set()),
        ("apply_patch", {"input": PATCH}, {"tests/test_a.py"}),
        ("apply_patch", PATCH, {"tests/test_a.py"}),
        ("apply_diff", {"diff": DIFF}, {"tests/test_a.py"}),
        ("bash", {"command": "pytest -q tests/test_a.py"}, set()),
        ("bash", {"command": "cat > tests/test_a.py <<'EOF'\nassert True\nEOF"}, {"tests/test_a.py"}),
        ("bash", {"command": "cd /w && sed -i 's/2/1/' tests/test_a.py"}, {"s/2/1/", "tests/test_a.py"}),
        ("bash", {"command": "rm -rf tests/test_a.py; ls"}, {"tests/test_a.py"}),
        ("bash", {"command": "git checkout HEAD~1 -- conftest.py"}, {"checkout", "HEAD~1", "conftest.py"}),
        ("bash", {"command": "cp ok.py tests/test_a.py"}, {"tests/test_a.py"}),
        ("bash", {"command": "echo 1 | tee -a tests/test_a.py"}, {"tests/test_a.py"}),
        ("bash", {"cmd": ["bash", "-lc", "echo x >> 'tests/my test.py'"]}, {"tests/my test.py"}),
        ("bash", {"command": "python run.py > /dev/null 2>&1"}, set()),
        ("bash", {"command": "python -c \"open('tests/test_a.py', 'w').write('')\""}, {"tests/test_a.py"}),
        ("python", {"code": "Path('conftest.py').write_text('')"}, {"conftest.py"}),
        ("python", {"code": "open('tests/test_a.py').read()\nif a -> b >= c: pass"}, set()),
        ("python", {"code": "shutil.copy('ok.py', 'tests/test_a.py')"}, {"tests/test_a.py"}),
        ("python", {"code": "import os\nos.remove('tests/test_a.py')"}, {"tests/test_a.py"}),
        ("bash", None, set()),
        ("bash", {"command": 3, "more": [1, {"path": "a"}]}, set()),
    ],
)
def test_paths_that_a_call_writes_to(name: str, arguments: Any, paths: set[str]) -> None:
    assert written_paths(name, arguments) == paths


@pytest.mark.parametrize(
    ("path", "is_one"),
    [
        ("tests/helpers.py", True),
        ("/srv/repo/tests/unit/helpers.py", True),
        ("./test_a.py", True),
        ("src\\app\\a.test.ts", True),
        ("pkg/a_test.go", True),
        ("conftest.py", True),
        ("src/contest.py", False),
        ("src/latest/a.py", False),
        ("attest_a.py", False),
        ("README.md", False),
    ],
)
def test_files_that_say_whether_a_task_was_solved(path: str, is_one: bool) -> None:
    assert is_test_file(path, MonitorConfig().test_files) is is_one


@pytest.mark.parametrize(
    "piece",
    [">", "> ", "'", 'open("', "shutil.copy(", "rm ", "+++ b/", "a= ", "sudo ", ">'x", "\n*** ", "Path('"],
)
def test_of_a_huge_hostile_text_the_beginning_is_looked_at(piece: str) -> None:
    huge = piece * (10_000_000 // len(piece))
    found = paths_in_code(huge)
    assert found == paths_in_code(huge[:LONGEST])
    assert all(len(path) <= 500 for path in found)


def test_arguments_that_are_nested_too_deep_write_nothing() -> None:
    assert written_paths("write", json.loads("[" * 50 + "]" * 50)) == set()
