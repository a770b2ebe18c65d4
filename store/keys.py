"""Who may do what: four keys, one a role.

Knows keys and roles; knows no HTTP. Invariants: a key is compared in constant time; a
key file is readable by its owner alone, or refused.
"""

import hmac
import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Self

from spangrad.errors import ConfigError
from spangrad.tracer.access import MIN_KEY_CHARS


class Role(IntEnum):
    """What a key allows; each role may do what the lower ones may."""

    AGENT = 1
    """Send spans, but not a gateway's. Nothing else: this key is within the policy's reach."""
    EVALUATOR = 2
    """Also work on rollouts, reward them, read, and vouch for calls as a gateway does."""
    TRAINER = 3
    """Also write all that a training run writes: queue, updates, policies, decisions by its rule."""
    ADMIN = 4
    """Everything: also promote and roll back by hand."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a hub."""

    agent: str
    evaluator: str
    trainer: str
    admin: str | None = None
    """None, as in older files: the trainer's key is the admin's too."""

    def __post_init__(self) -> None:
        """Refuse keys that would not keep roles apart."""
        values = [key for _, key in self._by_role()]
        if len(set(values)) < len(values) or any(len(value) < MIN_KEY_CHARS for value in values):
            raise ConfigError(
                f"the keys of a hub must differ and have {MIN_KEY_CHARS} characters or more; make new ones"
            )

    @classmethod
    def generate(cls) -> Self:
        """A fresh random key for each role."""
        return cls(*(f"sg-{field.name}-{secrets.token_urlsafe(24)}" for field in fields(cls)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the keys to a file that only its owner can read (0600)."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            json.dump(asdict(self), file, indent=2)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read keys that `save` wrote."""
        file = Path(path)
        try:
            if file.stat().st_mode & 0o077:
                raise ConfigError(f"keys in {str(file)!r} can be read by others; run `chmod 600 {file}`")
            data = json.loads(file.read_text())
            return cls(**data)
        except FileNotFoundError as error:
            raise ConfigError(
                f"there is no key file {str(file)!r}; `spangrad hub --keys {file}` makes one, `spangrad up` "
                "makes .spangrad/keys.json; name the hub's own with --keys, or as hub.keys in a run's config"
            ) from error
        except OSError as error:
            raise ConfigError(f"keys in {str(file)!r} can't be read: {error.strerror}") from error
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{str(file)!r} is no key file; it needs JSON with agent, evaluator, trainer and admin"
            ) from error

    @property
    def operators(self) -> tuple[str, ...]:
        """The keys that no agent has."""
        return tuple(key for role, key in self._by_role() if role > Role.AGENT)

    def role_of(self, key: str) -> Role | None:
        """The role of a key, None if it is none of ours."""
        found = None
        for role, own in self._by_role():
            if hmac.compare_digest(key.encode(), own.encode()):
                found = role
        return found

    def _by_role(self) -> list[tuple[Role, str]]:
        own = [(Role.AGENT, self.agent), (Role.EVALUATOR, self.evaluator)]
        if self.admin is None:
            return [*own, (Role.ADMIN, self.trainer)]
        return [*own, (Role.TRAINER, self.trainer), (Role.ADMIN, self.admin)]
