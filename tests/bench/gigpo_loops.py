"""GiGPO step by step in Python, as its published code goes about it: what `bench_estimators` is held against.

Written from arXiv:2505.10978 and FORMULAS.md 5.1: scores are torch tensors that are read and written one
step at a time, groups are dictionaries of lists, anchors are sorted into one list a state.
"""

import uuid
from collections import defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch


def gigpo_loops(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[str],
    anchors: Sequence[Sequence[str]],
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    eps: float = 1e-6,
) -> torch.Tensor:
    """rewards[i][t], groups[i], anchors[i][t] -> advantage of each step, one rollout's after the other's."""
    returns = torch.tensor([g for row in rewards for g in _discounted(row, gamma)])
    episode = torch.tensor([sum(row) for row in rewards for _ in row])
    group_of = np.array(
        [group for group, row in zip(groups, rewards, strict=True) for _ in row], dtype=object
    )
    anchor_of = np.array([anchor for row in anchors for anchor in row], dtype=object)
    pools = _pools(anchor_of, group_of)
    of_episode = _normalized(episode, group_of, eps, raw_singletons=True)
    return of_episode + step_weight * _normalized(returns, pools, eps, raw_singletons=False)


def _discounted(rewards: Sequence[float], gamma: float) -> list[float]:
    returns = np.zeros(len(rewards))
    running = 0.0
    for t in reversed(range(len(rewards))):
        running = rewards[t] + gamma * running
        returns[t] = running
    return returns.tolist()


def _pools(anchors: Any, groups: Any) -> Any:
    pools = np.empty(len(anchors), dtype=object)
    for group in np.unique(groups):
        places = np.where(groups == group)[0]
        by_state = defaultdict(list)
        for place in places:
            by_state[anchors[place]].append(place)
        for members in by_state.values():
            name = str(uuid.uuid4())
            for place in members:
                pools[place] = name
    return pools


def _normalized(scores: torch.Tensor, labels: Any, eps: float, *, raw_singletons: bool) -> torch.Tensor:
    by_label = defaultdict(list)
    for i in range(len(scores)):
        by_label[labels[i]].append(scores[i])
    mean, std = {}, {}
    for label, members in by_label.items():
        alone = len(members) == 1
        mean[label] = torch.tensor(0.0) if alone and raw_singletons else torch.mean(torch.tensor(members))
        std[label] = torch.tensor(1.0) if alone else torch.std(torch.tensor(members))
    result = scores.clone()
    for i in range(len(scores)):
        result[i] = (scores[i] - mean[labels[i]]) / (std[labels[i]] + eps)
    return result


def clusters(texts: Sequence[str], threshold: float) -> list[int]:
    """The similarity mode: a text joins the first cluster whose first member is similar enough to it."""
    first: list[str] = []
    found = []
    for text in texts:
        for number, other in enumerate(first):
            if SequenceMatcher(None, text, other).ratio() >= threshold:
                found.append(number)
                break
        else:
            found.append(len(first))
            first.append(text)
    return found
