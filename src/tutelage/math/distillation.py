"""Divergences between a student and its teacher at the same position, and the reward of reverse KL on sampled tokens.

Shapes: B sequences, T response tokens, N flat tokens, C candidate tokens, V vocabulary, K = C + 1 outcomes.  In nats.

p is the student's distribution, q the teacher's.  Only the logprobs of C candidates are known, in practice the
teacher's likeliest tokens; all other tokens are one outcome, the tail, of probability 1 - sum of the candidates'.  A
divergence of these C + 1 outcomes is a lower bound of the one over all V tokens (merging outcomes never raises it), and
it is 0 for p = q.  With C = V the tail is empty and the divergence is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tutelage.errors import ConfigError, closest
from tutelage.math.kl import relative_entropy
from tutelage.math.masking import at_least_float32, masked_values, require_matrix, require_same_shape


def with_tail(logp_NC: Tensor) -> Tensor:
    """(N, C + 1): the candidates' logprobs, and log(1 - sum_c exp logp_c) of all other tokens.

    In float32 at least.  The tail is not below the machine epsilon, which is all that a sum near 1 can tell; a tail
    that is raised to it has no gradient.
    """
    wide_NC = at_least_float32(logp_NC)
    rest_N1 = 1.0 - wide_NC.exp().sum(dim=-1, keepdim=True)
    return torch.cat([wide_NC, rest_N1.clamp(min=torch.finfo(wide_NC.dtype).eps).log()], dim=-1)


def forward_kl(log_p_NK: Tensor, log_q_NK: Tensor, beta: float = 0.5) -> Tensor:
    """KL(q || p) = sum_k q_k (log q_k - log p_k), (N,): the student covers what the teacher does (mean seeking).

    Its gradient is that of the cross-entropy against the teacher (Hinton et al. 2015).  beta is not read.
    """
    return relative_entropy(log_q_NK, log_p_NK)


def reverse_kl(log_p_NK: Tensor, log_q_NK: Tensor, beta: float = 0.5) -> Tensor:
    """KL(p || q) = sum_k p_k (log p_k - log q_k), (N,): the student stays where the teacher is likely (mode seeking).

    (Gu et al. 2024, MiniLLM, arXiv:2306.08543, of one token.)  Infinite where q is 0 and p is not.  beta is not read.
    """
    return relative_entropy(log_p_NK, log_q_NK)


def generalised_jsd(log_p_NK: Tensor, log_q_NK: Tensor, beta: float = 0.5) -> Tensor:
    """JSD_beta = beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p, (N,).

    (Agarwal et al. 2024, GKD, arXiv:2306.13649, eq. 1; there P is the teacher and Q the student.)  Between 0 and
    -beta log beta - (1 - beta) log(1 - beta).  JSD_beta / beta tends to the forward KL for beta -> 0, and
    JSD_beta / (1 - beta) to the reverse KL for beta -> 1.  Symmetric for beta = 0.5.
    Raises ConfigError unless 0 < beta < 1: at the ends it is 0 everywhere.
    """
    if not 0.0 < beta < 1.0:
        raise ConfigError(
            f"beta is {beta}", fix="use a number between 0 and 1, or the divergence forward_kl, reverse_kl"
        )
    mix = torch.tensor([beta, 1.0 - beta], dtype=torch.float64).log().to(log_p_NK)
    never_NK = (log_p_NK == -torch.inf) & (log_q_NK == -torch.inf)
    shifted_NK = log_p_NK.masked_fill(never_NK, 0.0) + mix[1]
    log_m_NK = torch.logaddexp(log_q_NK + mix[0], shifted_NK).masked_fill(never_NK, -torch.inf)
    return beta * relative_entropy(log_q_NK, log_m_NK) + (1.0 - beta) * relative_entropy(log_p_NK, log_m_NK)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd": generalised_jsd,
}


@dataclass(frozen=True)
class DistillationTerms:
    """Of every token, (N,).  Only `loss` carries gradient, and only by the student's logprobs.

    loss: the divergence, nats.  tail, teacher_tail: probability of all tokens that are no candidates.
    """

    loss: Tensor
    tail: Tensor
    teacher_tail: Tensor


def distillation_loss(kind: str, logp_NC: Tensor, teacher_logp_NC: Tensor, beta: float = 0.5) -> DistillationTerms:
    """A divergence between student and teacher at every token, over C candidates and the tail of all others.

    logp_NC, teacher_logp_NC: (N, C) logprobs of the same candidates under both, at the same temperature.  Exact for
    C = V, else a lower bound.  beta is read by jsd alone.
    Raises ShapeError when shapes differ, ConfigError for an unknown kind or beta.
    """
    require_same_shape(logp=logp_NC, teacher_logp=teacher_logp_NC)
    require_matrix(logp=logp_NC)
    if kind not in DIVERGENCES:
        raise ConfigError(
            f"{kind!r} is not a divergence.{closest(kind, DIVERGENCES)}", fix=f"choose one of {', '.join(DIVERGENCES)}"
        )
    log_p_NK, log_q_NK = with_tail(logp_NC), with_tail(teacher_logp_NC.detach())
    loss_N = DIVERGENCES[kind](log_p_NK, log_q_NK, beta)
    return DistillationTerms(loss_N, log_p_NK[:, -1].detach().exp(), log_q_NK[:, -1].exp())


def reverse_kl_returns(old_logp_BT: Tensor, teacher_logp_BT: Tensor, mask_BT: Tensor, discount: float) -> Tensor:
    """R_t = sum over t' >= t of discount^(t' - t) (log q(y_t') - log p(y_t')), (B, T); 0 where the mask is 0.

    What a sampled token is paid, as an advantage: E[sum_t R_t grad log p(y_t)] is minus the gradient of a reverse KL
    between student and teacher, for y drawn from p, the student of `old_logp`.
        discount 1: of the whole sequence, KL(p || q) summed over its tokens (MiniLLM, arXiv:2306.08543, eq. 3).
        discount 0: of each token at the states that the student visits, their change not counted (on-policy
        distillation, Thinking Machines 2025, with the discount that it names).
    t' and t count the tokens with mask 1 alone; others are never read.  Nats.  No gradient.
    Raises ShapeError when shapes differ, ConfigError unless 0 <= discount <= 1.
    """
    require_same_shape(old_logp=old_logp_BT, teacher_logp=teacher_logp_BT, mask=mask_BT)
    require_matrix(mask=mask_BT)
    if not 0.0 <= discount <= 1.0:
        raise ConfigError(f"the discount is {discount}", fix="use a number from 0 to 1")
    paid_BT = masked_values(teacher_logp_BT.detach(), mask_BT) - masked_values(old_logp_BT.detach(), mask_BT)
    return_BT = torch.zeros_like(paid_BT)
    ahead_B = paid_BT.new_zeros(paid_BT.shape[0])
    for t in range(paid_BT.shape[1] - 1, -1, -1):
        here_B = mask_BT[:, t] != 0
        ahead_B = torch.where(here_B, paid_BT[:, t] + discount * ahead_B, ahead_B)
        return_BT[:, t] = torch.where(here_B, ahead_B, 0.0)
    return return_BT


def less_others_at_position(return_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """A_bt = R_bt - mean over the other rows b' with mask 1 at t of R_b't; R_bt where there is none; 0 under mask 0.

    A baseline of a token that does not depend on its own row: the expected policy gradient stays what it is, with less
    variance (Kool et al. 2019, "Buy 4 REINFORCE samples").  (B, T).  Raises ShapeError when shapes differ.
    """
    kept_BT = masked_values(return_BT, mask_BT)
    real_BT = (mask_BT != 0).to(kept_BT)
    others_BT = real_BT.sum(dim=0, keepdim=True) - real_BT
    mean_BT = (kept_BT.sum(dim=0, keepdim=True) - kept_BT) / others_BT.clamp(min=1)
    return (kept_BT - mean_BT * (others_BT > 0)) * real_BT
