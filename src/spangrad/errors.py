"""Every error that spangrad raises.

    SpangradError
    +-- ConfigError (ValueError)          a config key or value that can't be used
    +-- CaptureError (RuntimeError)       the tracer could not be set up (never raised inside a model call)
    +-- StoreError (RuntimeError)         the store refused or failed
    |   +-- StoreLockedError              another process holds the file
    |   +-- StoreFullError                the disk is full; nothing was acknowledged
    |   +-- DatabaseFailedError           the database failed; the same may work later
    |   +-- RequestTooLargeError          a hub does not take so much at once
    |   +-- SchemaVersionError            a newer spangrad wrote the file, or an older one
    |   +-- HubUnreachableError (ConnectionError)   no hub answers at that address
    |   +-- PermissionDeniedError (PermissionError) the key does not allow that
    |   +-- LeaseLostError                the rollout or group belongs to somebody else by now
    +-- DialectError (ValueError)         a span that no dialect can read
    +-- CreditError (ValueError)          returns, groups or masks that contradict each other
    +-- GradeError (ValueError)           an objective needs a better grade than the row has
    +-- EmptyBatchError (ValueError)      nothing in the batch can train anything
    |   +-- ConvergedError                ... any more: training may end here
    +-- PausedError (RuntimeError)        a monitor paused the run; nothing is wrong with what was trained
    +-- BooksError (RuntimeError)         sampled tokens that are neither trained nor dropped: a bug of ours
    +-- PolicyError (RuntimeError)        a model folder that can't be loaded, or weights that don't fit it
    +-- EngineError (RuntimeError)        the inference engine failed, or did not start
    |   +-- PublishError                  the engine does not serve the weights that were published
    |       +-- UnansweredError           ... because it did not answer
    +-- PortInUseError (OSError)          the address is taken
    +-- ClusterError (RuntimeError)       Ray could not start or keep a part of a run
    +-- MissingExtraError (ImportError)   an optional part of spangrad is not installed
    +-- RolloutError (RuntimeError)       an agent could not be run at all (a failed rollout is data)
        +-- AgentFailedError              its program or its server failed a rollout
        +-- AgentUnavailableError         its server is away or busy; the same may work later

Each also inherits the standard error that it refines, carries one sentence, and
survives pickling (Ray sends errors between processes).
"""

from typing import ClassVar


class SpangradError(Exception):
    """Base of all errors raised by spangrad."""

    exit_code: ClassVar[int] = 1
    """What a command ends with that raises it."""


class ConfigError(SpangradError, ValueError):
    """A config key or value can't be used."""


class CaptureError(SpangradError, RuntimeError):
    """The tracer could not be set up."""


class StoreError(SpangradError, RuntimeError):
    """The store refused or failed."""


class StoreLockedError(StoreError):
    """Another process holds the store's file."""


class StoreFullError(StoreError):
    """The disk is full; the write was not acknowledged."""


class DatabaseFailedError(StoreError):
    """The database failed, whatever was asked of it; the same may work later."""


class RequestTooLargeError(StoreError):
    """A hub does not take so much at once; send it in parts."""


class SchemaVersionError(StoreError):
    """The store was written by a newer spangrad, or by an older one and is opened for reading only."""


class HubUnreachableError(StoreError, ConnectionError):
    """No hub answers at that address."""


class PermissionDeniedError(StoreError, PermissionError):
    """The key does not allow that."""


class LeaseLostError(StoreError):
    """The rollout or group belongs to somebody else by now."""


class DialectError(SpangradError, ValueError):
    """No dialect can read that span."""


class CreditError(SpangradError, ValueError):
    """Returns, groups or masks contradict each other."""


class GradeError(SpangradError, ValueError):
    """An objective needs a better grade than the row has."""


class EmptyBatchError(SpangradError, ValueError):
    """Nothing in the batch can train anything."""


class ConvergedError(EmptyBatchError):
    """The rollouts of each group have one reward, no worse than those before: nothing is left to learn."""


class PausedError(SpangradError, RuntimeError):
    """A monitor paused the run after an update; the same command goes on when it is told to."""

    exit_code: ClassVar[int] = 3


class BooksError(SpangradError, RuntimeError):
    """Sampled tokens are neither trained nor dropped for a reason, or both: an error in spangrad."""


class PolicyError(SpangradError, RuntimeError):
    """A model folder can't be loaded, or weights don't fit it."""


class EngineError(SpangradError, RuntimeError):
    """The inference engine failed or did not start."""


class PublishError(EngineError):
    """The engine does not serve the weights that were published."""


class UnansweredError(PublishError):
    """An engine or a gateway did not answer a control request."""


class PortInUseError(SpangradError, OSError):
    """The address is taken."""


class MissingExtraError(SpangradError, ImportError):
    """An optional part of spangrad is not installed."""


class ClusterError(SpangradError, RuntimeError):
    """Ray could not start or keep a part of a run."""


class RolloutError(SpangradError, RuntimeError):
    """An agent could not be run at all."""


class AgentFailedError(RolloutError):
    """An agent's program or server failed a rollout."""


class AgentUnavailableError(RolloutError):
    """An agent's server is away or busy; the same may work later."""
