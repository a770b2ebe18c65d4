"""What a call can honestly train, and why not more.

A pure function of one (merged) reading. Every rule is a row of the table in
`adapters/README.md`. A reason reads `what: detail`; the part before the colon is
the same for all calls with that reason, so that reasons can be counted.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from spangrad.adapters.dialects.decoding import FAILED_FINISHES
from spangrad.adapters.messages import NO_CHAT_FORM
from spangrad.adapters.model_call import Choice, Grade, Purpose
from spangrad.adapters.packed import Packed, any_negative
from spangrad.adapters.reading import Reading
from spangrad.tracer.wire.constraints import is_constrained

MISSING_LOGPROB: Final = -9999.0
"""What vLLM reports for a token that has no logprob."""
LEFT_EARLY: Final = "stream was left early"
TOOLS_UNKNOWN: Final = "tool definitions were not recorded"
"""Kind of the reason of calls whose prompt is not known whole: they used tools that nobody told."""
FROM_CACHE: Final = "the reply came out of a cache: nothing was sampled"
SYNTHETIC: Final = "the gateway answered, no model did"
"""Kind of the reason of calls that never reached an engine."""
EMBEDDED: Final = "an embedding: nothing was sampled"
"""The only reason of a call that has nothing to train and is none the worse for it."""

_RESULTS: Final = ("tool", "function")
"""Roles of messages that tell what a tool gave."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "temperature": (1, None),
    "top_p": (1, None),
    "top_k": (0, -1, None),
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": (None, {}),
    # Other engines'; one that does not know a parameter ignores it, which no trace tells.
    **dict.fromkeys(("typical_p", "tfs", "tfs_z", "best_of"), (1, None)),
    **dict.fromkeys(
        (
            *("top_a", "eta_cutoff", "epsilon_cutoff", "smoothing_factor", "dynatemp_range"),
            *("mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier", "no_repeat_ngram_size"),
        ),
        (0, None),
    ),
    **dict.fromkeys(("vllm_xargs", "logits_processors", "custom_logit_processor"), (None, {}, [], "")),
}
"""Sampling parameters that change the distribution, and their values that do not."""
_PLAIN_LOGPROBS: Final = bytes(range(0x80, 0xC6))
"""Highest bytes of the float32s between -8192 and -0.0."""
_WITH_DEFAULTS: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
)
"""Those that an engine may put in by itself."""
ORDER: Final = (Grade.EXACT, Grade.IDS, Grade.TEXT, Grade.UNUSABLE)
"""Best first."""


def worst(grades: Iterator[Grade]) -> Grade:
    """The worst of some grades; `exact` of none."""
    return max(grades, key=ORDER.index, default=Grade.EXACT)


def at_least(grade: Grade, wanted: Grade) -> bool:
    """Whether `grade` is as good as `wanted`."""
    return ORDER.index(grade) <= ORDER.index(wanted)


def reason_kind(reason: str) -> str:
    """The part of a reason that is the same for all calls that share it."""
    return reason.split(": ", 1)[0]


def grade(reading: Reading) -> tuple[Grade, tuple[str, ...]]:
    """Grade a reading. The reasons say why it is not better; none for `exact`."""
    if reading.purpose is Purpose.EMBEDDING and reading.error is None and not reading.choices:
        return Grade.UNUSABLE, (EMBEDDED,)
    if fatal := tuple(_unusable(reading)):
        return Grade.UNUSABLE, fatal
    if no_ids := tuple(_without_ids(reading)):
        if nothing := tuple(_without_text(reading)):
            return Grade.UNUSABLE, (*no_ids, *nothing)
        unknown = (*_unknown_ends(reading), *_unknown_tools(reading))
        return Grade.TEXT, (*no_ids, *unknown, *reading.token_losses, *reading.notes)
    if doubts := tuple(_doubts(reading)):
        return Grade.IDS, (*doubts, *reading.token_losses)
    return Grade.EXACT, ()


def _unusable(reading: Reading) -> Iterator[str]:
    if reading.error is not None:
        yield f"error: {reading.error}"
    if reading.is_stream_complete is False:
        yield LEFT_EARLY
    yield from reading.faults
    if reading.is_cached:
        yield FROM_CACHE
    if reading.synthetic is not None:
        yield f"{SYNTHETIC}: {reading.synthetic}"
    for name in reading.redacted:
        yield f"text was redacted: {name}"
    if not reading.choices:
        if reading.error is None:
            yield "no output was recorded"
        return
    for index, choice in enumerate(reading.choices):
        if choice.finish_reason is None and reading.is_whole:
            continue
        if choice.finish_reason is None and reading.is_stream_complete is not False:
            yield (LEFT_EARLY if reading.is_streamed else "no finish reason") + f": choice {index}"
        elif choice.finish_reason is not None and choice.finish_reason.lower() in FAILED_FINISHES:
            yield f"reply was not finished: choice {index} ended with {choice.finish_reason!r}"
        if choice.sampled_token_ids is not None and not choice.sampled_token_ids:
            yield f"no token was sampled: choice {index}"


def _unknown_ends(reading: Reading) -> Iterator[str]:
    for index, choice in enumerate(reading.choices):
        if choice.finish_reason is None:
            yield f"finish reason was not recorded: choice {index} came in one piece"


def _unknown_tools(reading: Reading) -> Iterator[str]:
    if reading.tools or reading.keeps_tools:
        return
    said = (*reading.messages, *(choice.message for choice in reading.choices))
    if any(m.get("tool_calls") or m.get("function_call") or m.get("role") in _RESULTS for m in said):
        yield f"{TOOLS_UNKNOWN}: tools were used, so the model was shown more than the messages"


def _without_ids(reading: Reading) -> Iterator[str]:
    if reading.prompt_token_ids is None and all(x.sampled_token_ids is None for x in reading.choices):
        yield "no token ids"
        return
    if not reading.prompt_token_ids:
        yield "no prompt token ids"
    for index, choice in enumerate(reading.choices):
        if choice.sampled_token_ids is None:
            yield f"no sampled token ids: choice {index}"


def _without_text(reading: Reading) -> Iterator[str]:
    if not reading.messages:
        yield "no input messages were recorded"
    yield from reading.text_losses
    yield from (note for note in reading.notes if note.startswith(NO_CHAT_FORM))
    for index, choice in enumerate(reading.choices):
        if not any(choice.message.get(key) for key in ("content", "tool_calls", "reasoning")):
            yield f"no output was recorded: choice {index}"


def _doubts(reading: Reading) -> Iterator[str]:
    for index, choice in enumerate(reading.choices):
        yield from _choice_doubts(index, choice)
    yield from _unknown_ends(reading)
    yield from _miscounted(reading)
    if reading.is_constrained or is_constrained(_request_of(reading)):
        yield "sampled under constraint"
    if reading.unknown_defaults is not None:
        asked = {name for name, value in reading.sampling.items() if value is not None}
        if left_out := _WITH_DEFAULTS - asked:
            yield f"sampling defaults unknown: {', '.join(sorted(left_out))}; {reading.unknown_defaults}"
    if reading.sampling.get("temperature") == 0:
        yield "sampled greedily: at temperature 0 every behaviour logprob is 0"
    elif reading.logprobs_mode != "processed" and (changes := _processing(reading)):
        mode = f"are {reading.logprobs_mode}" if reading.logprobs_mode else "have no known mode"
        yield f"logprobs are not of the sampled distribution: they {mode}, with {changes}"
    elif changes := _processing(reading, besides=("temperature",)):
        yield f"a learner can't recompute the sampled distribution: {changes}"


def _miscounted(reading: Reading) -> Iterator[str]:
    """Where the usage counts other tokens than there are ids; some servers count cached ones apart."""
    if not (usage := reading.usage):
        return
    cached = usage.get("cache_read_tokens", 0) + usage.get("cache_creation_tokens", 0)
    ids = len(reading.prompt_token_ids or ())
    if (count := usage.get("input_tokens")) is not None and ids not in (count, count + cached):
        yield f"usage contradicts the token ids: {count} prompt tokens were counted, {ids} ids came"
    ids = sum(len(choice.sampled_token_ids or ()) for choice in reading.choices)
    if (count := usage.get("output_tokens")) is not None and ids != count:
        yield f"usage contradicts the token ids: {count} sampled tokens were counted, {ids} ids came"


def _request_of(reading: Reading) -> Mapping[str, Any]:
    return {**reading.sampling, "tools": reading.tools} if reading.tools else reading.sampling


def _processing(reading: Reading, besides: Collection[str] = ()) -> str:
    """What was done to the distribution before sampling, as text; `besides` is left out."""
    if _NEUTRAL.keys().isdisjoint(reading.sampling):
        return ""
    asked = {name: reading.sampling[name] for name in _NEUTRAL if name in reading.sampling}
    return ", ".join(
        f"{name} {value}"
        for name, value in asked.items()
        if name not in besides and value not in _NEUTRAL[name]
    )


def _choice_doubts(index: int, choice: Choice) -> Iterator[str]:
    count = len(choice.sampled_token_ids or ())
    if choice.logprobs is None:
        yield f"no logprobs: choice {index}"
    elif (found := len(choice.logprobs)) != count:
        yield f"logprobs don't cover the reply: choice {index} has {found} for {count} sampled ids"
    else:
        yield from _logprob_doubts(index, choice.logprobs)
    versions = choice.policy_versions
    if versions is None or any_negative(versions):
        yield f"policy version unknown: choice {index}"
    elif (found := len(versions)) != count:
        yield f"policy versions don't cover the reply: choice {index} has {found} for {count} sampled ids"


def _logprob_doubts(index: int, logprobs: Sequence[float]) -> Iterator[str]:
    if isinstance(logprobs, Packed) and not logprobs.packed[3::4].translate(None, _PLAIN_LOGPROBS):
        return
    values = np.asarray(logprobs)
    if not values.size or (np.maximum.reduce(values) <= 0 and np.minimum.reduce(values) > MISSING_LOGPROB):
        return
    if missing := np.flatnonzero(values == MISSING_LOGPROB).tolist():
        yield f"a logprob is missing: choice {index} has {MISSING_LOGPROB} at token {missing[0]}"
    elif not np.isfinite(values).all() or (values > 0).any():
        yield f"a logprob is no logprob: choice {index} has a value that is positive or not finite"
