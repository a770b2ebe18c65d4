"""Credit for what a turn told about the answer.

Shape letters: A forms of the answer, T turns of one rollout.
"""

import numpy as np

from spangrad.credit.groups import Floats
from spangrad.errors import CreditError


def information_gains(answer_logprobs_T1: Floats) -> Floats:
    """How much more probable each turn made the right answer.

        p_t = exp(mean logprob of the answer's tokens, given the history after turn t);   r_t = p_t - p_{t-1}

    Source: IGPO, arXiv:2510.14967. The gains telescope: they sum to p_T - p_0.

    Args:
        answer_logprobs_T1: Mean logprob (nats) of the right answer's tokens before the first turn and after
            every turn: T + 1 numbers, 0 or below.

    Returns:
        Gains, shape (T,), float64, between -1 and 1.

    Raises:
        CreditError: There is no number, one is NaN, or one is above 0.

    -inf is an answer that is impossible so far: p = 0.
    """
    if not len(answer_logprobs_T1) or not (answer_logprobs_T1 <= 0).all():
        raise CreditError(
            f"logprobs of the answer are {answer_logprobs_T1.tolist()!r}; "
            "expected at least one, all 0 or below"
        )
    return np.diff(np.exp(answer_logprobs_T1))


def answer_potentials(answer_logprobs_AT1: Floats) -> Floats:
    """How much more probable than at first a frozen reference takes the right answer to be, in nats.

        Phi_t = log sum_a p_{a,t} - log sum_a p_{a,0};   p_{a,t} of the answer's form a, given the history

    Source: log-ratio: TRACE, arXiv:2607.13988 (from an abstract: a sketch); several forms of the answer:
    TIPS, arXiv:2603.22293, whose code differs (mean logprobs, a scale fitted to each batch, an error of the
    scorer counted as certainty). For `shaping = "potential"`.

    Args:
        answer_logprobs_AT1: Summed logprob (nats) of each form of the answer before the first turn and after
            every turn, shape (A, T + 1), 0 or below, finite.

    Returns:
        Potentials, shape (T + 1,), float64, nats; the first is 0.

    Raises:
        CreditError: There is no number, or one is not finite or above 0: a scorer that failed knows nothing.
    """
    if answer_logprobs_AT1.ndim != 2 or not answer_logprobs_AT1.size:
        raise CreditError(
            f"logprobs of the answer have shape {answer_logprobs_AT1.shape}; expected forms by turns"
        )
    if not (np.isfinite(answer_logprobs_AT1) & (answer_logprobs_AT1 <= 0)).all():
        raise CreditError("logprobs of the answer are not all finite and 0 or below")
    whole_T1 = np.logaddexp.reduce(answer_logprobs_AT1, axis=0)
    potentials_T1: Floats = whole_T1 - whole_T1[0]
    return potentials_T1
