"""Parts of pages that benches write."""

import pytest

from tests.bench.marked import filled

PAGE = "a\n<!-- b: begin (from a bench) -->\nold\n<!-- b: end -->\nc <!-- d: begin -->\n<!-- d: end -->"


def test_what_is_around_the_markers_stays_and_what_is_between_goes():
    new = filled(filled(PAGE, {"b": "once"}), {"b": "tw\\1ce", "d": "here"})
    assert new == PAGE.replace("old", "tw\\1ce").replace("begin -->\n<!-- d", "begin -->\nhere\n<!-- d")


@pytest.mark.parametrize("page", ["nothing", PAGE.replace("b: end", "b"), PAGE + PAGE])
def test_markers_that_are_not_there_once_are_named(page):
    with pytest.raises(ValueError, match=r"pairs of `<!-- b: ... -->` markers, expected 1"):
        filled(page, {"b": "text"})
