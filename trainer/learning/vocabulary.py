"""Whether the token ids that a trace holds can be of a tokenizer, or of a model, and not too many for it.

Knows ids, a tokenizer and the reply as it was recorded. Does not know names of models: ids are of a
tokenizer if it has them and they say what was recorded.

Invariants:
* nothing is tokenised: ids stay as the engine gave them, or are refused;
* a reply without a text of its own is checked by the size of the vocabulary alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from spangrad.adapters.model_call import ModelCall
from spangrad.errors import GradeError

OTHER_VOCABULARY: Final = "token ids of another vocabulary"
"""Kind of the reason of calls whose ids are not the tokenizer's."""
TOO_LONG: Final = "longer than the model's context"
"""Kind of the reason of calls that no engine can have made with this model."""
_PROBE: Final = 16
"""Characters at a text's beginning and end that are looked for. Parsers of tool calls and thoughts cut and
trim what was sampled, but leave some end of some text as it was; ids of another vocabulary leave none."""


class Vocabulary(Protocol):
    """The part of a Hugging Face tokenizer that is needed to read ids."""

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Token to id."""
        ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Ids to text."""


def check_size(call: ModelCall, size: int) -> None:
    """Make sure that a vocabulary of `size` tokens has every id of a call.

    Raises:
        GradeError: It has not.
    """
    for name, ids in _lists(call):
        if (highest := max(ids)) >= size:
            raise GradeError(
                f"{OTHER_VOCABULARY}: call {call.call_id!r} has {name} id {highest}, and the vocabulary has"
                f" {size} tokens; it was made by {call.model!r}"
            )


def check_length(call: ModelCall, most: int) -> None:
    """Make sure that a call has no more than `most` tokens with any of its replies.

    Raises:
        GradeError: It has.
    """
    prompt = len(call.prompt_token_ids or ())
    tokens = prompt + max((len(choice.sampled_token_ids or ()) for choice in call.choices), default=0)
    if tokens > most:
        raise GradeError(
            f"{TOO_LONG}: call {call.call_id!r} has {tokens} tokens, and the model takes {most};"
            f" it was made by {call.model!r}"
        )


def check_vocabulary(call: ModelCall, tokenizer: Vocabulary) -> None:
    """Make sure that the ids of a call can be this tokenizer's.

    Raises:
        GradeError: It has no such id, or the sampled ids say something else than the recorded reply.
    """
    if any(max(ids) >= len(tokenizer) for _, ids in _lists(call)):
        check_size(call, max(tokenizer.get_vocab().values()) + 1)  # some vocabularies have gaps
    for index, choice in enumerate(call.choices):
        texts = list(_texts(choice.message))
        if texts and choice.sampled_token_ids and not _say(choice.sampled_token_ids, texts, tokenizer):
            said = tokenizer.decode(list(choice.sampled_token_ids[:_PROBE]))
            raise GradeError(
                f"{OTHER_VOCABULARY}: the reply of call {call.call_id!r} choice {index} is {texts[0]!r:.60},"
                f" and its ids decode to {said!r:.60}; it was made by {call.model!r}"
            )


def _lists(call: ModelCall) -> Iterator[tuple[str, Sequence[int]]]:
    if call.prompt_token_ids:
        yield "prompt", call.prompt_token_ids
    for choice in call.choices:
        if choice.sampled_token_ids:
            yield "sampled", choice.sampled_token_ids


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    """What the policy is known to have written. Arguments are left out: parsers write them anew."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else [{"text": content}]
    told = [part.get("text") for part in parts if isinstance(part, Mapping)]
    told += [message.get("reasoning"), message.get("refusal")]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        told.append(function.get("name") if isinstance(function, Mapping) else None)
    yield from (text for text in told if isinstance(text, str) and _dense(text))


def _say(ids: Sequence[int], texts: Sequence[str], tokenizer: Vocabulary) -> bool:
    dense = [_dense(text) for text in texts]
    probes = [probe for text in dense for probe in (text[:_PROBE], text[-_PROBE:])]
    for skips in (True, False):  # engines leave special tokens out, but where they are asked not to
        decoded = tokenizer.decode(list(ids), skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        said = _dense(decoded)
        if any(probe in said for probe in probes):
            return True
    return False


def _dense(text: str) -> str:
    """Text without spaces, and without the marks of characters that were cut."""
    return "".join(text.split()).replace("\ufffd", "")
