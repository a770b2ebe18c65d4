"""Programs that an agent starts with `subprocess` record themselves as part of its rollout.

    Popen(..., env=...)  --- + SPANGRAD_ROLLOUT, _STORE, _KEY, PYTHONPATH --->  child

Light: no import of OpenTelemetry, so that `spangrad run` can have it in every Python. Knows environments; it
does not know what a rollout is. Invariants:
* The environment of this process is never changed: each child gets the rollout of the code that starts it.
* An `env=` of the caller's is copied and gets these variables only; a SPANGRAD_* that the caller sets to
  something of its own is left as it is.
* Outside of any rollout nothing is added. A child that can't record says nothing.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from spangrad.tracer.hooks import when_imported
from spangrad.tracer.patching import Patches

if TYPE_CHECKING:
    import subprocess

logger = logging.getLogger(__name__)

ROLLOUT = "SPANGRAD_ROLLOUT"
STORE = "SPANGRAD_STORE"
KEY = "SPANGRAD_KEY"
REDACT = "SPANGRAD_REDACT"
QUIET = "quiet=1"
"""Part of SPANGRAD_ROLLOUT: a Python that can't record does not say so, for its output is the agent's."""
AUTOSTART = os.path.join(os.path.dirname(os.path.realpath(__file__)), "autostart")

_PREFIX = "SPANGRAD_"

_patches = Patches()
_has_failed = False
_given: dict[str, str] = {}


def install(given: Mapping[str, str] | None = None) -> None:
    """Begin to extend children's environments.

    Args:
        given: Variables SPANGRAD_* for the children, beside those of this process.
    """
    global _given
    _given = dict(given or {})
    _patches.is_on = True
    when_imported("subprocess", _patch)
    for module in ("asyncio", "asyncio.subprocess"):
        when_imported(module, _patch_asyncio)


def uninstall() -> None:
    """Stop it."""
    _patches.undo()


def add_to(environment: dict[Any, Any], variables: Mapping[str, str]) -> None:
    """Let a Python with this environment record itself, as these variables say."""
    for name, value in variables.items():
        _set(environment, name, value)
    path = _get(environment, "PYTHONPATH")
    others = [entry for entry in path.split(os.pathsep) if entry != AUTOSTART] if path else []
    _set(environment, "PYTHONPATH", os.pathsep.join([AUTOSTART, *others]))


def is_quiet(rollout: str) -> bool:
    """Whether a Python with this SPANGRAD_ROLLOUT is not to say that it can't record."""
    return QUIET in rollout.split("&")


def _patch(module: ModuleType) -> None:
    _patches.replace(module.Popen, "__init__", _init)


def _patch_asyncio(module: ModuleType) -> None:
    """For event loops that do without `subprocess`: uvloop."""
    for name in ("create_subprocess_exec", "create_subprocess_shell"):
        _patches.replace(module, name, _create)


def _create(original: Callable[..., Any]) -> Callable[..., Any]:
    async def create(*args: Any, **kwargs: Any) -> Any:
        try:
            kwargs |= {"env": _extended(kwargs.get("env"))}
        except Exception:  # the boundary, as below
            _log_failure()
        return await original(*args, **kwargs)

    return create


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    function: Any = original
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    position = function.__code__.co_varnames.index("env") - 1  # behind `self`

    def __init__(self: "subprocess.Popen[Any]", /, *args: Any, **kwargs: Any) -> None:
        try:
            if len(args) > position:
                args = (*args[:position], _extended(args[position]), *args[position + 1 :])
            else:
                kwargs["env"] = _extended(kwargs.get("env"))
        except Exception:  # the boundary: the program must start
            _log_failure()
        original(self, *args, **kwargs)

    return __init__


def _extended(theirs: Any) -> Any:
    rollout = _current_rollout()
    if rollout is None or not (theirs is None or isinstance(theirs, Mapping)):
        return theirs
    inherited = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    ours = inherited | _given
    environment: dict[Any, Any] = dict(os.environ if theirs is None else theirs)
    for name in (ROLLOUT, *ours):
        value = _get(environment, name)
        if value is not None and value != inherited.get(name):  # the caller's own, not a copy of ours
            if name == ROLLOUT:
                return theirs
            del ours[name]
    if is_quiet(inherited.get(ROLLOUT, QUIET)):  # not under `spangrad run`, whose children do say it
        rollout = f"{rollout}&{QUIET}"
    add_to(environment, ours | {ROLLOUT: rollout})
    return environment


def _current_rollout() -> str | None:
    """The value of SPANGRAD_ROLLOUT for a child that is started here."""
    current = sys.modules.get("spangrad.tracer.current")
    if current is None:  # no rollout can have begun in this process
        return os.environ.get(ROLLOUT)
    rollout = current.current_rollout()
    return None if rollout is None else str(current.to_environment(rollout))


def _get(environment: Mapping[Any, Any], name: str) -> str | None:
    value = environment.get(name)
    if value is None and os.supports_bytes_environ:
        value = environment.get(os.fsencode(name))
    return None if value is None else os.fsdecode(value)


def _set(environment: dict[Any, Any], name: str, value: str) -> None:
    if os.supports_bytes_environ:
        environment.pop(os.fsencode(name), None)
    environment[name] = value


def _log_failure() -> None:
    global _has_failed
    if not _has_failed:
        _has_failed = True
        logger.warning("a rollout could not follow to a child program", exc_info=True)
