"""Pages with parts that a bench writes, between `<!-- NAME: begin ... -->` and `<!-- NAME: end -->`."""

import re
from collections.abc import Mapping


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with the parts put between their markers.

    Raises:
        ValueError: The markers of a part are not there once.
    """
    for name, text in parts.items():
        pattern = rf"(<!-- {name}: begin[^\n]*-->\n).*?(<!-- {name}: end -->)"
        page, count = re.subn(pattern, lambda found: f"{found[1]}{text}\n{found[2]}", page, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise ValueError(f"there are {count} pairs of `<!-- {name}: ... -->` markers, expected 1")
    return page
