"""Put new weights into one running engine, and prove that it serves them.

Knows vLLM's control endpoints. Does not know where the weights come from, who is asked for
completions, or that there are other engines: see `fleet.py`.

    pause(keep) -> start -> update -> finish(version) -> reset prefix cache -> resume

Invariants:
* the engine never changes weights while it computes: it is paused first, and resumed
  whatever happens;
* no token is labelled with a version that did not sample it: weights and version change
  while nothing is sampled, and a half-done change is labelled `unknown`;
* no block of the key-value cache outlives the weights that made it, those of running
  requests included: they are computed again, and continue with the new weights;
* publishing the same version again is harmless.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spangrad.errors import PublishError
from spangrad.trainer.serving.checksums import weights_digest
from spangrad.trainer.serving.control import Control
from spangrad.trainer.serving.serving_config import PauseMode
from spangrad.trainer.serving.vllm_plugin import REFUSAL

FLOAT_NOISE = 2e-5
"""Nats: smaller mean differences say nothing, float32 arithmetic in another order makes them."""
UNKNOWN_VERSION = "unknown"
"""Version of an engine whose weights are neither the old nor the new ones for sure."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What a publish did."""

    seconds: float
    """From the pause to the resume."""
    version: int
    """Policy version that the engine serves now."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the served logprobs are from the learner's."""

    mean_gap: float
    """Mean absolute difference, nats."""
    max_gap: float
    """Largest absolute difference, nats."""
    moved: float | None
    """Mean absolute difference between the served logprobs before and now, nats; None: not asked."""
    expected: float | None
    """The same for the learner's, before and after the update; None: not asked."""
    tokens: int
    """Tokens compared."""


def publish(
    engine_url: str,
    weights_path: str | Path,
    version: int,
    *,
    mode: PauseMode = "keep",
    timeout_s: float = 120.0,
) -> PublishReport:
    """Serve the weights of a safetensors file as `version`.

    Args:
        engine_url: Address of vLLM, without `/v1`.
        weights_path: A safetensors file with Hugging Face names that the engine's machine can read. If it
            has checksums (`checksums.py`), the engine compares them before it loads.
        version: Policy version, 0 or more.
        mode: What becomes of running requests: `keep` freezes and continues them, `wait` lets them end
            first, `abort` ends them.
        timeout_s: Longest wait for one answer of the engine; with `wait`, also for its running requests.

    Raises:
        PublishError: Says what went wrong and what the engine serves now.
    """
    path = Path(weights_path).absolute()
    with Control(engine_url, timeout_s=timeout_s) as engine:
        started = time.monotonic()
        try:
            engine.post(f"/pause?mode={mode}")
        except PublishError:
            with contextlib.suppress(PublishError):
                engine.post("/resume")  # a pause that timed out may still come
            raise
        try:
            _replace_weights(engine, path, version)
        except PublishError as error:
            raise _resumed_after(engine, error) from error
        except BaseException:
            with contextlib.suppress(PublishError):
                engine.post("/resume")
            raise
        engine.post("/resume")
        seconds = time.monotonic() - started
    return PublishReport(seconds=seconds, version=version)


def served_version(engine_url: str, *, timeout_s: float = 10.0) -> int | None:
    """Policy version that the engine serves; None before the first publish and after a broken one.

    Raises:
        PublishError: The engine does not answer.
    """
    with Control(engine_url, timeout_s=timeout_s) as engine:
        return _version(engine)


def has_known_weights(engine_url: str, *, timeout_s: float = 10.0) -> bool:
    """Whether the engine answers and serves weights that are all of one version, its first ones included."""
    with contextlib.suppress(PublishError), Control(engine_url, timeout_s=timeout_s) as engine:
        return engine.get("/weight_info").get("weight_version") != UNKNOWN_VERSION
    return False


def disown(engine_url: str, *, timeout_s: float = 10.0) -> None:
    """Have no call labelled with the version that the engine tells: its weights are others.

    Raises:
        PublishError: The engine does not answer.
    """
    with Control(engine_url, timeout_s=timeout_s) as engine:
        engine.post("/update_weight_version", {"new_version": UNKNOWN_VERSION})


def served_logprobs(
    engine_url: str,
    token_ids_rows: Sequence[Sequence[int]],
    *,
    model: str | None = None,
    timeout_s: float = 120.0,
) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Logprob that the engine gives to every token of a row but the first, at temperature 1.

    These are vLLM's `prompt_logprobs`: of the plain model whatever `--logprobs-mode` and the
    sampling parameters say, and computed afresh, never from the prefix cache. A row of n tokens
    gives n - 1 values, element t for token t + 1. A row that fills the engine's context
    is cut by one token: vLLM wants room for an answer. `model` is an adapter's name; None: the
    engine's own model.

    Raises:
        PublishError: The engine does not answer, or refuses the rows.
    """
    with Control(engine_url, timeout_s=timeout_s) as engine:
        served = engine.get("/v1/models")["data"][0]
        longest = int(served["max_model_len"]) - 1
        rows = [[int(token) for token in row[:longest]] for row in token_ids_rows]
        if short := [index for index, row in enumerate(rows) if len(row) < 2]:
            raise PublishError(
                f"row {short[0]} has fewer than 2 tokens; the first token of a row has no logprob"
            )
        if not rows:
            return []
        named = {"model": model or served["id"], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        # One after another: with adapters vLLM on CPU dies of prompt_logprobs of two rows in one step.
        choices = [engine.post("/v1/completions", named | {"prompt": [row]})["choices"][0] for row in rows]
    return [
        np.array(
            [
                entry[str(token)]["logprob"]
                for entry, token in zip(c["prompt_logprobs"][1:], row[1:], strict=True)
            ]
        )
        for c, row in zip(choices, rows, strict=True)
    ]


def prove(
    engine_url: str,
    token_ids_rows: Sequence[Sequence[int]],
    learner_logprobs: Sequence[Sequence[float] | np.ndarray[Any, Any]],
    *,
    tolerance_nats: float,
    model: str | None = None,
    before: Sequence[np.ndarray[Any, Any]] | None = None,
    learner_before: Sequence[np.ndarray[Any, Any]] | None = None,
    timeout_s: float = 120.0,
) -> Proof:
    """Compare what the engine serves with what the learner computes for the same tokens.

    Args:
        engine_url: Address of vLLM, without `/v1`.
        token_ids_rows: Whole rows, prompt included, 2 tokens or more each.
        learner_logprobs: For every row of n tokens, n - 1 logprobs at temperature 1, nats.
        tolerance_nats: Largest acceptable mean difference; about 1e-5 is usual in float32, 0.04 in bfloat16.
        model: As for `served_logprobs`.
        before: What `served_logprobs` said before the publish, to measure how far it moved.
        learner_before: The learner's logprobs before the update. With `before`, the served ones must
            have moved as far as the learner's: an update so small that old weights pass the
            tolerance is found out too.
        timeout_s: Longest wait for the engine.

    Raises:
        PublishError: The mean difference is larger (or not a number), or the engine did not move.
    """
    for index, (row, learner) in enumerate(zip(token_ids_rows, learner_logprobs, strict=True)):
        if len(learner) != len(row) - 1:
            raise PublishError(
                f"row {index} has {len(row)} tokens and {len(learner)} learner logprobs;"
                f" expected {len(row) - 1}, one for every token but the first"
            )
    served = served_logprobs(engine_url, token_ids_rows, model=model, timeout_s=timeout_s)
    gaps = _gaps(served, learner_logprobs)
    now = [np.asarray(row, dtype=np.float64) for row in learner_logprobs]
    if not gaps.size:
        raise PublishError("there is no token to compare; give at least one row")
    proof = Proof(
        mean_gap=float(gaps.mean()),
        max_gap=float(gaps.max()),
        moved=None if before is None else float(_gaps(served, before).mean()),
        expected=None if learner_before is None else float(_gaps(now, learner_before).mean()),
        tokens=int(gaps.size),
    )
    if not proof.mean_gap <= tolerance_nats:
        raise PublishError(
            f"the engine at {engine_url} serves other weights than the learner's: mean logprob difference"
            f" {proof.mean_gap:.4g} nats over {proof.tokens} tokens, expected {tolerance_nats:g} or less;"
            " publish again or restart the engine"
        )
    if (
        proof.moved is not None
        and proof.expected is not None
        and proof.expected > FLOAT_NOISE
        and proof.moved < proof.expected / 2
    ):
        raise PublishError(
            f"the engine at {engine_url} still serves the old weights: its logprobs moved by"
            f" {proof.moved:.2g} nats, the learner's by {proof.expected:.2g}; publish again or restart it"
        )
    return proof


def _replace_weights(engine: Control, path: Path, version: int) -> None:
    """Load, label and forget what the old weights computed. The engine is paused."""
    old = _version(engine)
    served = f"version {old}" if old is not None else "the weights that it served before"
    try:
        if not _start_update(engine):
            served = f"weights of a publish that died, labelled {UNKNOWN_VERSION!r}"
        engine.post("/update_weights", {"update_info": {"path": str(path), "digest": weights_digest(path)}})
    except PublishError as error:
        if REFUSAL in str(error):
            reason = str(error).split(REFUSAL, 1)[1]
            raise PublishError(
                f"version {version} was not published: {str(path)!r} {reason}; the engine serves {served}"
            ) from error
        raise _half_done(engine, version, error) from error
    try:
        engine.post("/finish_weight_update", {"weight_version": str(version)})
        if not engine.post("/reset_prefix_cache?reset_running_requests=true").get("success"):
            raise PublishError("the engine could not reset its prefix cache")
    except PublishError as error:
        raise _half_done(engine, version, error) from error


def _resumed_after(engine: Control, error: PublishError) -> PublishError:
    try:
        engine.post("/resume")
    except PublishError as second:
        return PublishError(f"{error}; the engine could not be resumed either ({second})")
    return error


def _start_update(engine: Control) -> bool:
    """Begin; False if a trainer died between start and finish: nobody knows what it had loaded."""
    try:
        engine.post("/start_weight_update")
    except PublishError as error:
        if "already active" not in str(error):
            raise
        engine.post("/update_weight_version", {"new_version": UNKNOWN_VERSION})
        engine.post("/finish_weight_update", {})
        engine.post("/start_weight_update")
        return False
    return True


def _half_done(engine: Control, version: int, error: PublishError) -> PublishError:
    try:
        engine.post("/update_weight_version", {"new_version": UNKNOWN_VERSION})
    except PublishError:
        return PublishError(
            f"version {version} was not published: {error}; the engine can't be used, restart it"
        )
    return PublishError(
        f"version {version} was not published: {error}; the engine may serve a mix of old and new weights,"
        f" labelled {UNKNOWN_VERSION!r}: publish again or restart it"
    )


def _version(engine: Control) -> int | None:
    value = str(engine.get("/weight_info").get("weight_version"))
    return int(value) if value.isascii() and value.isdecimal() else None


def _gaps(
    ours: Sequence[np.ndarray[Any, Any]], theirs: Sequence[Sequence[float] | np.ndarray[Any, Any]]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    pairs = [(a, np.asarray(b, dtype=np.float64)[: len(a)]) for a, b in zip(ours, theirs, strict=True)]
    return np.concatenate([np.abs(a - b) for a, b in pairs]) if pairs else np.zeros(0)
