"""The form of an answer, whatever it says."""

import json
import re
from collections.abc import Collection, Sequence

from spangrad.credit.verifiers.arguments import strings
from spangrad.errors import CreditError


def has_tags(text: object, tags: Sequence[str]) -> float:
    """1.0 if `<tag>...</tag>` of every tag occurs exactly once, in this order, none inside another, else 0.0.

    Args:
        text: What the agent wrote; give its own words alone: a tag in a tool's result would count.
        tags: Names such as `think`, `answer`; at least one.

    Raises:
        CreditError: There is no tag, a name is no word, or the tags are no list of strings.
    """
    tags = strings(tags, "tags")
    if not tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise CreditError(f"tags are {tags!r}; expected names of letters, digits, '_' and '-'")
    if not isinstance(text, str):
        return 0.0
    places = [[text.find(mark) for mark in (f"<{tag}>", f"</{tag}>")] for tag in tags]
    flat = [place for pair in places for place in pair]
    is_once = all(text.count(mark) == 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>"))
    return float(is_once and flat == sorted(flat))


def has_json_keys(text: object, keys: Collection[str] = ()) -> float:
    """1.0 if the text is one JSON object with at least these keys, and nothing else, else 0.0.

    Raises:
        CreditError: The keys are no list of strings.
    """
    keys = strings(keys, "keys")
    if not isinstance(text, str):
        return 0.0
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return float(isinstance(value, dict) and all(key in value for key in keys))
