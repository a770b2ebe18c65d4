"""Estimators as one word: `grpo`, `grpo+gigpo`, `leave_one_out_to_go:gamma=1`.

    TERM[+STEP_TERM][:setting=value]...

The value of `scores` has a colon of its own: `turn_credit:scores=reward:progress:gamma=1`.

Knows the names of terms and settings, and `CreditConfig`, which refuses what does not go together. A term
alone is that term alone: `gigpo` is its step term, the method of the paper is `grpo+gigpo`.
"""

import difflib
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, Final, cast

from spangrad.credit.credit_config import CreditConfig, Episode, StepName
from spangrad.credit.estimators import BOTH_TERMS
from spangrad.errors import ConfigError

NONE: Final = "none"
EPISODES: Final[tuple[str, ...]] = tuple(name for name in typing.get_args(Episode) if name != NONE)
STEPS: Final[tuple[str, ...]] = tuple(name for name in typing.get_args(StepName) if name != NONE)
_SETTINGS: Final[Mapping[str, Any]] = {
    field.name: field.default
    for field in fields(CreditConfig)
    if field.name not in ("episode", "step") and isinstance(field.default, bool | int | float | str | None)
}
"""Those of one word, with their defaults."""
_AROUND: Final = (
    ("scores", "shaping", "shaping_weight"),
    ("scores",),
    ("filters", "top_share", "top_p"),
    ("overlong", "overlong_limit", "overlong_buffer", "overlong_factor"),
)
"""What is said about rewards and rollouts whatever the terms are; each makes sense as a whole."""


def parsed(text: str, base: Mapping[str, Any] | None = None) -> CreditConfig:
    """The config that a spelling means.

    Args:
        text: `episode`, `step` or `episode+step`, then settings.
        base: Settings to begin with; those that the named terms do not use are left out.

    Raises:
        ConfigError: A term or setting is unknown (names the nearest), or they do not go together.
    """
    terms, *settings = _parts(text.strip())
    episode, step = _terms(terms.strip(), text)
    own = dict(_setting(setting, text) for setting in settings)
    named: dict[str, Any] = {"episode": episode, "step": step}
    try:
        used = _used({**(base or {}), **own, **named}).difference(*_AROUND)
        inherited = {name: value for name, value in (base or {}).items() if name in used}
        wanted = inherited | own | named
        return CreditConfig(**_around(wanted, base or {}) | wanted)
    except ConfigError as error:
        raise ConfigError(f"estimator {text!r}: {error}") from None


def spelled(config: CreditConfig) -> str:
    """The shortest spelling of a config, which `parsed` gives back, but for settings that are tables."""
    names: list[str] = [name for name in (config.episode, config.step) if name != NONE]
    if is_both(config.step):
        names = [config.step]
    changed = [
        f":{name}={_toml(getattr(config, name))}"
        for name, default in _SETTINGS.items()
        if getattr(config, name) != default
    ]
    return "+".join(names) + "".join(changed)


def is_both(step: str) -> bool:
    """Whether a step term brings its own episode term along, as `gigpo_as_published` does."""
    return step in BOTH_TERMS


def _used(values: Mapping[str, Any]) -> frozenset[str]:
    """What a config of these values uses, which may have values that it would refuse for being unused."""
    draft = object.__new__(CreditConfig)
    for name, value in {**asdict(CreditConfig()), **values}.items():
        object.__setattr__(draft, name, value)
    return draft.settings_used()


def _around(wanted: dict[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Settings around terms (`_AROUND`) that go together with what is wanted; others are left out."""
    kept: dict[str, Any] = {}
    for names in _AROUND:
        tried = kept | {name: base[name] for name in names if name in base}
        with suppress(ConfigError):
            CreditConfig(**tried | wanted)
            kept = tried
    return kept


def _parts(text: str) -> list[str]:
    """What stands between colons; the one behind where scores come from is theirs."""
    parts: list[str] = []
    for part in text.split(":"):
        if parts and re.fullmatch(r"\s*scores\s*=[^:]*", parts[-1]):
            parts[-1] += f":{part}"
        else:
            parts.append(part)
    return parts


def _terms(terms: str, text: str) -> tuple[Episode, StepName]:
    first, plus, second = (part.strip() for part in terms.partition("+"))
    if not plus and first in STEPS:
        return ("grpo" if is_both(first) else "none"), cast(StepName, first)
    for name, known in ((first, EPISODES), *([(second, STEPS)] if plus else [])):
        if name not in known:
            raise ConfigError(_unknown(name, known if plus else (*EPISODES, *STEPS), text))
    return cast(Episode, first), cast(StepName, second if plus else NONE)


def _unknown(name: str, known: Iterable[str], text: str) -> str:
    known = tuple(known)
    where = "" if name == text.strip() else f" in {text!r}"
    if name in EPISODES and name not in known:
        return f"estimator {text!r}: {name!r} compares whole rollouts, so it stands first: episode+step"
    if name in STEPS and name not in known:
        return f"estimator {text!r}: {name!r} compares steps, so it stands second: episode+step"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"there is no estimator {name!r}{where}; known are {', '.join(known)}{hint}"


def _setting(setting: str, text: str) -> tuple[str, Any]:
    name, equals, value = (part.strip() for part in setting.partition("="))
    if name not in _SETTINGS or not equals:
        near = difflib.get_close_matches(name, _SETTINGS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"estimator {text!r}: {setting!r} is no setting; expected name=value with one of"
            f" {', '.join(_SETTINGS)}{hint}"
        )
    default = _SETTINGS[name]
    if default is None or isinstance(default, str):
        return name, value
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        found = value
    kind = type(default)
    if kind is float and isinstance(found, int) and not isinstance(found, bool):
        found = float(found)
    if type(found) is not kind:
        raise ConfigError(f"estimator {text!r}: {name} is {value!r}, expected {kind.__name__}")
    return name, found


def _toml(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float) and float(f"{value:g}") == value
        else str(value)
    )
