"""A recipe: several runs in one file, one after the other, each from the weights of the one before.

    [run]                      # what all stages share; `id` names the recipe, a stage's run is ID.STAGE
    id = "calculator"
    [serving]
    model = "models/policy"    # the first stage starts from it

    [[stage]]
    name = "clone"
    stored = {splits = ["expert"], min_reward = 1.0}     # trains stored rollouts
    run = {updates = 100}
    stop = {metric = "loss/bc", patience = 20}
    learner = {objective = "bc", lr = 1e-3}

    [[stage]]
    name = "rl"                # makes rollouts, with [agent]
    ...

A stage is a whole run of `config.py`: the sections beside the tables, with its own on top, one setting after
the other.
Of what they share, a stage that trains stored rollouts takes nothing that is for making some.

Knows files and settings. Does not know: stores, learners.
"""

import copy
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from spangrad.errors import ConfigError
from spangrad.store.names import nearest
from spangrad.trainer.config import TrainConfig, apply_override, build_run
from spangrad.trainer.stages import stored_config

STAGE: Final = "stage"
_OF_AGENTS: Final = ("agent", "curriculum", "eval", "promotion")
_OF_STORED: Final = {
    "rollout": stored_config.USED_OF_ROLLOUT,
    "serving": stored_config.USED_OF_SERVING,
}
"""Sections of which a stage that trains stored rollouts takes only these settings."""
_NAME: Final = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]*[A-Za-z_][A-Za-z0-9_]*)*")
"""Without a number at the end: that is how a stage's second run is told from its first."""

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of a recipe."""

    name: str
    config: TrainConfig
    """Its settings; only the first stage starts from the model that they name."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Runs that follow one another."""

    stages: Sequence[Stage]

    def stage(self, name: str) -> Stage:
        """The stage of that name.

        Raises:
            ConfigError: There is none.
        """
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise ConfigError(f"--stage {name!r}: the recipe has {', '.join(names)}{nearest(name, names)}")
        return self.stages[names.index(name)]

    def before(self, stage: Stage) -> Stage | None:
        """The stage whose weights this one starts from; None: it is the first."""
        place = list(self.stages).index(stage)
        return self.stages[place - 1] if place else None


def is_recipe(path: str | Path) -> bool:
    """Whether a file has stages; whoever loads it says what else is wrong with it."""
    try:
        return STAGE in tomllib.loads(Path(path).read_text())
    except (OSError, ValueError):
        return False


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe. An override is `section.key=value`, for all stages, or `stage.section.key=value`.

    Raises:
        ConfigError: The file can't be read, a stage is no run that could be made, or a setting has an effect
            in no stage.
    """
    file = Path(path)
    try:
        shared = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{str(file)!r} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(file)!r} is not TOML: {error}") from error
    own = _own(shared.pop(STAGE, None), where=str(file))
    for override in overrides:
        first, _, rest = override.partition(".")
        apply_override(*((own[first], rest) if first in own else (shared, override)))
    _check_shared(shared, own, where=str(file))
    taken = {name: _taken(shared, mine) for name, mine in own.items()}
    _check_used(shared, own, taken, where=str(file))
    stages = [
        _stage(name, taken[name], mine, file, is_first=not place)
        for place, (name, mine) in enumerate(own.items())
    ]
    return Recipe(stages)


def _own(tables: Any, *, where: str) -> dict[str, dict[str, Any]]:
    """Stage -> its own sections, in their order."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{where}: {STAGE!r} is no list of tables; write [[stage]] above each stage")
    sections = {field.name for field in fields(TrainConfig)}
    own: dict[str, dict[str, Any]] = {}
    for place, table in enumerate(tables, 1):
        name = table.pop("name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{where}: the name of stage {place} is {name!r}; expected letters, digits, '-' and '_',"
                " without a number behind a '-'"
            )
        if name in own or name in sections:
            what = "another stage" if name in own else "a section"
            raise ConfigError(f"{where}: stage {place} has the name {name!r} of {what}; choose another")
        own[name] = table
    return own


def _check_shared(shared: Raw, own: Mapping[str, Raw], *, where: str) -> None:
    """Refuse what would not mean in a recipe what it says."""
    if not _settings(shared, "run").get("id"):
        raise ConfigError(f"{where}: run.id is missing; the runs of a recipe's stages are named after it")
    for name, sections in [("", shared), *own.items()]:
        at = f"{where}: stage {name!r}" if name else where
        if "production" in sections:
            raise ConfigError(
                f"{at}: [production] is no stage of a recipe, since it ends when somebody asks it to; start"
                " such a run from the last stage's model folder"
            )
        if "model_path" in _settings(sections, "learner"):
            raise ConfigError(f"{at}: learner.model_path has no effect in a recipe; name it in serving.model")
        if name and "id" in _settings(sections, "run"):
            raise ConfigError(f"{at}: run.id has no effect: the stage's run is <run.id>.{name}; leave it out")
        if name and name != next(iter(own)) and "model" in _settings(sections, "serving"):
            raise ConfigError(
                f"{at}: serving.model has no effect: it starts from the weights of the stage before; leave it"
                " out"
            )


def _settings(sections: Raw, name: str) -> Raw:
    """Of a section; whoever builds the run refuses one that is no table."""
    found = sections.get(name, {})
    return found if isinstance(found, Mapping) else {}


def _taken(shared: Raw, own: Raw) -> dict[str, dict[str, Any]]:
    """What a stage takes of what all share: nothing that its kind has no use for, or that it says itself."""
    is_stored = "stored" in own
    taken: dict[str, dict[str, Any]] = {}
    for section, settings in shared.items():
        if section in (_OF_AGENTS if is_stored else ("stored",)):
            continue
        if not isinstance(settings, Mapping):
            taken[section] = settings  # whoever builds the run refuses it
            continue
        used: Collection[str] = _OF_STORED.get(section, settings) if is_stored else settings
        mine = _settings(own, section)
        taken[section] = {key: settings[key] for key in settings if key in used and key not in mine}
    return taken


def _check_used(
    shared: Raw, own: Mapping[str, Raw], taken: Mapping[str, Mapping[str, Any]], *, where: str
) -> None:
    """Refuse what is shared and taken by nobody."""
    for section, settings in shared.items():
        for key in settings if isinstance(settings, Mapping) else ():
            if not any(key in of_stage.get(section, {}) for of_stage in taken.values()):
                raise ConfigError(
                    f"{where}: {section}.{key} has an effect in no stage ({', '.join(own)}): each sets it"
                    " itself, or has no use for it; leave it out"
                )


def _stage(name: str, taken: Raw, own: Raw, file: Path, *, is_first: bool) -> Stage:
    where = f"{file}: stage {name!r}"
    raw: dict[str, Any] = copy.deepcopy(dict(taken))
    for section, settings in own.items():
        raw[section] = {**raw.get(section, {}), **settings} if isinstance(settings, Mapping) else settings
    raw["run"]["id"] = f"{raw['run']['id']}.{name}"
    config = build_run(raw, file.resolve().parent, where=where)
    if not is_first and config.serving.transfer == "lora":
        raise ConfigError(
            f"{where}: serving.transfer 'lora' serves adapters beside the model that the engine was started"
            " with, and this stage starts from others; choose 'file', which merges them"
        )
    return Stage(name, config)
