"""What PPO and its critic-free relatives share: policy loss, mini-batches, correction for the sampler, statistics.

Shapes: B sequences, T response tokens, R flat response tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tutelage.algorithms.mismatch import mismatch_stats, update_mismatch
from tutelage.algorithms.rollout_stats import rollout_stats
from tutelage.config.generating import PolicyGradientConfig
from tutelage.config.rollouts import PolicySettings
from tutelage.errors import ConfigError, ShapeError, closest
from tutelage.math.entropy_control import AdaptiveEntropy, entropy_control_from_state
from tutelage.math.importance import effective_sample_size, importance_weights, mismatch_of
from tutelage.math.keyed import keyed_permutation, keyed_uniform, sample_key
from tutelage.math.kl import kl_loss
from tutelage.math.kl_control import AdaptiveKL, FixedKL, KLController, kl_controller_from_state
from tutelage.math.masking import aggregation_weights, masked_values, weighted_sum
from tutelage.math.policy_loss import PolicyTerms, policy_terms
from tutelage.math.policy_losses import COUPLED_POLICY_LOSSES, POLICY_LOSSES, PolicyLossFunction
from tutelage.named import load_function
from tutelage.types import Outputs, Ragged, Rollout, Stat, Stats


def settings_of(cfg: PolicyGradientConfig) -> PolicySettings:
    """The section of the algorithm, which has its name."""
    return getattr(cfg, cfg.algorithm)


def initial_kl(cfg: PolicyGradientConfig) -> KLController:
    if cfg.kl.controller == "adaptive":
        return AdaptiveKL(cfg.kl.coef, cfg.kl.target, cfg.kl.horizon)
    return FixedKL(cfg.kl.coef)


@dataclass(frozen=True)
class PolicyState:
    """What a step depends on besides weights: the step, the KL controller, and the entropy control.

    entropy: None where the entropy coefficient is the recipe's, in every step.
    """

    step: int
    kl: KLController
    entropy: AdaptiveEntropy | None = None

    def after(self, batch: Rollout, kl: KLController) -> PolicyState:
        """The state of the next step, after one whose rollouts these are."""
        entropy = None if self.entropy is None else self.entropy.after(sampled_entropy(batch))
        return PolicyState(self.step + 1, kl, entropy)

    def state_dict(self) -> dict[str, Any]:
        saved = {"step": self.step, "kl": self.kl.state_dict()}
        return saved if self.entropy is None else {**saved, "entropy": self.entropy.state_dict()}


def initial_state(cfg: PolicyGradientConfig) -> PolicyState:
    """Of the first step.  Raises ConfigError where the recipe's policy loss does not exist."""
    policy_loss_function(cfg.policy_loss.kind)
    loss, entropy = cfg.policy_loss, None
    if loss.entropy_controller == "adaptive":
        coef = settings_of(cfg).entropy_coef
        entropy = AdaptiveEntropy(coef, loss.entropy_target, loss.entropy_step, loss.entropy_coef_max)
    return PolicyState(0, initial_kl(cfg), entropy)


def state_from(saved: Mapping[str, Any]) -> PolicyState:
    entropy = entropy_control_from_state(saved["entropy"]) if "entropy" in saved else None
    return PolicyState(saved["step"], kl_controller_from_state(saved["kl"]), entropy)


def sampled_entropy(batch: Rollout) -> float:
    """-mean log mu(y) over the trained tokens, mu the policy that sampled them: an unbiased estimate of its entropy per
    token, in nats, at the temperature of the rollouts.
    """
    return -Stat.of(batch.rollout_logp.flat, batch.sequences.trained.flat).mean


def generate(prompts: Any, roles: Any, cfg: PolicyGradientConfig) -> Any:
    """Prompts -> rollouts, which a schedule may begin ahead of their step."""
    return roles.actor.generate(prompts)


def updates_of(batch: Any, cfg: PolicyGradientConfig, step: int) -> Iterator[Any]:
    """`epochs` passes over the batch, each in `minibatches` parts, in an order keyed by (seed, step, pass)."""

    def order(epoch: int, n: int) -> Tensor:
        return keyed_permutation(n, sample_key(cfg.seed, step, "minibatches", epoch, "shuffle"))

    settings = settings_of(cfg)
    return batch.minibatches(settings.epochs, settings.minibatches, order)


@dataclass(frozen=True)
class PolicyLoss:
    """Policy loss, entropy bonus, and the KL term where the recipe puts it into the loss; an item is a token.

    entropy_coef: None: the recipe's.
    own_old: the old logprobs are those of this very update: the ratio is 1, and its gradient that of the logprob.  How
             far the sampler's are from them is then a statistic of the loss.
    """

    cfg: PolicyGradientConfig
    kl_coef: float
    entropy_coef: float | None = None
    own_old: bool = False

    @property
    def outputs(self) -> frozenset[str]:
        return frozenset({"logp", "entropy"})

    def weights(self, batch: Rollout) -> Ragged:
        return token_weights(batch, self.cfg)

    def items(self, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        assert out.logp is not None
        mask, lens = counted_tokens(batch), batch.sequences.response_lens
        old_logp, advantage = self.old_logprobs(out, batch), batch.column("advantage").flat
        columns = (Ragged(column, lens).padded() for column in (out.logp, old_logp, advantage, mask))
        terms_BT = self.terms(*columns)
        return self.with_bonuses(flat_terms(terms_BT, lens), out, batch)

    def old_logprobs(self, out: Outputs, batch: Rollout) -> Tensor:
        """(R,) without gradient.  Raises ShapeError where the batch has none and the update's own are not meant."""
        if not self.own_old:
            return batch.column("old_logp").flat
        assert out.logp is not None
        return out.logp.detach()

    def terms(
        self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor, *order_BT: Tensor
    ) -> PolicyTerms:
        """What the recipe's policy loss says of the tokens.  Raises ShapeError for a loss of another shape."""
        kind = self.cfg.policy_loss.kind
        function = policy_loss_function(kind)
        if ":" not in kind:
            return function(logp_BT, old_logp_BT, advantage_BT, mask_BT, *order_BT, **loss_settings(self.cfg))
        found: Any = function(logp_BT, old_logp_BT, advantage_BT, mask_BT)
        shape = (found.loss if isinstance(found, PolicyTerms) else found).shape
        if shape != logp_BT.shape:
            raise ShapeError(
                f"policy loss {kind} returned a loss of shape {tuple(shape)} for tokens of {tuple(logp_BT.shape)}",
                fix="return the loss of each token, (B, T), or math.policy_loss.policy_terms of it",
            )
        if isinstance(found, PolicyTerms):
            return found
        return policy_terms(found, masked_values(logp_BT, mask_BT), masked_values(old_logp_BT, mask_BT))

    def with_bonuses(self, terms: PolicyTerms, out: Outputs, batch: Rollout) -> tuple[Tensor, Stats]:
        """(R,) losses of the tokens with entropy bonus and KL term, and the statistics of the counted ones."""
        assert out.logp is not None
        assert out.entropy is not None
        mask, loss = counted_tokens(batch), terms.loss
        coef = settings_of(self.cfg).entropy_coef if self.entropy_coef is None else self.entropy_coef
        if coef:
            loss = loss - coef * out.entropy
        stats = {
            "clip_fraction": Stat.of(terms.clipped | terms.dual_clipped, mask),
            "approx_kl": Stat.of(terms.approx_kl, mask),
            "ratio_mean": Stat.of(terms.ratio, mask),
            "entropy": Stat.of(out.entropy, mask),
        }
        if self.entropy_coef is not None:
            stats["entropy_coef"] = Stat.of(torch.full_like(terms.ratio, coef), mask)
        if terms.selected is not None:
            stats["cov_selected_fraction"] = Stat.of(terms.selected, mask)
        if self.cfg.kl.placement == "loss" and batch.ref_logp is not None:
            old_logp = self.old_logprobs(out, batch)
            term = kl_loss(self.cfg.kl.estimator, out.logp, batch.ref_logp.flat, old_logp=old_logp)
            loss = loss + self.kl_coef * term
            stats["kl_loss"] = Stat.of(term, mask)
        if self.own_old:
            stats |= update_mismatch(out.logp, batch.rollout_logp.flat, mask)
        return loss, stats


def flat_terms(terms_BT: PolicyTerms, lens: Tensor) -> PolicyTerms:
    """The terms of the first `lens[b]` tokens of every row, (R,)."""
    columns = {n: Ragged.from_padded(x_BT, lens).flat for n, x_BT in vars(terms_BT).items() if x_BT is not None}
    return PolicyTerms(**columns)


@dataclass(frozen=True)
class CoupledPolicyLoss:
    """A policy loss that looks at all tokens of the mini-batch at once.

    An item is a sequence; its scalars are the logprobs and the entropies of its tokens, both padded to `width`, the
    longest response of the mini-batch.

    step, number: of the mini-batch in the run; they key what is drawn.
    """

    loss: PolicyLoss
    width: int
    step: int
    number: int

    @property
    def outputs(self) -> frozenset[str]:
        return self.loss.outputs

    def scalars(self, out: Outputs, batch: Rollout) -> Tensor:
        """(B, 2 width)"""
        assert out.logp is not None
        assert out.entropy is not None
        lens = batch.sequences.response_lens
        logp_BT, entropy_BT = (self._wide(Ragged(flat, lens).padded()) for flat in (out.logp, out.entropy))
        return torch.cat([logp_BT, entropy_BT], dim=1)

    def couple(self, scalars_BK: Tensor, batch: Rollout) -> tuple[Tensor, Stats]:
        old_logp, lens = batch.column("old_logp"), batch.sequences.response_lens
        logp_BT, entropy_BT = scalars_BK.to(old_logp.flat.device).split(self.width, dim=1)
        out = Outputs(*(Ragged.from_padded(x_BT, lens).flat for x_BT in (logp_BT, entropy_BT)))
        columns = (old_logp, batch.column("advantage"), Ragged(counted_tokens(batch), lens))
        terms_BT = self.loss.terms(logp_BT, *(self._wide(x.padded()) for x in columns), self.order(batch))
        items, stats = self.loss.with_bonuses(flat_terms(terms_BT, lens), out, batch)
        return weighted_sum(items, self.loss.weights(batch).flat), stats

    def order(self, batch: Rollout) -> Tensor:
        """(B, width) in [0, 1), keyed by (seed, step, prompt id, sample, mini-batch) and the token's position."""
        purpose = f"policy_loss/{self.number}"
        rows = zip(batch.prompt_ids, batch.samples.tolist(), strict=True)
        keys = [sample_key(self.loss.cfg.seed, self.step, prompt, sample, purpose) for prompt, sample in rows]
        device = batch.column("old_logp").flat.device
        return keyed_uniform(torch.tensor(keys, device=device)[:, None], torch.arange(self.width, device=device))

    def _wide(self, x_BT: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_BT, (0, self.width - x_BT.shape[1]))


def actor_loss(
    cfg: PolicyGradientConfig, state: PolicyState, minibatch: Any, number: int, *, own_old: bool = False
) -> PolicyLoss | CoupledPolicyLoss:
    """The loss of one update of the policy.  number: of the mini-batch in its step.  own_old: as `PolicyLoss`."""
    loss = PolicyLoss(cfg, state.kl.coef, None if state.entropy is None else state.entropy.coef, own_old)
    if cfg.policy_loss.kind not in COUPLED_POLICY_LOSSES:
        return loss
    # a mini-batch of a recorded step holds no data
    width = int(minibatch.sequences.response_lens.max()) if isinstance(minibatch, Rollout) else 0
    return CoupledPolicyLoss(loss, width, state.step, number)


@functools.cache
def policy_loss_function(kind: str) -> PolicyLossFunction:
    """A loss by its name, or the recipe's own module:function, which is loaded once in a process.

    Raises ConfigError for a name that leads nowhere.
    """
    known = POLICY_LOSSES | COUPLED_POLICY_LOSSES
    if ":" in kind:
        return load_function(kind, "policy loss")
    if kind not in known:
        raise ConfigError(
            f"{kind!r} is not a policy loss.{closest(kind, known)}",
            fix=f"choose one of {', '.join(known)}, or module:function of your own",
        )
    return known[kind]


def loss_settings(cfg: PolicyGradientConfig) -> dict[str, Any]:
    """What the recipe's policy loss takes by keyword; `ppo` has its clip range in the section of the algorithm."""
    kind = cfg.policy_loss.kind
    if kind == "ppo":
        own = settings_of(cfg)
        return {"clip_low": own.clip_low, "clip_high": own.clip_high, "dual_clip": own.dual_clip}
    section = getattr(cfg.policy_loss, kind, None)
    return {} if section is None else section.model_dump()


def counted_tokens(batch: Rollout) -> Tensor:
    """(R,) bool: trained tokens of the rows that the loss counts."""
    trained = batch.sequences.trained
    if batch.counted is None:
        return trained.flat
    return trained.flat & torch.repeat_interleave(batch.counted, trained.lens)


def token_weights(batch: Rollout, cfg: PolicyGradientConfig) -> Ragged:
    """The aggregation weight of every response token of a mini-batch; 0 under the mask and in uncounted rows."""
    return counted_weights(batch, settings_of(cfg).aggregation, cfg.rollout.max_new_tokens)


def counted_weights(batch: Rollout, aggregation: str, horizon: int) -> Ragged:
    """(R,) `aggregation_weights` of the rows that the loss counts; the others weigh 0 and are in no denominator."""
    lens = batch.sequences.response_lens
    mask_BT = Ragged(counted_tokens(batch), lens).padded()
    weight_BT = torch.zeros(mask_BT.shape, device=mask_BT.device)
    counted_B = torch.ones_like(lens, dtype=torch.bool) if batch.counted is None else batch.counted
    rows_b = torch.nonzero(counted_B).squeeze(1).to(mask_BT.device)
    weight_BT[rows_b] = aggregation_weights(mask_BT[rows_b], aggregation, horizon)
    return Ragged.from_padded(weight_BT, lens)


def with_old_logprobs(batch: Rollout, cfg: PolicyGradientConfig) -> Rollout:
    """The batch with the old logprobs of the recipe: the trainer's, as inferred, or the sampler's own."""
    return batch.adding(old_logp=batch.rollout_logp) if cfg.off_policy.old_logprobs == "rollout" else batch


def update_has_old_logprobs(cfg: PolicyGradientConfig) -> bool:
    """Whether the forward pass of a step's update computes the old logprobs, and nothing needs them before it.

    One update in a synchronous step: its weights are those of before any update.  Needed before are they by a KL in the
    reward, a correction for the sampler, and what acts on the sequence KL (adaptive coefficient, budget that is not
    just told).  A loss over the whole mini-batch, which goes through the logprobs twice, infers them too, and so does
    an algorithm of the user's own, which may read them or make several updates.
    """
    settings, own, kl = settings_of(cfg), cfg.off_policy, cfg.kl
    return (
        own.old_logprobs == "auto"
        and cfg.implementation is None
        and settings.epochs * settings.minibatches == 1
        and cfg.schedule.kind == "synchronous"
        and cfg.policy_loss.kind not in COUPLED_POLICY_LOSSES
        and own.correction == "none"
        and own.veto is None
        and (kl.coef == 0 or kl.placement == "loss")
        and kl.controller == "fixed"
        and (kl.budget is None or kl.on_budget == "warn")
    )


def corrected(advantage_BT: Tensor, batch: Rollout, cfg: PolicyGradientConfig) -> tuple[Tensor, Stats]:
    """The advantages times the importance weights of trainer against sampler, and statistics: how far the two are apart
    (`mismatch/...`), and what the weights did (`off_policy/...`).

    Every branch of a separable loss is linear in the advantage but for its sign, so a factor >= 0 on it is the same
    factor on the loss.  The losses by covariance see the weighted advantage, gmpo its mean over the response.
    """
    if cfg.off_policy.old_logprobs == "rollout":  # the loss's ratio shows the mismatch
        return advantage_BT, {}
    mask_BT = batch.sequences.trained.padded()
    old_BT, rollout_BT = batch.column("old_logp").padded(), batch.rollout_logp.padded()
    apart = mismatch_stats(mismatch_of(old_BT, rollout_BT, mask_BT), mask_BT)
    own = cfg.off_policy
    if own.correction == "none" and own.veto is None:
        return advantage_BT, apart
    found = importance_weights(
        old_BT, rollout_BT, mask_BT, own.correction, own.cap, floor=own.floor, normalize=own.normalize, veto=own.veto
    )
    return advantage_BT * found.weight, {
        **apart,
        "off_policy/ratio_mean": Stat.of(found.ratio, mask_BT),
        "off_policy/ratio_max": Stat(float(found.ratio.max()), 1),
        "off_policy/truncated_fraction": Stat.of(found.capped, mask_BT),
        "off_policy/floored_fraction": Stat.of(found.floored, mask_BT),
        "off_policy/vetoed_fraction": Stat.of(found.vetoed, mask_BT),
        "off_policy/weight_mean": Stat.of(found.weight, mask_BT),
        "off_policy/effective_sample_size": Stat(effective_sample_size(found.weight[mask_BT]), 1),
        "off_policy/mismatch_kl": Stat.of(found.mismatch_kl, mask_BT),
    }


def budget_scale(sequence_kl: float, cfg: PolicyGradientConfig) -> float:
    """budget / KL past the budget where the recipe lowers the learning signal, else 1."""
    if cfg.kl.budget is None or cfg.kl.on_budget != "lower" or sequence_kl <= cfg.kl.budget:
        return 1.0
    return cfg.kl.budget / sequence_kl


def scores_of(batch: Rollout, cfg: PolicyGradientConfig) -> Tensor:
    """(B,) the scores, less the penalty of responses that the length limit cut."""
    assert batch.score is not None, "advantages runs after collect"
    return batch.score.total - settings_of(cfg).missing_eos_penalty * (~batch.finished).float()


def sampling_stats(batch: Rollout, scored_B: Tensor | None = None) -> Stats:
    """`rollout_stats`, and how far the sampler's logprobs are from the trainer's."""
    gap = (batch.column("old_logp").flat - batch.rollout_logp.flat).abs()
    return {**rollout_stats(batch, scored_B), "policy/logp_gap": Stat.of(gap, batch.sequences.trained.flat)}


def reference_stats(
    batch: Rollout, kl_B: Tensor, score_B: Tensor, non_score_B: Tensor, scale: float, kl_coef: float
) -> Stats:
    """Distance from the reference; sequence KL is k1 summed over tokens, token KL its mean over tokens.

    score_B: after the missing-EOS penalty.  non_score_B: what the KL penalty added to each reward, in the recipe's
    estimator; 0 where the KL is a term of the loss.
    """
    return {
        "reward/non_score": Stat.of(non_score_B),
        "reward/rlhf": Stat.of(score_B + non_score_B),
        "kl/sequence": Stat.of(kl_B),
        "kl/token": Stat(float(kl_B.double().sum()), float(batch.sequences.trained.flat.sum())),
        "kl/coef": Stat(kl_coef, 1),
        "kl/budget_scale": Stat(scale, 1),
    }
