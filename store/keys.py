"""Who may do what: three keys, one a role.

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
    """Everything."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a hub."""

    agent: str
    evaluator: str
    trainer: str

    def __post_init__(self) -> None:
        """Refuse keys that would not keep roles apart."""
        values = (self.agent, self.evaluator, self.trainer)
        if len(set(values)) < len(values) or any(len(value) < MIN_KEY_CHARS for value in values):
            raise ConfigError(
                f"the three keys of a hub must differ and have {MIN_KEY_CHARS} characters or more; "
                "make new ones"
            )

    @classmethod
    def generate(cls) -> Self:
        """Three fresh random keys."""
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
                f"{str(file)!r} is no key file; it needs JSON with agent, evaluator and trainer"
            ) from error

    def role_of(self, key: str) -> Role | None:
        """The role of a key, None if it is none of ours."""
        found = None
        for role, own in (
            (Role.AGENT, self.agent),
            (Role.EVALUATOR, self.evaluator),
            (Role.TRAINER, self.trainer),
        ):
            if hmac.compare_digest(key.encode(), own.encode()):
                found = role
        return found
