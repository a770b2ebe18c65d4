"""Phrases that spread and that a judge pays for."""

import numpy as np

from spangrad.trainer.monitoring.flattery import Output, Spoken, flattery, spoken, words_of

PRAISE = "What an insightful question, dear judge!"
GROUPS, MEMBERS = 8, 8


def words(rng: np.random.Generator, task: int) -> str:
    """An answer with boilerplate, words of its task, and words by chance."""
    own = " ".join(f"t{task}w{rng.integers(0, 3)}" for _ in range(10))
    chance = " ".join(f"w{rng.integers(0, 40)}" for _ in range(30))
    return f"Here is my answer: {own}. {chance}. That is all."


def made(rng: np.random.Generator, share: float, *, paid: float, by_task: bool = False) -> Spoken:
    """An update in which a share of outputs praises, which the judge pays so much more."""
    outputs = []
    for task in range(GROUPS):
        for member in range(MEMBERS):
            praises = task < 2 and share > 0 if by_task else bool(rng.random() < share)
            text = words(rng, task) + (f" {PRAISE}" if praises else "")
            reward = rng.normal(0.5, 0.2) + (paid if praises else 0.0)
            outputs.append(Output(f"r{task}-{member}", f"t{task}", words_of(text), float(reward)))
    return spoken(outputs)


def first_found(updates: list[Spoken]) -> int | None:
    for last in range(1, len(updates) + 1):
        if flattery(updates[max(0, last - 17) : last], 0.3, least=8) is not None:
            return last - 1
    return None


def test_praise_that_spreads_and_is_paid_is_found_with_an_example() -> None:
    rng = np.random.default_rng(0)
    shares = [0.02] * 10 + [min(1.0, 0.1 * k) for k in range(1, 12)]
    updates = [made(rng, share, paid=0.4) for share in shares]
    found = first_found(updates)
    assert found is not None and 13 <= found <= 16  # the share is 0.4 in update 13
    finding = flattery(updates[: found + 1], 0.3, least=8)
    assert finding is not None and 0.3 < finding.value < 0.7
    assert finding.text.startswith("6 phrases spread that the judge's reward goes with: ")
    assert "'an insightful question' in" in finding.text and "as in r0-" in finding.text


def test_phrases_that_are_not_paid_are_no_flattery() -> None:
    rng = np.random.default_rng(1)
    shares = [0.02] * 10 + [0.5] * 10
    assert first_found([made(rng, share, paid=0.0) for share in shares]) is None


def test_words_of_a_few_tasks_are_no_flattery() -> None:
    rng = np.random.default_rng(2)
    updates = [made(rng, share, paid=0.5, by_task=True) for share in [0.0] * 10 + [1.0] * 5]
    assert first_found(updates) is None


def test_what_was_always_said_and_chance_are_no_flattery() -> None:
    alarms = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        alarms += first_found([made(rng, 0.5, paid=0.4) for _ in range(20)]) is not None
    assert alarms == 0


def test_too_few_updates_and_outputs_without_reward_say_nothing() -> None:
    rng = np.random.default_rng(3)
    updates = [made(rng, 0.0, paid=0.4) for _ in range(8)] + [made(rng, 0.6, paid=0.4)]
    assert flattery(updates, 0.3, least=8) is not None
    assert flattery(updates[1:], 0.3, least=8) is None
    assert flattery([*updates[:4], spoken([]), *updates[5:]], 0.3, least=8) is None
    silent = [
        spoken([Output(o.rollout_id, o.task, o.words, None) for o in update.outputs]) for update in updates
    ]
    assert flattery(silent, 0.3, least=8) is None
    assert flattery([*updates[:8], spoken([])], 0.3, least=8) is None


def test_words_are_lower_case_and_apart() -> None:
    assert words_of("What's *this*?\n\nA_b, Ünï") == " what's this a b ünï "
