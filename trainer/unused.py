"""Settings that have no effect beside others are refused, not ignored.

Knows dataclasses of settings. Does not know what a setting means.
"""

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from spangrad.errors import ConfigError


def refuse_unused(sections: Mapping[str, tuple[Any, Collection[str]]], because: str) -> None:
    """Refuse settings that were changed and have no effect.

    Args:
        sections: Name of a section -> its settings, and which of them are used.
        because: What goes behind "has no effect".

    Raises:
        ConfigError: One was changed that is not used.
    """
    for section, (settings, used) in sections.items():
        for field in fields(settings):
            if field.name not in used and getattr(settings, field.name) != _default(field):
                raise ConfigError(f"{section}.{field.name} has no effect {because}")


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
