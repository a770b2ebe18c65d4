"""The values that pass between a store and its users.

Plain frozen dataclasses: they know no DuckDB and no HTTP. `None` means "not known"
or "not assigned"; it is never 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

RECORDED_SPLIT: Final = "recorded"
"""Split of rollouts that nobody enqueued: known from their spans alone."""
DEFAULT_REWARD: Final = "reward"
"""Name of the reward that trains, unless another is asked for."""
_TRACEBACK: Final = "Traceback (most recent call last):"


class RolloutStatus(StrEnum):
    """Where a rollout stands in the queue."""

    QUEUED = "queued"
    """Waiting for a worker."""
    RUNNING = "running"
    """Claimed; the lease says by whom and until when."""
    SUCCEEDED = "succeeded"
    """The agent returned. Says nothing about the reward."""
    FAILED = "failed"
    """The agent or the engine failed and no attempt is left."""


class RewardAuthor(StrEnum):
    """Who gave a reward; set by the store from the key, never by the sender."""

    AGENT = "agent"
    """The process that the policy can reach. Kept, but a trainer has to ask for it."""
    EVALUATOR = "evaluator"
    """A grader that the policy can't reach."""
    OPERATOR = "operator"
    """A person or an import, with the trainer's key."""


class Decision(StrEnum):
    """What was decided about a published version."""

    PROMOTED = "promoted"
    """It is the promoted one from now on: what production is served."""
    KEPT = "kept"
    """It was evaluated and stays a candidate."""
    ROLLED_BACK = "rolled_back"
    """It and all others newer than `to_version` are given up; `to_version` is the promoted one."""
    RESTORED = "restored"
    """It has the weights of `to_version`, after a rollback, and is the promoted one in its place."""


class DecisionAuthor(StrEnum):
    """Who decided; a claim that the store refuses to a key of a lower role."""

    TRAINER = "trainer"
    """The program that trains the run, by its rule."""
    ADMIN = "admin"
    """A person."""


class PolicyStatus(StrEnum):
    """Where a version stands; follows from the decisions (view `policy_lineage`)."""

    CANDIDATE = "candidate"
    """Published; not promoted so far."""
    PROMOTED = "promoted"
    """The one of its run that is promoted now."""
    SUPERSEDED = "superseded"
    """It was promoted, and another one is now."""
    ROLLED_BACK = "rolled_back"
    """It was given up."""


class RepeatedKeys(dict[str, Any]):
    """Attributes with keys that were sent more than once: the last value counts, others are `hidden`."""

    def __init__(self, attributes: Any = (), hidden: Iterable[Sequence[Any]] = ()) -> None:
        """A dict of the values that count, and (key, value) of the others, in order."""
        super().__init__(attributes)
        self.hidden = tuple((str(key), value) for key, value in hidden)

    def __eq__(self, other: object) -> bool:
        """Whether all of it is equal, also what is hidden."""
        return isinstance(other, RepeatedKeys) and self.hidden == other.hidden and super().__eq__(other)

    __hash__ = None


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """One event of a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    dropped_attributes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """One OpenTelemetry span, lossless.

    `attributes` holds str, bool, int, float, bytes, and lists or dicts of these. Any dict of it is
    `RepeatedKeys` where a key was sent more than once.
    """

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_span_id: str | None
    name: str
    kind: int
    """OTLP SpanKind: 0 unspecified, 1 internal, 2 server, 3 client."""
    start_ns: int
    end_ns: int
    status_code: int
    """0 unset, 1 ok, 2 error."""
    status_message: str
    scope: str
    """Instrumentation scope's name."""
    scope_version: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    resource: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[Mapping[str, Any]] = ()
    trace_state: str = ""
    flags: int = 0
    dropped_attributes: int = 0
    rollout_id: str | None = None
    """From `spangrad.rollout.id`, or from the nearest ancestor in the trace that has it."""
    attempt: int | None = None
    """From `spangrad.attempt`, where the rollout id came from."""
    dropped_events: int = 0
    dropped_links: int = 0
    scope_attributes: Mapping[str, Any] = field(default_factory=dict)
    schema_url: str = ""
    resource_schema_url: str = ""
    resource_dropped_attributes: int = 0
    scope_dropped_attributes: int = 0
    entity_refs: Sequence[Mapping[str, Any]] = ()
    """What the resource's attributes are of: schema_url, type, id_keys, description_keys."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One OpenTelemetry log record, lossless. GenAI recorders put messages and evaluations there."""

    trace_id: str | None
    """Of the span that it belongs to; None where it names none."""
    span_id: str | None
    time_ns: int
    """0: the recorder does not say."""
    observed_ns: int
    event_name: str
    body: Any = None
    """str, bool, int, float, bytes, None, or lists or dicts of these."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    severity_number: int = 0
    severity_text: str = ""
    scope: str = ""
    scope_version: str = ""
    scope_attributes: Mapping[str, Any] = field(default_factory=dict)
    schema_url: str = ""
    resource: Mapping[str, Any] = field(default_factory=dict)
    resource_schema_url: str = ""
    flags: int = 0
    dropped_attributes: int = 0
    resource_dropped_attributes: int = 0
    scope_dropped_attributes: int = 0
    entity_refs: Sequence[Mapping[str, Any]] = ()


def event_name(record: LogRecord) -> str:
    """The name of the event that a record is; empty if it is none. Before OTLP 1.5 it was an attribute."""
    name = record.event_name or record.attributes.get("event.name")
    return name if isinstance(name, str) else ""


@dataclass(frozen=True, slots=True)
class UnreadTrace:
    """A trace that got spans or log records since its calls were read the last time."""

    trace_id: str
    changed_ns: int
    """When it got them: it is read if this did not change meanwhile."""
    rollout_ids: Sequence[str] = ()
    """Rollouts that its spans name."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run of an agent on one task."""

    rollout_id: str
    task_id: str | None = None
    group_id: str | None = None
    """Rollouts of one group are compared with each other."""
    run_id: str | None = None
    """Training run that asked for it."""
    attempt: int = 0
    max_attempts: int = 3
    status: RolloutStatus = RolloutStatus.QUEUED
    task: Any = None
    """What the agent is asked: JSON."""
    policy_version: int | None = None
    """Version that was current when it was claimed."""
    worker: str | None = None
    lease_until_ns: int | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    output: Any = None
    """What the agent returned: JSON."""
    error_type: str | None = None
    error: str | None = None
    split: str = "train"
    """`train`, `eval`, `expert`, ...: only `train` groups are leased to a trainer by default."""
    consumed_by: int | None = None
    """Index of the update that trained on it."""
    turn_budget: int | None = None
    """Calls of the policy that its agent may make; the gateway sees to it. None: any number."""

    @property
    def failure(self) -> str | None:
        """Type and text of the error, `ValueError: no such table`, as everybody shows it."""
        return ": ".join(dict.fromkeys(part for part in (self.error_type, self.error) if part)) or None

    @property
    def brief_failure(self) -> str | None:
        """`failure` without the frames of a traceback: the line with type and message of its last error."""
        text = self.failure
        if text is None or _TRACEBACK not in text:
            return text
        lines = [line for line in text.splitlines() if line.strip()]
        frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
        behind = [line for line in lines[frames[-1] :] if not line[0].isspace()] if frames else []
        return (behind or lines[-1:])[0].strip()


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt of a rollout went, as its worker says."""

    rollout_id: str
    attempt: int
    status: RolloutStatus = RolloutStatus.SUCCEEDED
    output: Any = None
    """What the agent returned: JSON."""
    error_type: str | None = None
    error: str | None = None
    retry: bool = False
    """Queue the rollout again while attempts are left."""
    free: bool = False
    """With `retry`: it uses no attempt up, it failed through no fault of its own."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A number given for a rollout, or for one call or step of it."""

    rollout_id: str
    value: float
    name: str = DEFAULT_REWARD
    call_id: str | None = None
    """`trace_id-span_id` of a call, or of a step (for its last call). None: for the whole rollout."""
    author: RewardAuthor | None = None
    """Filled in by the store."""
    explanation: str | None = None
    attempt: int | None = None
    time_ns: int | None = None
    trace_id: str | None = None
    """The trace that it was given for. Where the rollout has several with calls, the store keeps it at the
    last call of this one; alone, it is the rollout's."""
    reward_id: str | None = field(default=None, compare=False)
    """Filled in by the store."""


@dataclass(frozen=True, slots=True)
class UpdateSample:
    """One call that an update trained on: the line from optimizer step back to span."""

    rollout_id: str
    call_id: str
    attempt: int
    advantage: float
    """Mean over the call's tokens that came to be trained."""
    trained_tokens: int
    """0: the learner left it out (nothing to learn from it, a correction): `dropped/*` of the update."""
    policy_version: int | None
    """Version that sampled it."""
    staleness: int | None
    loss_weight: float | None = None
    """Of each of its trained tokens in the loss, after corrections; None: an older spangrad kept none."""


@dataclass(frozen=True, slots=True)
class UpdateRead:
    """One call or one reward that an update was made of, whether it trained anything or not."""

    rollout_id: str
    call_id: str | None = None
    reward_id: str | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step, committed together with what it consumed."""

    run_id: str
    update_index: int
    """0, 1, 2, ... without a gap inside a run."""
    policy_version: int
    """Version that this update produced."""
    rollout_ids: Sequence[str]
    """Everything that it took: trained, filtered or dropped."""
    samples: Sequence[UpdateSample]
    metrics: Mapping[str, float]
    checkpoint: str
    """Folder of the checkpoint that holds the state after this update."""
    time_ns: int = 0
    config: Mapping[str, Any] | None = None
    """Config of the run as it was, without the values of `agent.env`; None: an older spangrad kept none."""
    parent: str | None = None
    """Folder with the state before this update: a checkpoint, or the model that the run started from."""
    reads: Sequence[UpdateRead] = ()
    """Every call and every reward that it was made of: what came later is not among them."""
    consumes: bool = True
    """Whether no other update can take its rollouts; False: it only read them, and others may train them."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What a monitor saw in an update of a run."""

    run_id: str
    update_index: int
    monitor: str
    value: float
    """In the unit of the threshold."""
    threshold: float
    action: str
    """What is done about it: `warn`, `pause` or `rollback`."""
    text: str
    time_ns: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """One published version of a policy."""

    run_id: str
    policy_version: int
    path: str
    time_ns: int = 0
    parent_version: int | None = None
    note: str = ""
    """Free text; of a run's last version why it ended."""
    parent_run: str | None = None
    """Run of the parent; None: this one."""
    model: str | None = None
    """Model folder with its weights, from which other runs start; None: there is none."""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """One decision about a published version. Decisions are only ever added; the last one counts."""

    run_id: str
    policy_version: int
    """The version that it is about; of a rollback the newest one that is given up."""
    decision: Decision
    decided_by: DecisionAuthor
    reason: str
    """Why, for people."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the evaluation found: `success`, `promoted_success`, `tasks`, ..."""
    to_version: int | None = None
    """The version whose weights stand in, of a rollback and of what restores it."""
    path: str | None = None
    """Folder where the weights of a promoted version are kept for good."""
    time_ns: int = 0
    """When; the sender's clock. The same decision of the same time is one."""


def promoted_version(decisions: Iterable[PolicyDecision]) -> int | None:
    """The promoted version after these decisions of one run, in order; None: none was promoted."""
    promoted: int | None = None
    for one in decisions:
        if one.decision in (Decision.PROMOTED, Decision.RESTORED):
            promoted = one.policy_version
        elif one.decision is Decision.ROLLED_BACK:
            promoted = one.to_version
    return promoted


def pending_rollback(decisions: Iterable[PolicyDecision]) -> PolicyDecision | None:
    """The rollback that whoever trains the run has not carried out yet; a later promotion takes it back."""
    pending: PolicyDecision | None = None
    for one in decisions:
        by_trainer = one.decided_by is DecisionAuthor.TRAINER
        if one.decision is Decision.ROLLED_BACK:
            pending = one
        elif one.decision is Decision.PROMOTED or (one.decision is Decision.RESTORED and by_trainer):
            pending = None
    return pending


def origin_of(version: int, decisions: Iterable[PolicyDecision]) -> int:
    """The version that first had this one's weights: another one if a rollback put them back."""
    sources = {
        one.policy_version: one.to_version
        for one in decisions
        if one.decision is Decision.RESTORED and one.to_version is not None
    }
    while version in sources:
        version = sources[version]
    return version
