"""Rollouts -> rows of the formats that trainers read. One pure function a format.

| format | a row is | for |
|---|---|---|
| `messages` | a conversation; `weight` 0 on replies that are not trained | OpenAI fine-tuning, axolotl |
| `sharegpt` | a conversation in from/value form, tools as JSON | LLaMA-Factory, FastChat |
| `trl-sft` | a reply: prompt and completion | TRL SFTTrainer, which then trains exactly the reply |
| `trl-dpo` | two replies to the same prompt, in rollouts of different reward | TRL DPOTrainer |
| `trl-grpo` | a task: its prompt and what rollouts got for it | TRL GRPOTrainer, which samples anew |
| `verl` | a task: prompt, data_source, reward_model, extra_info | verl's RLHFDataset |

Invariants:
* only replies of the policy are trained, each in one row; what tools and users said never is;
* argument strings stay byte for byte, but where a format wants objects (the TRL formats and ShareGPT do);
* nothing is invented: a rollout that a format can't tell is refused with a reason, by `Refusal`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from spangrad.adapters.datasets.chat import NoForm, Row, openai_message, template_message, text_of
from spangrad.adapters.datasets.conversation import Conversation, Exported, running_keys
from spangrad.adapters.datasets.sharegpt import sharegpt_row
from spangrad.adapters.model_call import Choice, ModelCall


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rollout, or a part of it, that gave no row."""

    rollout_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """A row, and the rollouts that it is made of."""

    row: Row
    rollouts: Sequence[Exported]


Formatter = Callable[[Iterable[Exported]], Iterator[Told | Refusal]]
"""Takes rollouts with those of a task beside each other."""


@dataclass(frozen=True, slots=True)
class Format:
    """How rollouts become rows of one format."""

    name: str
    rows: Formatter
    suffix: str
    """Of the data files: `jsonl` or `parquet`."""
    reader: str
    """What reads it, for the card."""
    drops_repeats: bool
    """Whether a conversation that is there already is left out."""
    drops_reasoning: bool = False
    """Whether the format has no place for what a model thought."""


def messages_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """OpenAI's fine-tuning form: messages, tools, and a weight on every assistant message."""
    yield from _by_conversation(rollouts, _messages_row)


def sharegpt_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """ShareGPT: `conversations` of from/value; see `sharegpt.py`."""
    yield from _by_conversation(rollouts, sharegpt_row)


def trl_sft_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """TRL's prompt and completion, one row a reply; with both, SFTTrainer's loss is on the completion."""
    for rollout in rollouts:
        for call in rollout.calls:
            for choice in call.choices:
                try:
                    row = {"prompt": _prompt(call), "completion": [_completion(choice)], **_tools(call)}
                except NoForm as error:
                    yield Refusal(rollout.rollout_id, str(error))
                else:
                    row |= {"rollout_id": rollout.rollout_id, "call_id": call.call_id}
                    yield Told(row, [rollout])


def trl_dpo_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """TRL's preference pairs: of each task, the best rollout against each one that got less.

    A pair is the first place where the two were shown the same and replied differently. Everything
    after it would put words of tools and users into what DPO trains.
    """
    for _, group in groupby(rollouts, key=lambda rollout: rollout.task_key):
        members = list(group)
        yield from (Refusal(m.rollout_id, "no reward") for m in members if m.reward is None)
        graded = [(-m.reward, m.rollout_id, m) for m in members if m.reward is not None]
        if not graded:
            continue
        best = min(graded)[2]
        worse = [m for _, _, m in sorted(graded, key=lambda g: g[:2]) if m.reward != best.reward]
        if not worse:
            yield from (Refusal(m.rollout_id, "all rewards of its task are equal") for _, _, m in graded)
        for rollout in worse:
            try:
                yield Told(_pair(best, rollout), [best, rollout])
            except NoForm as error:
                yield Refusal(rollout.rollout_id, str(error))


def trl_grpo_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """Tasks for a trainer that samples anew: prompt, tools, and how the stored rollouts did.

    Columns beside `prompt` reach GRPOTrainer's reward functions; the tools' code is given to it by you.
    """
    for key, group in groupby(rollouts, key=lambda rollout: rollout.task_key):
        members = list(group)
        first = members[0].calls[0]
        rewards = [member.reward for member in members if member.reward is not None]
        try:
            prompt = _prompt(first)
        except NoForm as error:
            yield Refusal(members[0].rollout_id, str(error))
            continue
        row = {
            "prompt": prompt,
            **_tools(first),
            "task_key": key,
            "task": None if members[0].task is None else json.dumps(members[0].task, sort_keys=True),
            "rollouts": len(members),
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        }
        yield Told(row, members)


def verl_rows(rollouts: Iterable[Exported]) -> Iterator[Told | Refusal]:
    """verl's RL dataset: one row a task. `ground_truth` is the task, as JSON; a reward function is yours."""
    index = 0
    for key, group in groupby(rollouts, key=lambda rollout: rollout.task_key):
        members = list(group)
        first = members[0].calls[0]
        if any(message.get("role") not in ("system", "developer", "user") for message in first.messages):
            reason = "its first prompt holds replies or results, and verl begins with what was asked"
            yield Refusal(members[0].rollout_id, reason)
            continue
        try:
            _require_prompt(first)
            prompt = [{"role": str(m["role"]), "content": text_of(m)} for m in first.messages]
        except NoForm as error:
            yield Refusal(members[0].rollout_id, str(error))
            continue
        rewards = [member.reward for member in members if member.reward is not None]
        task = members[0].task
        truth = None if task is None else json.dumps(task, sort_keys=True, ensure_ascii=False)
        row = {
            "data_source": "spangrad",
            "prompt": prompt,
            "ability": "agent",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {
                "index": index,
                "task_key": key,
                "tools": json.dumps([dict(tool) for tool in first.tools], ensure_ascii=False),
                "rollouts": len(members),
                "mean_reward": sum(rewards) / len(rewards) if rewards else None,
            },
        }
        yield Told(row, members)
        index += 1


FORMATS: Final[Mapping[str, Format]] = {
    form.name: form
    for form in (
        Format("messages", messages_rows, "jsonl", "OpenAI fine-tuning", True, drops_reasoning=True),
        Format("sharegpt", sharegpt_rows, "jsonl", "LLaMA-Factory (formatting: sharegpt)", True),
        Format("trl-sft", trl_sft_rows, "jsonl", "TRL SFTTrainer", True),
        Format("trl-dpo", trl_dpo_rows, "jsonl", "TRL DPOTrainer", True),
        Format("trl-grpo", trl_grpo_rows, "jsonl", "TRL GRPOTrainer", False),
        Format("verl", verl_rows, "parquet", "verl RLHFDataset", False),
    )
}


def _by_conversation(
    rollouts: Iterable[Exported], row_of: Callable[[Conversation], Row]
) -> Iterator[Told | Refusal]:
    for rollout in rollouts:
        for conversation in rollout.conversations:
            try:
                yield Told(row_of(conversation), [rollout])
            except NoForm as error:
                yield Refusal(rollout.rollout_id, str(error))


def _messages_row(conversation: Conversation) -> Row:
    _require_prompt(conversation.call)
    messages = [
        openai_message(message, weight=int(new) if message.get("role") == "assistant" else None)
        for message, new in zip(conversation.messages, conversation.new, strict=True)
    ]
    tools = [dict(tool) for tool in conversation.call.tools]
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _pair(best: Exported, worse: Exported) -> Row:
    chosen = {_prompt_key(call): call for call in reversed(best.calls)}
    for call in worse.calls:
        better = chosen.get(_prompt_key(call))
        if better is None or not (better.choices and call.choices):
            continue
        replies = [_completion(one.choices[0]) for one in (better, call)]
        if running_keys(replies[:1]) != running_keys(replies[1:]):
            return {
                "prompt": _prompt(better),
                "chosen": replies[:1],
                "rejected": replies[1:],
                **_tools(better),
                "score_chosen": best.reward,
                "score_rejected": worse.reward,
                "rollout_ids": [best.rollout_id, worse.rollout_id],
            }
    raise NoForm("it never replied differently to a prompt that the best rollout of its task was shown")


def _prompt_key(call: ModelCall) -> tuple[bytes, str]:
    shown = running_keys(call.messages)
    return (shown[-1] if shown else b"", json.dumps(call.tools, sort_keys=True, default=dict))


def _require_prompt(call: ModelCall) -> None:
    if not call.messages:
        raise NoForm("its prompt is not known as messages")


def _prompt(call: ModelCall) -> list[Row]:
    _require_prompt(call)
    return [template_message(message) for message in call.messages]


def _completion(choice: Choice) -> Row:
    return template_message({**choice.message, "role": "assistant"})


def _tools(call: ModelCall) -> dict[str, Any]:
    """The column `tools`, as JSON text: TRL decodes it, and schemas of several tools fit no table."""
    if not call.tools:
        return {}
    return {"tools": json.dumps([dict(tool) for tool in call.tools], ensure_ascii=False)}
