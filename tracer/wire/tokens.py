"""Token ids and logprobs of a reply: the engine's, or not there.

Knows where OpenAI's, vLLM's and LiteLLM's JSON have them. Invariants:
* None is computed, padded or cut. A list with a hole, or one whose length contradicts another count, is
  left out and named in `spangrad.dropped`.
* Ids that can't all have been sampled (an end-of-turn token put there by a server, one lost on the way)
  are not among the sampled ones: usage counts what was sampled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from spangrad.tracer import conventions as c

NO_LOGPROB = -9999.0
"""vLLM's value for a token that has no logprob."""
ID_GAPS = "spangrad_chunks_without_ids"
"""Key of a streamed choice: how many of its chunks had text and no ids."""
_ID_TOKEN = "token_id:"


def token_attributes(
    response: Mapping[str, Any],
    choices: Sequence[Mapping[str, Any]],
    request: Mapping[str, Any],
    dropped: dict[str, str],
) -> dict[str, Any]:
    """Packed ids and logprobs of a response to one prompt; `choices` are in the order of their messages."""
    attributes: dict[str, Any] = {}
    prompt = response.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
    if prompt:
        _pack(attributes, c.PROMPT_TOKEN_IDS, prompt, dropped)
    ids = [_ids(choice) for choice in choices]
    told = (response.get("usage") or {}).get("completion_tokens")
    is_finished = all(choice.get("finish_reason") for choice in choices)
    problem = count_problem(told, ids) if is_finished else None
    for index, (choice, found) in enumerate(zip(choices, ids, strict=True)):
        name = c.choice_key(c.SAMPLED_TOKEN_IDS, index)
        gaps = choice.get(ID_GAPS) if choice.get("token_ids") is not None else None
        if found and gaps:
            dropped[name] = f"{gaps} chunks with text came without token ids"
        elif found and problem is not None:
            dropped[name] = problem
        elif found:
            _pack(attributes, name, found, dropped)
        _add_logprobs(attributes, index, choice, attributes.get(name), request, dropped)
    return attributes


def logprobs_of(block: Any) -> list[Any]:
    """The logprob of each sampled token in a `logprobs` object of either route."""
    if not isinstance(block, Mapping):
        return []
    if isinstance(block.get("token_logprobs"), Sequence):  # /completions
        return list(block["token_logprobs"])
    return [item.get("logprob") for key in ("content", "refusal") for item in block.get(key) or ()]


def _add_logprobs(
    attributes: dict[str, Any],
    index: int,
    choice: Mapping[str, Any],
    packed_ids: bytes | None,
    request: Mapping[str, Any],
    dropped: dict[str, str],
) -> None:
    values = logprobs_of(choice.get("logprobs"))
    if not values:
        return
    name = c.choice_key(c.SAMPLED_LOGPROBS, index)
    count = None if packed_ids is None else len(packed_ids) // 4
    if request.get("use_beam_search"):
        dropped[name] = "beam search does not sample"
    elif request.get("echo") and count is None:
        dropped[name] = "echo: the list is about the prompt, too"
    elif None in values or NO_LOGPROB in values:
        dropped[name] = "a sampled token came without a logprob"
    elif count is not None and count != len(values):
        dropped[name] = f"{count} token ids, {len(values)} logprobs"
    else:
        _pack(attributes, name, values, dropped)


def _ids(choice: Mapping[str, Any]) -> Any:
    token_ids = choice.get("token_ids")
    if token_ids is None:
        token_ids = (choice.get("provider_specific_fields") or {}).get("token_ids")
    block = choice.get("logprobs")
    if token_ids is None and isinstance(block, Mapping):
        tokens = block.get("tokens") or [item.get("token") for item in block.get("content") or ()]
        token_ids = _ids_in(tokens)
    return token_ids


def _ids_in(tokens: Sequence[Any]) -> list[int] | None:
    """Ids that vLLM wrote into the logprobs (`return_tokens_as_token_ids`)."""
    ids = [
        int(token[len(_ID_TOKEN) :])
        for token in tokens
        if isinstance(token, str) and token.startswith(_ID_TOKEN) and token[len(_ID_TOKEN) :].isdecimal()
    ]
    return ids if len(ids) == len(tokens) else None


def count_problem(told: Any, ids: Sequence[Any]) -> str | None:
    """Why the ids of all choices can't be what was sampled, if usage counts `told` completion tokens.

    Not for an unfinished stream, whose usage is a running count.
    """
    if not isinstance(told, int) or not all(isinstance(found, list) for found in ids):
        return None
    seen = sum(len(found) for found in ids)
    return None if seen == told else f"{seen} token ids came, usage counts {told}"


def _pack(attributes: dict[str, Any], name: str, values: Any, dropped: dict[str, str]) -> None:
    pack = c.pack_floats if name.startswith(c.SAMPLED_LOGPROBS) else c.pack_ints
    try:
        attributes[name] = pack(values)
    except (TypeError, OverflowError) as error:
        dropped[name] = f"not a list of numbers: {error}"
