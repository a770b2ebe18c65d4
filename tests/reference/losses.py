"""Token losses from the papers, one token at a time; and their gradients by log pi.

log pi, log mu: of one token, nats;  A: its advantage
"""

import math

import numpy as np


def ppo(log_pi, log_mu, a, *, low=0.2, high=0.28, dual=3.0):
    """-> (loss, gradient)."""
    r = math.exp(log_pi - log_mu)
    clipped = min(max(r, 1 - low), 1 + high)
    loss, gradient = (-r * a, -r * a) if -r * a >= -clipped * a else (-clipped * a, 0.0)
    if dual is not None and a < 0 and loss > -dual * a:
        return -dual * a, 0.0
    return loss, gradient


def gspo(log_pi, log_mu, a, ids, *, low=3e-4, high=4e-4):
    """-> (loss of every token, gradient of their sum by every log pi); one A a sequence."""
    losses, gradients = np.zeros(len(a)), np.zeros(len(a))
    for sequence in set(ids):
        where = [k for k in range(len(a)) if ids[k] == sequence]
        s = math.exp(sum(log_pi[k] - log_mu[k] for k in where) / len(where))
        clipped = min(max(s, 1 - low), 1 + high)
        for k in where:
            losses[k] = max(-s * a[k], -clipped * a[k])
            if -s * a[k] >= -clipped * a[k]:  # ds / dlog pi_j = s / |y| for every j of the sequence
                for j in where:
                    gradients[j] += -a[k] * s / len(where)
    return losses, gradients


def gspo_token(log_pi, log_mu, a, ids, *, low=3e-4, high=4e-4):
    """-> (loss of every token, gradient): each token keeps its own A."""
    losses, gradients = np.zeros(len(a)), np.zeros(len(a))
    for k in range(len(a)):
        where = [j for j in range(len(a)) if ids[j] == ids[k]]
        s = math.exp(sum(log_pi[j] - log_mu[j] for j in where) / len(where))
        clipped = min(max(s, 1 - low), 1 + high)
        losses[k] = max(-s * a[k], -clipped * a[k])
        gradients[k] = -a[k] * s if -s * a[k] >= -clipped * a[k] else 0.0
    return losses, gradients


def cispo(log_pi, log_mu, a, *, low=1.0, high=4.0):
    """-> (loss, gradient)."""
    weight = min(max(math.exp(log_pi - log_mu), 1 - low), 1 + high)
    return -weight * a * log_pi, -weight * a


def sapo(log_pi, log_mu, a, *, positive=1.0, negative=1.05):
    """-> (loss, gradient)."""
    r, tau = math.exp(log_pi - log_mu), positive if a > 0 else negative
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * r * a


def dppo(log_pi, log_mu, a, *, low, high, by_kl, cap=20.0):
    """-> (loss, gradient)."""
    pi, mu = math.exp(log_pi), math.exp(log_mu)
    distance = abs(pi - mu)
    if by_kl:
        distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
    if (a > 0 and pi > mu and distance > high) or (a < 0 and pi < mu and distance > low):
        return 0.0, 0.0
    weight = min(pi / mu, cap)
    return -weight * a * log_pi, -weight * a


def importance_sampling(log_pi, log_mu, a):
    """-> (loss, gradient)."""
    r = math.exp(log_pi - log_mu)
    return -r * a, -r * a


def value(v, g, old, *, clip=None):
    """-> (squared error of a value v of return g, gradient); beyond the clip nothing is gained."""
    if clip is None:
        return (v - g) ** 2, 2 * (v - g)
    near = old + min(max(v - old, -clip), clip)
    if (near - g) ** 2 > (v - g) ** 2:
        return (near - g) ** 2, 0.0
    return (v - g) ** 2, 2 * (v - g)
