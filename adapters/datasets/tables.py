"""Columns of the Parquet formats, declared once; whoever opens a file sees what each means.

Knows Arrow types; knows no rollouts. `rows` are dicts with these keys.
"""

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]


def _field(name: str, kind: Any, doc: str, *, nullable: bool = False) -> Any:
    return pa.field(name, kind, nullable=nullable, metadata={"doc": doc})


TRANSITIONS: Final = pa.schema(
    [
        _field("rollout_id", pa.string(), "rollout; rows of one are beside each other"),
        _field("attempt", pa.int32(), "attempt of the rollout"),
        _field("task_key", pa.string(), "what the split goes by: id, group or prompt of the task"),
        _field("group_id", pa.string(), "rollouts that its advantages compare it with", nullable=True),
        _field("model", pa.string(), "model that was sampled", nullable=True),
        _field("grade", pa.string(), "worst grade among its calls: exact, ids or text"),
        _field("temperature", pa.float64(), "of sampling; recompute logprobs under the same"),
        _field("reward", pa.float64(), "of the rollout; null: nobody gave one", nullable=True),
        _field(
            "loss_weight",
            pa.float64(),
            "of each trained token: 1 / trained tokens of the rollout, all its rows together;"
            " divide by the number of rollouts in your batch",
        ),
        _field(
            "segments",
            pa.list_(
                pa.struct(
                    [
                        _field("call_id", pa.string(), "trace_id-span_id of the call"),
                        _field("span_id", pa.string(), "its span"),
                        _field("step_index", pa.int32(), "order of the call in its rollout, from 0"),
                        _field("start", pa.int32(), "first trained position"),
                        _field("stop", pa.int32(), "position behind the last"),
                    ]
                )
            ),
            "calls that this row trains, and where",
        ),
        _field("token_ids", pa.list_(pa.int32()), "the engine's ids: prompts and replies"),
        _field("action_mask", pa.list_(pa.bool_()), "true exactly where this row trains a sampled token"),
        _field(
            "behavior_logprobs", pa.list_(pa.float32()), "nats, of the sampled distribution; null: not known"
        ),
        _field("policy_versions", pa.list_(pa.int32()), "version that sampled each token; null: not known"),
        _field("advantages", pa.list_(pa.float64()), "null where the mask is false"),
    ]
)
"""One path of a rollout's call tree. All lists but `segments` are as long as `token_ids`."""

VERL: Final = pa.schema(
    [
        _field("data_source", pa.string(), "chooses verl's reward function: give it yours"),
        _field(
            "prompt",
            pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])),
            "what the agent was asked",
        ),
        _field("ability", pa.string(), "kind of task"),
        _field(
            "reward_model",
            pa.struct([pa.field("style", pa.string()), pa.field("ground_truth", pa.string())]),
            "ground_truth is the task, as JSON; null where nobody stored one",
        ),
        _field(
            "extra_info",
            pa.struct(
                [
                    pa.field("index", pa.int64()),
                    pa.field("task_key", pa.string()),
                    pa.field("tools", pa.string()),
                    pa.field("rollouts", pa.int64()),
                    pa.field("mean_reward", pa.float64()),
                ]
            ),
            "tools are definitions as JSON; rollouts and mean_reward say how the stored ones did",
        ),
    ]
)
"""One task, as verl's RLHFDataset reads it."""

SCHEMAS: Final[Mapping[str, Any]] = {"transitions": TRANSITIONS, "verl": VERL}


def columns() -> list[tuple[str, str, str]]:
    """Name, type and meaning of the columns of `transitions`."""
    return [(field.name, str(field.type), field.metadata[b"doc"].decode()) for field in TRANSITIONS]
