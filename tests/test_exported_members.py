"""What each part exports is a decision: sorted, importable, and listed here."""

import importlib

import pytest

PARTS = (
    "spangrad",
    "spangrad.tracer",
    "spangrad.store",
    "spangrad.adapters",
    "spangrad.credit",
    "spangrad.trainer",
)


@pytest.mark.parametrize("part", PARTS)
def test_exports_are_sorted_and_exist(part: str) -> None:
    module = importlib.import_module(part)
    exported = list(getattr(module, "__all__", []))
    assert exported == sorted(exported)
    assert not [name for name in exported if getattr(module, name, None) is None]


def test_the_public_api_is_small_and_this() -> None:
    import spangrad

    assert spangrad.__all__ == [
        "RolloutMiddleware",
        "__version__",
        "continue_rollout",
        "current_rollout",
        "feedback",
        "flush",
        "init",
        "purpose",
        "reward",
        "rollout",
        "rollout_headers",
        "shutdown",
        "state",
        "step",
        "tool",
    ]
