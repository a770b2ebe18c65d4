"""A run without engine, agents and Ray: ended rollouts in a DuckDB file, trained by a real learner."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.adapters.building import span, text_attributes, token_attributes

from spangrad.adapters import account_unread
from spangrad.store.client import HubClient
from spangrad.store.file_store import FileStore
from spangrad.store.otlp import encode_request
from spangrad.store.records import Reward, RewardAuthor, Rollout, RolloutStatus, Span, Update
from spangrad.tracer import conventions as c
from spangrad.trainer.config import TrainConfig, build_run
from spangrad.trainer.crediting import Crediting, as_trained
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.replaying import made_of
from spangrad.trainer.update_metrics import batch_metrics, checked_books, with_reasons_of_both

Members = Sequence[tuple[float | None, Sequence[int]]]
"""Reward of each member of a group, and what it sampled in its first call."""
GROUPS: tuple[Members, ...] = (
    ((1.0, (3, 9, 4)), (0.0, (3, 8, 4, 7)), (0.4, (3, 9))),
    ((0.25, (5, 6)), (0.75, (5, 11, 6, 2))),
)


def config_of(folder: Path, model: Path, **sections: Mapping[str, Any]) -> TrainConfig:
    """A run `r` whose learner and credit are as these sections say."""
    agent = {"function": "a.py:run", "tasks": "a.py:tasks", "reward": "a.py:reward", "env": {"KEY": "hidden"}}
    raw: dict[str, Any] = {
        "run": {"id": "r", "updates": 9, "seed": 3, "keep_checkpoints": 3},
        "serving": {"model": str(model)},
        "agent": agent,
        "rollout": {"group_size": 2, "max_staleness": 1},
        "learner": {"lr": 1e-2, "threads": 1},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | dict(values)
    return build_run(raw, folder, where="here")


def spans_of(rollout: Rollout, version: int, sampled: Sequence[int], trace: str) -> list[Span]:
    """A rollout of two calls; the second goes on from the first."""
    names = {c.ROLLOUT_ID: rollout.rollout_id, c.ATTEMPT: 0}
    found = [span("root", trace=trace, attributes={**names, c.SPAN_ROLE: "rollout"}, end_ns=100)]
    ids, messages = [20, 21, 22], [{"role": "user", "parts": [{"type": "text", "content": "How many?"}]}]
    for index, reply in enumerate((sampled, (12, 13))):
        said = [{"role": "assistant", "parts": [{"type": "text", "content": f"reply {reply}"}]}]
        told = {
            **token_attributes(
                ids, reply, logprobs=[-5.5 - 0.1 * i for i in range(len(reply))], version=version
            ),
            c.INPUT_MESSAGES: json.dumps(messages),
            c.OUTPUT_MESSAGES: json.dumps([said[0] | {"finish_reason": "stop"}]),
            c.RESPONSE_ID: f"{rollout.rollout_id}-{index}",
        }
        found.append(
            span(
                f"c{index}",
                trace=trace,
                parent="root",
                start_ns=10 + index,
                attributes=text_attributes(**names, **told),
            )
        )
        ids = [*ids, *reply, 30]
        messages = [*messages, *said, {"role": "user", "parts": [{"type": "text", "content": "Go on."}]}]
    return found


class Training:
    """Learner and store of a run."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.path = Path(config.base_dir) / "store.duckdb"
        self.store: FileStore | HubClient = FileStore(self.path)
        self.learner = Learner(config.learner_from(config.start_model))
        self._parent = config.start_model
        self.updates: list[Update] = []

    def collect(self, groups: Sequence[Members] = GROUPS, *, failed: int = 0) -> list[Rollout]:
        """Rollouts that ended; the last `failed` of them without success."""
        index = len(self.updates)
        rollouts = [
            Rollout(f"u{index}-g{g}-m{m}", task_id=f"t{g}", group_id=f"u{index}-g{g}", run_id="r")
            for g, members in enumerate(groups)
            for m in range(len(members))
        ]
        given = [member for members in groups for member in members]
        self.store.enqueue(rollouts)
        self.store.claim(worker="w", limit=len(rollouts), policy_version=index)
        for place, (rollout, (reward, sampled)) in enumerate(zip(rollouts, given, strict=True)):
            trace = f"{index + 1}{place:03d}"
            self.store.put_otlp(encode_request(spans_of(rollout, index, sampled, trace)))
            if reward is not None:
                self.reward(rollout.rollout_id, reward)
            is_bad = place >= len(rollouts) - failed
            self.store.finish(
                rollout.rollout_id,
                0,
                status=RolloutStatus.FAILED if is_bad else RolloutStatus.SUCCEEDED,
                error_type="E" if is_bad else None,
            )
        account_unread(self.store)
        return self.store.rollouts(rollout_ids=[rollout.rollout_id for rollout in rollouts])

    def reward(self, rollout_id: str, value: float, time_ns: int | None = None) -> None:
        assert isinstance(self.store, FileStore)
        self.store.put_rewards(
            [Reward(rollout_id, value, attempt=0, time_ns=time_ns)], author=RewardAuthor.EVALUATOR
        )

    def update(self, rollouts: Sequence[Rollout]) -> Update:
        """What a run does between rollouts and publish."""
        return self.commit(self.learn(rollouts))

    def learn(self, rollouts: Sequence[Rollout]) -> Update:
        """Credit, learn, save."""
        config, index = self.config, len(self.updates)
        critic = None if config.critic is None else self.learner.values
        batch = Crediting(config, config.start_model).rows(self.store, rollouts, index, critic)
        metrics = batch_metrics(batch)
        metrics |= with_reasons_of_both(metrics, self.learner.update(batch.rows, policy_version=index))
        metrics |= checked_books(metrics, where="here")
        update = Update(
            run_id="r",
            update_index=index,
            policy_version=index + 1,
            rollout_ids=[rollout.rollout_id for rollout in rollouts],
            samples=as_trained(batch.samples, self.learner.trained_calls()),
            metrics=metrics,
            checkpoint="",
            time_ns=index + 1,
            **made_of(config, batch, self._parent),
        )
        root = Path(config.base_dir) / "checkpoints"
        record = {"update": asdict(update)}
        self._parent = self.learner.save(root, record=record, keep=config.run.keep_checkpoints)
        return replace(update, checkpoint=str(self._parent))

    def commit(self, update: Update) -> Update:
        """Tell the store."""
        self.store.commit_update(update)
        self.updates.append(update)
        return update

    def close(self) -> None:
        self.store.close()
