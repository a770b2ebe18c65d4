"""A Langfuse export becomes a cloned policy.

    observations.jsonl, scores.jsonl -> ingest -> report -> rollouts that scored well -> rows -> cloning
                                                                     held-out tasks -> before and after

Without paths it makes a small export first. Needs `spangrad[train]`; no GPU and no engine.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from spangrad.adapters import calls_of
from spangrad.adapters.datasets import Filters, select
from spangrad.credit import Transition
from spangrad.credit.pipeline import credited_rows
from spangrad.store import open_store
from spangrad.store.base import Store
from spangrad.store.records import Rollout
from spangrad.trainer.learning.learner import Learner
from spangrad.trainer.learning.learner_config import LearnerConfig
from spangrad.trainer.learning.rendering import with_rendered_ids
from spangrad.trainer.policies.policy import conversation_of, make_policy

GOOD = "SELECT rollout_id FROM outcomes WHERE status = 'succeeded' AND rewards[?] >= ? ORDER BY rollout_id"
HELD_OUT = 0.2
"""Share of the tasks that is not trained on."""


def main() -> None:
    options = parse_options()
    disable_progress_bar()
    folder: Path = options.folder
    store = folder / "store.duckdb"
    if not options.paths:
        from make_export import make_export

        options.paths = make_export(folder / "export", traces=options.traces)

    # The rows become spans and model calls, the scores become rewards. What can be trained, and why not more?
    spangrad("ingest", *options.paths, "--store", store)
    spangrad("report", "--store", store, "--reward", options.score)

    with open_store(store, read_only=True) as opened:
        # Only what is known to be good is imitated: a trace that nobody scored is left out, too.
        good = [row["rollout_id"] for row in opened.query(GOOD, [options.score, options.at_least])]
        if not good:
            names = sorted({reward.name for reward in opened.rewards()})
            sys.exit(f"no rollout has {options.at_least:g} or more of --score {options.score!r}; of {names}")
        # A task is what a rollout's first call asked; its hash puts it on one side.
        chosen = select(
            opened, opened.rollouts(rollout_ids=good), Filters(heldout=HELD_OUT), lambda rollouts, calls: {}
        )
        training, held_out = (
            [one.rollout for one in chosen.side(HELD_OUT, is_heldout=side)] for side in (False, True)
        )
        if not training or not held_out:
            sys.exit(f"{len(good)} good rollouts are of too few tasks to train on some and hold out others")

        # The start: the model that was named, or a small one from nothing whose tokenizer fits the calls.
        start: Path = options.model or folder / "start"
        if options.model is None:
            calls = calls_of(opened, [rollout.rollout_id for rollout in training])
            make_policy(start, [conversation_of(call) for call in calls], vocab=512, seed=options.seed)
        tokenizer = AutoTokenizer.from_pretrained(start)

        # Langfuse keeps no token ids: the chat template makes them, and calls that it alters are refused.
        rows, test_rows = (rows_of(opened, side, tokenizer) for side in (training, held_out))

    learner = Learner(
        LearnerConfig(model_path=str(start), objective="bc", lr=options.lr, threads=options.threads)
    )
    print(f"\n{len(good)} good rollouts: {len(rows)} conversations are cloned, {len(test_rows)} held out")
    learner.fit_bc(rows, options.steps, batch_rows=16, progress=say_loss)
    cloned = folder / "cloned"
    learner.export_model(cloned)

    measured = {name: measure(model, test_rows) for name, model in (("start", start), ("cloned", cloned))}
    print(f"\nOn {len(test_rows)} held-out conversations, of questions that were never trained on:")
    print(f"{'':8}{'nats per token':>16}{'tokens':>10}{'replies':>10}   (as greedy decoding repeats them)")
    for name, found in measured.items():
        print(f"{name:8}{found['loss']:16.3f}{found['tokens']:10.1%}{found['replies']:10.1%}")
    print("\n" + example(cloned, test_rows[0]))
    sides = {"trained": [row.rollout_id for row in rows], "held_out": [row.rollout_id for row in test_rows]}
    (folder / "result.json").write_text(json.dumps(sides | measured, indent=2))
    print(f"\npolicy: {cloned}\nstore:  {store}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("paths", nargs="*", type=Path, help="Langfuse's export: observations and scores; else one is made")
    add("--score", default="right", help="name of the score that says what is good (default: right)")
    add("--at-least", type=float, default=1.0, help="least score of a rollout that is cloned (default: 1)")
    add("--model", type=Path, help="model folder to start from, with a chat template; else a small new one")
    add("--steps", type=int, default=300, help="optimizer steps of cloning (default: 300)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default: 2e-3; 1e-5 for a trained model)")
    add("--threads", type=int, default=1, help="of the learner (default: 1, best for a model this small)")
    add("--traces", type=int, default=1200, help="traces of the export that is made (default: 1200)")
    add("--seed", type=int, default=0, help="of a new model's weights (default: 0)")
    add("--folder", type=Path, default=Path(".spangrad/langfuse_export"), help="store and models go here")
    return parser.parse_args()


def spangrad(*arguments: str | Path) -> None:
    """Run a command as you would in a shell."""
    print("\n$ spangrad", shlex.join(map(str, arguments)), flush=True)
    done = subprocess.run([sys.executable, "-m", "spangrad", *map(str, arguments)])
    if done.returncode:
        sys.exit(done.returncode)  # it has said why


def rows_of(store: Store, rollouts: Sequence[Rollout], tokenizer: Any) -> Sequence[Transition]:
    """Rows for cloning: every reply gets advantage 1, everything else is context."""
    render = partial(with_rendered_ids, tokenizer=tokenizer)
    batch = credited_rows(store, rollouts, config=None, min_grade="text", render=render)
    for refused in batch.refused:
        print(f"not trained: {refused.call_id or refused.rollout_id}: {refused.reason}", file=sys.stderr)
    return batch.rows


def say_loss(step: int, metrics: Mapping[str, float]) -> None:
    if step == 1 or step % 100 == 0:
        print(f"step {step:4}: {metrics['loss/bc']:.3f} nats per token", flush=True)


def measure(model: Path, rows: Sequence[Transition]) -> dict[str, float]:
    """Loss of recorded replies, and the shares of tokens and replies that greedy decoding repeats."""
    learner = Learner(LearnerConfig(model_path=str(model), objective="bc"))
    logprobs = np.concatenate(learner.score([replace(row, temperature=1.0) for row in rows]))
    network = AutoModelForCausalLM.from_pretrained(model)
    repeated: list[NDArray[np.bool_]] = []
    for row in rows:
        with torch.inference_mode():
            tokens = torch.tensor(row.token_ids, dtype=torch.long)[None]
            likeliest = network(tokens).logits[0].argmax(-1).numpy()
        # A reply is decoded again exactly if each of its tokens is the likeliest after those before it.
        repeated += [
            likeliest[segment.start - 1 : segment.stop - 1] == row.token_ids[segment.start : segment.stop]
            for segment in row.segments
        ]
    return {
        "loss": -float(logprobs.mean()),
        "tokens": float(np.concatenate(repeated).mean()),
        "replies": float(np.mean([each.all() for each in repeated])),
    }


def example(model: Path, row: Transition) -> str:
    """The first call of a conversation, what was recorded, and what the policy says by itself."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    first = row.segments[0]
    prompt = torch.tensor(row.token_ids[: first.start], dtype=torch.long)[None]
    said = network.generate(prompt, max_new_tokens=64, do_sample=False)[0, first.start :]
    told = (row.token_ids[: first.start], row.token_ids[first.start : first.stop], said)
    names = ("asked", "recorded", "the policy")
    return "\n\n".join(
        f"-- {name}\n{tokenizer.decode(ids).strip()}" for name, ids in zip(names, told, strict=True)
    )


if __name__ == "__main__":
    main()
