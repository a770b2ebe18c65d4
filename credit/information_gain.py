"""Credit for what a turn told about the answer.

Shape letters: T turns of one rollout, S steps of all.
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
