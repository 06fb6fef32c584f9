"""Schema of the `policy_loss` section: the loss that updates the policy, and who sets the entropy coefficient.

Each kind has a section of its name with the settings that it alone reads; the clip range of `ppo` is in the section of
the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tutelage.config.schema import OnlyIf, Schema, setting
from tutelage.config.where import at
from tutelage.errors import closest

if TYPE_CHECKING:
    from tutelage.config.generating import PolicyGradientConfig

KINDS = ("ppo", "gspo", "sapo", "cispo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "reinforce")
OF_SEQUENCES = ("gspo", "gmpo")


def _kind_is(kind: str) -> OnlyIf:
    return OnlyIf(f"policy_loss.kind is {kind}", lambda c: c.policy_loss.kind == kind)


PPO_CLIP = _kind_is("ppo")
ADAPTIVE_ENTROPY = OnlyIf(
    "policy_loss.entropy_controller is adaptive", lambda c: c.policy_loss.entropy_controller == "adaptive"
)


class GSPOConfig(Schema):
    form: Literal["token", "sequence"] = setting(
        "token",
        "token: every token keeps its own advantage; sequence: the mean advantage of the response.  The same gradient "
        "where all tokens of a response have one advantage.",
    )
    clip_low: float = setting(3e-4, "Ratios of a response below 1 - clip_low are clipped.", gt=0, lt=1)
    clip_high: float = setting(4e-4, "Ratios of a response above 1 + clip_high are clipped.", gt=0)


class SAPOConfig(Schema):
    temperature_positive: float = setting(
        1.0, "Slope of the gate where the advantage is positive: the larger, the less a distant token counts.", gt=0
    )
    temperature_negative: float = setting(1.05, "The same where it is negative; the paper's is the larger one.", gt=0)


class CISPOConfig(Schema):
    clip_low: float = setting(1.0, "Weights are at least 1 - clip_low; 1: no lower bound.", ge=0, le=1)
    clip_high: float = setting(4.0, "Weights are at most 1 + clip_high.", ge=0)


class GMPOConfig(Schema):
    clip_low: float = setting(0.4, "Log ratios of tokens below -clip_low are clipped (ratio exp(-clip_low)).", gt=0)
    clip_high: float = setting(0.4, "Log ratios of tokens above clip_high are clipped (ratio exp(clip_high)).", gt=0)


class ClipCovConfig(Schema):
    clip_low: float = setting(1.0, "Ratios below 1 - clip_low are clipped as in ppo; 1: never.", gt=0, le=1)
    clip_high: float = setting(1.0, "Ratios above 1 + clip_high are clipped as in ppo.", gt=0)
    fraction: float = setting(2e-4, "Share of the tokens of a mini-batch that is detached, at least one.", gt=0, le=1)
    cov_low: float = setting(1.0, "They are drawn among tokens whose covariance is above this.")
    cov_high: float = setting(5.0, "And below this.")


class KLCovConfig(Schema):
    fraction: float = setting(2e-4, "Share of the tokens with the largest covariance, at least one.", gt=0, le=1)
    coef: float = setting(1.0, "Weight of the penalty on these tokens.", gt=0)
    estimator: Literal["abs", "k3"] = setting(
        "abs", "Penalty: abs: |log ratio|, as the authors' code; k3: unbiased for KL(old || policy), as their equation."
    )


class DPPOTVConfig(Schema):
    low: float = setting(0.15, "A token with a negative advantage may lose this much probability.", gt=0, le=1)
    high: float = setting(0.15, "A token with a positive advantage may gain this much probability.", gt=0, le=1)
    ratio_cap: float = setting(20.0, "Largest importance ratio of a token.", ge=1)


class DPPOKLConfig(Schema):
    low: float = setting(0.05, "Largest binary KL, in nats, of a negative token that became less likely.", gt=0)
    high: float = setting(0.05, "Largest binary KL, in nats, of a positive token that became more likely.", gt=0)
    ratio_cap: float = setting(20.0, "Largest importance ratio of a token.", ge=1)


class PolicyLossConfig(Schema):
    kind: str = setting(
        "ppo",
        f"{', '.join(KINDS)}, or your own module:function, called with (logp_BT, old_logp_BT, advantage_BT, mask_BT).",
    )
    gspo: GSPOConfig = setting(GSPOConfig, "Group sequence policy optimisation.", only_if=_kind_is("gspo"))
    sapo: SAPOConfig = setting(SAPOConfig, "Soft adaptive policy optimisation.", only_if=_kind_is("sapo"))
    cispo: CISPOConfig = setting(CISPOConfig, "Clipped importance weights.", only_if=_kind_is("cispo"))
    gmpo: GMPOConfig = setting(GMPOConfig, "Geometric-mean policy optimisation.", only_if=_kind_is("gmpo"))
    clip_cov: ClipCovConfig = setting(
        ClipCovConfig, "Tokens of high covariance detached.", only_if=_kind_is("clip_cov")
    )
    kl_cov: KLCovConfig = setting(KLCovConfig, "Penalised tokens of high covariance.", only_if=_kind_is("kl_cov"))
    dppo_tv: DPPOTVConfig = setting(DPPOTVConfig, "Trust region in total variation.", only_if=_kind_is("dppo_tv"))
    dppo_kl: DPPOKLConfig = setting(DPPOKLConfig, "Trust region in KL.", only_if=_kind_is("dppo_kl"))
    entropy_controller: Literal["fixed", "adaptive"] = setting(
        "fixed", "adaptive: the entropy coefficient starts at the algorithm's entropy_coef and holds entropy_target."
    )
    entropy_target: float = setting(
        0.2, "Entropy in nats per token below which the bonus is on.", gt=0, only_if=ADAPTIVE_ENTROPY
    )
    entropy_step: float = setting(0.005, "Change of the coefficient per step.", gt=0, only_if=ADAPTIVE_ENTROPY)
    entropy_coef_max: float = setting(1.0, "Largest coefficient.", gt=0, only_if=ADAPTIVE_ENTROPY)


def policy_loss_problems(
    config: PolicyGradientConfig, where: Mapping[str, object], problems: list[str], warnings: list[str]
) -> None:
    """Of the loss and its neighbours: kinds that do not exist, denominators that change what a loss means."""
    loss, kind = config.policy_loss, config.policy_loss.kind
    said = f"policy_loss.kind is {kind}{at('policy_loss.kind', where)}"
    settings: Any = getattr(config, config.algorithm)
    if kind not in KINDS and ":" not in kind:
        problems.append(f"{said}, which is no policy loss.{closest(kind, KINDS)} Use one of them, or module:function")
    if kind == "clip_cov" and loss.clip_cov.cov_low >= loss.clip_cov.cov_high:
        problems.append(
            f"policy_loss.clip_cov.cov_low is {loss.clip_cov.cov_low:g} and cov_high is {loss.clip_cov.cov_high:g}"
            f"{at('policy_loss.clip_cov.cov_low', where)}: no token lies between them, so none would be detached"
        )
    if loss.entropy_controller == "adaptive" and settings.entropy_coef > loss.entropy_coef_max:
        problems.append(
            f"{config.algorithm}.entropy_coef is {settings.entropy_coef:g} and policy_loss.entropy_coef_max is "
            f"{loss.entropy_coef_max:g}{at('policy_loss.entropy_coef_max', where)}: the controller would start above "
            "its bound; raise the bound or start lower"
        )
    if kind in OF_SEQUENCES and settings.aggregation != "seq_mean_token_mean":
        name = f"{config.algorithm}.aggregation"
        warnings.append(
            f"{said} and {name} is {settings.aggregation}{at(name, where)}: the loss of a response is counted once "
            "per token, so long responses weigh more; the paper's loss is seq_mean_token_mean"
        )
    one_advantage = kind == "gmpo" or (kind == "gspo" and loss.gspo.form == "sequence")
    if one_advantage and config.algorithm == "ppo":
        warnings.append(
            f"{said}, which has one advantage per response, and the algorithm is ppo, which has one per token: their "
            "mean is used; gspo with form token keeps those of the tokens, and grpo has one per response"
        )
    if kind == "reinforce" and settings.epochs * settings.minibatches > 1:
        warnings.append(
            f"{said}, which has no importance ratio, and a batch is used for {settings.epochs * settings.minibatches} "
            f"updates: all but the first are off policy and uncorrected; set {config.algorithm}.epochs and "
            f"{config.algorithm}.minibatches to 1"
        )
    _off_policy_problems(config, where, problems, warnings)


def _off_policy_problems(
    config: PolicyGradientConfig, where: Mapping[str, object], problems: list[str], warnings: list[str]
) -> None:
    correction, cap = config.off_policy.correction, config.off_policy.cap
    if correction.startswith("geometric") and cap >= 1.5:
        warnings.append(
            f"off_policy.correction is {correction}{at('off_policy.correction', where)} and off_policy.cap is {cap:g}"
            f"{at('off_policy.cap', where)}: the geometric mean of the ratios of a response stays within percents "
            "of 1, so nothing would be cut; use a cap such as 1.001"
        )
    if config.kl.placement == "reward" and config.kl.estimator == "k3_importance":
        problems.append(
            f"kl.estimator is k3_importance{at('kl.estimator', where)} and kl.placement is reward"
            f"{at('kl.placement', where)}: it differs from k3 only in what a loss differentiates, and a reward is not "
            "differentiated; use k1, k2 or k3, or kl.placement=loss"
        )
