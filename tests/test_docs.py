"""The documentation agrees with the program."""

import re
from pathlib import Path

import pytest
import typer

from spangrad.adapters.dialects.recognition import IN_ORDER
from spangrad.adapters.exports.formats import FORMATS
from spangrad.cli import app
from spangrad.trainer.config import load_config
from spangrad.trainer.evaluation import check_only_between
from spangrad.trainer.stages.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {".venv", ".git", "node_modules", "build", "dist", ".spangrad", ".pytest_cache", "runs"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not SKIPPED & set(path.relative_to(ROOT).parts)
    and "src" not in path.relative_to(ROOT).parts  # links to the folders: seen there already
)
COMMANDS = {str(info.name): info for info in app.registered_commands} | {
    f"{group.name} {info.name}": info
    for group in app.registered_groups
    if group.typer_instance is not None
    for info in group.typer_instance.registered_commands
}


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_command_is_documented_and_has_help_with_an_example(command: str) -> None:
    assert any(f"spangrad {command}" in page.read_text() for page in PAGES if page.name == "README.md")
    info = COMMANDS[command]
    assert info.callback is not None
    assert info.callback.__doc__
    assert f"spangrad {command}" in str(info.epilog)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_of_a_command_has_help(command: str) -> None:
    found = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]  # type: ignore[attr-defined]
    assert not [option.name for option in found.params if not getattr(option, "help", None)]


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*/run.toml")), ids=shown)
def test_config_of_an_example_can_be_trained(file: Path) -> None:
    config = load_config(file)
    assert config.hub.keys == ".spangrad/keys.json"  # where `spangrad up` in that folder writes them
    assert config.serving.model
    for named in (config.agent.function, config.agent.tasks, config.agent.reward):
        assert (file.parent / named.split(":")[0]).is_file()


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/*/recipe.toml")), ids=shown)
def test_recipe_of_an_example_can_be_trained(file: Path) -> None:
    stages = load_recipe(file).stages
    assert stages[0].config.hub.keys == ".spangrad/keys.json" and stages[0].config.serving.model
    for stage in stages:
        check_only_between(stage.config.eval, has_promotions=bool(stage.config.promotion.every))


def test_dialects_and_formats_of_exports_are_documented_in_their_order() -> None:
    page = (ROOT / "adapters" / "README.md").read_text()
    for heading, known in (("Span dialects", IN_ORDER), ("Exports of other systems", FORMATS)):
        section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
        named = [
            name
            for row in re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
            for name in re.findall(r"`(\w+)`", row)
        ]
        assert named == [each.name for each in known]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{shown(page)} links to {target}, which is not there"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{shown(page)} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_python_blocks_compile(page: Path) -> None:
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    ):
        compile(block, f"{shown(page)}, python block {number}", "exec")


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_commands_in_code_exist(page: Path) -> None:
    code = re.findall(
        r"^```(?:\w+)?\n(.*?)^```|`([^`\n]+)`", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    for block in code:
        for called in re.findall(
            r"^\s*(?:\$ )?spangrad ((?:credit )?[a-z]+)", "\n".join(block), flags=re.MULTILINE
        ):
            assert called in COMMANDS, f"{shown(page)} calls `spangrad {called}`"
