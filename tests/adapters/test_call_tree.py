"""The call tree against its slow reference, and the shapes that agents make."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spangrad.adapters.call_tree import CallTree, build_tree
from spangrad.adapters.model_call import Grade, ModelCall
from tests.adapters.building import call
from tests.reference.estimators import continued, longest_common_beginning


def parents(tree: CallTree) -> list[int | None]:
    return [node.parent for node in tree.nodes]


def paths(tree: CallTree) -> list[list[str]]:
    return [[node.call.call_id for node in path] for path in tree.paths()]


def test_turns_of_a_conversation_are_one_chain():
    tree = build_tree(
        [
            call("a", [1, 2], [3], start_ns=0),
            call("b", [1, 2, 3, 4], [5, 6], start_ns=1),
            call("c", [1, 2, 3, 4, 5, 6], [7], start_ns=2),
        ]
    )
    assert parents(tree) == [None, 0, 1]
    assert paths(tree) == [["a", "b", "c"]]


def test_the_longest_match_is_continued():
    tree = build_tree(
        [
            call("a", [1], [2], start_ns=0),
            call("b", [1, 2], [3], start_ns=1),
            call("c", [1, 2, 3, 4], [5], start_ns=2),
        ]
    )
    assert parents(tree) == [None, 0, 1]


def test_parallel_branches_continue_the_same_call():
    tree = build_tree(
        [
            call("a", [1], [2], start_ns=0),
            call("b", [1, 2, 8], [3], start_ns=1),
            call("c", [1, 2, 9], [3], start_ns=1),
        ]
    )
    assert parents(tree) == [None, 0, 0]
    assert paths(tree) == [["a", "b"], ["a", "c"]]


def test_template_drift_forks_at_the_first_token_that_differs():
    # The reply [3, 4, 5] comes back without its thinking, 3.
    tree = build_tree([call("a", [1, 2], [3, 4, 5]), call("b", [1, 2, 4, 5, 6], [7], start_ns=1)])
    fork = tree.nodes[1]
    assert fork.parent is None
    assert fork.is_fork
    assert (fork.shared_with, fork.shared_length) == (0, 2)
    assert paths(tree) == [["a"], ["b"]]


def test_a_sub_agent_with_its_own_prompt_is_a_root_without_a_fork():
    tree = build_tree(
        [call("a", [1], [2]), call("s", [50], [51], start_ns=1), call("b", [1, 2, 3], [4], start_ns=2)]
    )
    assert parents(tree) == [None, None, 0]
    assert not tree.nodes[1].is_fork


def test_choices_are_separate_branches_and_the_one_that_was_used_is_continued():
    tree = build_tree([call("a", [1], [2, 3], [2, 4]), call("b", [1, 2, 4, 9], [5], start_ns=1)])
    assert parents(tree) == [None, None, 1]
    assert (tree.nodes[1].choice_index, tree.nodes[1].shared_length) == (1, 2)


def test_a_retry_with_the_same_prompt_is_a_branch_of_its_own():
    tree = build_tree([call("a", [1], [2]), call("b", [1], [3], start_ns=1)])
    assert parents(tree) == [None, None]


def test_the_first_of_two_equal_calls_is_continued():
    calls = [call("a", [1], [2]), call("b", [1], [2], start_ns=1), call("c", [1, 2], [3], start_ns=2)]
    assert parents(build_tree(calls)) == [None, None, 0]


def test_a_later_call_is_never_a_parent():
    tree = build_tree([call("late", [1], [2], start_ns=5), call("early", [1, 2, 3], [4], start_ns=0)])
    assert parents(tree) == [None, None]


def test_calls_without_ids_and_unusable_calls_are_left_out_and_listed():
    calls = [
        call("text", [], [], start_ns=0),
        call("bad", [1], [2], grade=Grade.UNUSABLE, start_ns=1),
        call("a", [1], [2], start_ns=2),
    ]
    tree = build_tree(calls)
    assert [left.call_id for left in tree.left_out] == ["text", "bad"]
    assert [node.step_index for node in tree.nodes] == [2]


def test_a_deep_chain_needs_no_recursion():
    ids = list(range(3001))
    calls = [call(f"{k:05d}", ids[:k], [ids[k]], start_ns=k) for k in range(1, 3001)]
    (path,) = build_tree(calls).paths()
    assert len(path) == 3000


def test_two_hundred_calls_of_four_thousand_tokens_fork_where_they_should():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, 4000).tolist()
    calls = [call("000", ids[:20], ids[20:40])]
    for k in range(1, 200):
        prompt = ids[: 20 * k + 20] if k % 3 else [*ids[: 10 * k], 99]
        calls.append(call(f"{k:03d}", prompt, ids[20 * k + 20 : 20 * k + 40] or [1], start_ns=k))
    tree = build_tree(calls)
    known: list[list[int]] = []
    for node in tree.nodes:
        prompt = list(node.call.prompt_token_ids or ())
        assert node.parent == continued(prompt, known)
        known.append(node.token_ids.tolist())


token = st.integers(0, 2)
calls_of_tokens = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 10)),
        st.lists(token, min_size=1, max_size=4),
        st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(calls_of_tokens)
def test_the_tree_agrees_with_the_reference_and_holds_every_sampled_token_once(specifications):
    made = []
    sequences: list[list[int]] = []
    for k, (base, prompt, replies) in enumerate(specifications):
        start = sequences[base % len(sequences)] if base is not None and sequences else []
        made.append(call(f"{k:02d}", [*start, *prompt], *replies, start_ns=k))
        sequences += [[*start, *prompt, *reply] for reply in replies]
    tree = build_tree(made)
    assert [node.token_ids.tolist() for node in tree.nodes] == sequences
    known: list[list[int]] = []
    for node in tree.nodes:
        before = [s for s, other in zip(known, tree.nodes, strict=False) if other.call is not node.call]
        assert node.parent == continued(list(node.call.prompt_token_ids or ()), before)
        assert node.shared_length == longest_common_beginning(node.token_ids.tolist(), known)
        if node.shared_length:
            assert node.shared_with is not None
            assert (
                tree.nodes[node.shared_with].token_ids[: node.shared_length].tolist()
                == node.token_ids[: node.shared_length].tolist()
            )
        known.append(node.token_ids.tolist())
    on_paths = {node.index for path in tree.paths() for node in path}
    assert on_paths == set(range(len(tree.nodes)))
    assert json.dumps(parents(tree))


def test_turns_of_many_agents_in_turns_are_a_chain_each():
    ids = {agent: [7, agent, 9] for agent in range(20)}
    calls: list[ModelCall] = []
    for turn in range(4):
        for agent, before in ids.items():
            prompt = [*before, 100 + turn]
            calls.append(call(f"{turn}-{agent:02d}", prompt, [200 + turn], start_ns=len(calls)))
            ids[agent] = [*prompt, 200 + turn]
    assert [[name.split("-")[1] for name in path] for path in paths(build_tree(calls))] == [
        [f"{agent:02d}"] * 4 for agent in range(20)
    ]
