"""What a correction does to each token, from the papers, one sequence at a time.

w: ratio of the policy before the update to the behaviour policy; a: advantage
"""

import math


def kept(w, a, ids, rule, bound):
    """-> whether each token stays under one rule, whose bound is a number or two."""
    low, high = bound if isinstance(bound, tuple) else (None, bound)
    stays = []
    for k in range(len(w)):
        mine = [w[j] for j in range(len(w)) if ids[j] == ids[k]]
        product, mean = math.prod(mine), math.exp(sum(map(math.log, mine)) / len(mine))
        rules = {
            "token_band": low is not None and low <= w[k] <= high,
            "geometric_band": low is not None and low <= mean <= high,
            "sequence_max": product <= high,
            "veto_band": low is not None and all(low <= each <= high for each in mine),
            "off_policy_max": a[k] >= 0 or -math.log(mean) <= high,
        }
        stays.append(rules[rule])
    return stays


def kept_by_m2(w, bound):
    """-> whether each token stays: the worst one leaves until the second moment of log w is small enough."""
    left = list(range(len(w)))
    while left and sum(math.log(w[k]) ** 2 for k in left) / len(left) > bound:
        left.remove(max(left, key=lambda k: math.log(w[k]) ** 2))
    return [k in left for k in range(len(w))]


def weight(w, ids, k, *, token=None, sequence=None):
    """-> weight of token k."""
    if token is not None:
        return min(w[k], token)
    if sequence is not None:
        return min(math.prod(w[j] for j in range(len(w)) if ids[j] == ids[k]), sequence)
    return 1.0
