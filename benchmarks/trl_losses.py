"""Every loss that TRL has too, on the same inputs through both: loss and gradient norm, and how far they differ.

    python benchmarks/install_peers.py && python benchmarks/trl_losses.py [SEED]

TRL's side is its own code in its own environment (`peers/trl_side.py`); this side is Tutelage's.  Where conventions
differ, the row says how the numbers were brought together.  Ends with 1 where a difference is over 1e-5 of the value.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tutelage.math import online_preference, unpaired_loss
from tutelage.math.kl import kl_k3
from tutelage.math.masking import aggregation_weights
from tutelage.math.policy_losses import POLICY_LOSSES
from tutelage.math.preference import PREFERENCE_LOSSES, PreferenceInputs, PreferenceSettings
from tutelage.math.preference.losses import combined
from tutelage.math.preference.weighing import pair_weights, public_weights
from tutelage.math.reward_loss import bradley_terry_loss

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from install_peers import VERSIONS, python_of  # noqa: E402
from peers.cases import cases  # noqa: E402

TOLERANCE = 1e-5
NOTES = {
    "ipo": "ours: `ipo`; the summed convention is `ipo_sum`",
    "bco_pair": "ours has a running reward shift delta; here 0, as in TRL's paired form",
    "sigmoid, RPO 0.7": "TRL's NLL is a mean over all tokens of the batch, ours over pairs: TRL's is given to both",
    "cpo": "the NLL term as for RPO",
    "orpo": "the NLL term as for RPO",
    "cispo": "upper bound of the weight: TRL's epsilon_high 1.2 is clip_high 0.2 here; no lower bound",
    "sapo": "sequence mean",
    "gspo": "sequence form, sequence mean",
    "dppo_tv": "value differs by -A w log pi against -A w: gradients are compared",
    "dppo_kl": "value differs by -A w log pi against -A w: gradients are compared",
    "bco": "delta: TRL's mean over all answers seen; ours the mean of both kinds: the same delta is given to both",
    "nash_md": "TRL's KL credit of each token alone: given to both",
}
GRADIENT_ALONE = ("dppo_tv", "dppo_kl")


def measured(loss: Tensor, leaf: Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [float(loss.detach()), float(gradient.norm())]


class Ours:
    """The same inputs through Tutelage's functions, in float64."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.mask = torch.tensor(case["mask"], dtype=torch.float64)
        self.lens = self.mask.sum(1)
        self.half = len(self.mask) // 2

    def column(self, name: str) -> Tensor:
        return torch.tensor(self.case[name], dtype=torch.float64)

    def leaf(self) -> Tensor:
        return self.column("logp").requires_grad_(True)

    def sums(self, x: Tensor) -> Tensor:
        return (x * self.mask).sum(1)

    def near_sums(self, x: Tensor, alpha: float | None) -> Tensor:
        """Sums with the tail of the longer answer weighed by LD-DPO's alpha."""
        if alpha is None:
            return self.sums(x)
        public = torch.minimum(*self.lens.chunk(2)).repeat(2)[:, None].expand_as(x)
        return self.sums(x * public_weights((self.mask.cumsum(1) - 1).clamp(min=0), public, alpha))

    def pairs(self, leaf: Tensor, settings: dict[str, Any], *, reference: bool) -> PreferenceInputs:
        half, ref = self.half, self.column("ref_logp")
        ld = settings.get("ld_alpha")
        rows, ref_rows = self.near_sums(leaf, ld), self.near_sums(ref, ld) * float(reference)
        whole, collision = self.sums(leaf), self.sums(self.column("log_collision"))
        lens, weight = self.lens, torch.ones(half, dtype=torch.float64)
        if settings.get("wpo"):
            weight = pair_weights(
                whole[:half], whole[half:], lens[:half], lens[half:], collision[:half], collision[half:]
            )
        nll = -whole[:half] / lens[:half].mean()  # TRL's denominator: the mean over all tokens of the batch
        return PreferenceInputs(
            rows[:half], rows[half:], ref_rows[:half], ref_rows[half:], lens[:half], lens[half:], nll, weight
        )

    def dpo(self) -> dict[str, list[float]]:
        found = {}
        for name, settings in self.case["dpo"].items():
            leaf = self.leaf()
            cfg = PreferenceSettings(
                beta=settings.get("beta", 0.1),
                label_smoothing=settings.get("label_smoothing", 0.0),
                divergence=settings.get("divergence", "reverse_kl"),
                divergence_alpha=settings.get("alpha", 0.5),
            )
            kinds = dict(zip(settings["loss"], settings.get("weights", [1.0, 1.0]), strict=False))
            nll = kinds.pop("sft", 0.0)
            losses = [(PREFERENCE_LOSSES[kind], weight) for kind, weight in kinds.items()]
            terms = combined(losses, nll, self.pairs(leaf, settings, reference=True), cfg)
            found[name] = measured(terms.loss.mean(), leaf)
        return found

    def reference_free(self) -> dict[str, list[float]]:
        found = {}
        for name, settings in self.case["reference_free"].items():
            leaf = self.leaf()
            cfg = PreferenceSettings(
                beta=settings["beta"], gamma=settings.get("gamma", 0.5), alpha=settings.get("alpha", 0.25)
            )
            nll = settings.get("cpo_alpha", float(settings["trainer"] == "orpo"))
            pairs = self.pairs(leaf, settings, reference=False)
            terms = combined([(PREFERENCE_LOSSES[name], 1.0)], nll, pairs, cfg)
            found[name] = measured(terms.loss.mean(), leaf)
        return found

    def kto(self) -> dict[str, list[float]]:
        found, half, desirable = {}, self.half, torch.tensor(self.case["desirable"])
        ref = self.sums(self.column("ref_logp"))
        for name, settings in self.case["kto"].items():
            leaf = self.leaf()
            ratio = self.sums(leaf) - ref
            if name == "kto":
                weights = settings["desirable_weight"], settings["undesirable_weight"]
                point = unpaired_loss.kto_reference_point(ratio[half:])
                terms = unpaired_loss.kto_loss(ratio[:half], desirable, point, settings["beta"], *weights)
            else:
                terms = unpaired_loss.apo_zero_unpaired_loss(ratio[:half], desirable, settings["beta"])
            found[name] = measured(terms.loss.mean(), leaf)
        return found

    def bco(self) -> dict[str, list[float]]:
        leaf, half, desirable = self.leaf(), self.half, torch.tensor(self.case["desirable"])
        beta = self.case["bco"]["bco"]["beta"]
        ratio = (self.sums(leaf) - self.sums(self.column("ref_logp")))[:half]
        shift = (beta * ratio.detach()).mean().expand_as(ratio)
        return {"bco": measured(unpaired_loss.bco_loss(ratio, desirable, shift, beta).loss.mean(), leaf)}

    def policy(self) -> dict[str, list[float]]:
        old, ref = self.column("old_logp"), self.column("ref_logp")
        advantage = self.column("advantage")[:, None].expand_as(old)
        found = {}
        for name, settings in self.case["policy"].items():
            kind, own, aggregation = POLICY[name](settings)
            leaf = self.leaf()
            loss = POLICY_LOSSES[kind](leaf, old, advantage, self.mask, **own).loss
            if settings.get("beta"):
                loss = loss + settings["beta"] * kl_k3(leaf, ref)
            weight = aggregation_weights(self.mask, aggregation, settings.get("horizon")).double()
            found[name] = measured((loss * weight).sum(), leaf)
        return found

    def reward_model(self) -> dict[str, list[float]]:
        found = {}
        for name, settings in self.case["reward_model"].items():
            leaf = self.column("scores").requires_grad_(True)
            margin = self.column("margin") if settings.get("margin") else None
            loss = bradley_terry_loss(leaf[: self.half], leaf[self.half :], margin, settings.get("centring", 0.0))
            found[name] = measured(loss.mean(), leaf)
        return found

    def xpo(self) -> dict[str, list[float]]:
        found, half, ref = {}, self.half, self.sums(self.column("ref_logp"))
        wins = torch.tensor(self.case["policy_wins"])
        for name, settings in self.case["xpo"].items():
            leaf = self.leaf()
            rows = self.sums(leaf)

            def side(x: Tensor, first: Tensor) -> Tensor:
                return torch.where(first, x[:half], x[half:])

            x = PreferenceInputs.of(side(rows, wins), side(rows, ~wins), side(ref, wins), side(ref, ~wins))
            kind = {"sigmoid": "sigmoid", "ipo": "ipo_sum"}[settings["loss"]]
            loss = PREFERENCE_LOSSES[kind](x, PreferenceSettings(beta=settings["beta"])).loss
            every = torch.ones(half, dtype=torch.bool)
            found[name] = measured(online_preference.xpo_loss(loss, rows[half:], every, settings["alpha"]).mean(), leaf)
        return found

    def nash_md(self) -> dict[str, list[float]]:
        leaf, half = self.leaf(), self.half
        logp, mask = leaf[:half], self.mask[:half]
        advantage = (self.column("probability") - 0.5)[:, None].expand_as(logp)
        ratio = (logp - self.column("ref_logp")[:half]).detach()
        beta = self.case["nash_md"]["nash_md"]["beta"]
        items = online_preference.nash_md_loss(logp, advantage, ratio, beta)
        return {"nash_md": measured((items * mask).sum(1).mean(), leaf)}


Settings = Callable[[dict[str, Any]], tuple[str, dict[str, Any], str]]


def clipped(aggregation: str, kind: str = "ppo", **more: Any) -> Settings:
    def of(settings: dict[str, Any]) -> tuple[str, dict[str, Any], str]:
        own = {"clip_low": settings.get("low", 0.2), "clip_high": settings.get("high", 0.2), **more}
        return kind, own, aggregation

    return of


def trust_region(kind: str) -> Settings:
    return lambda settings: (kind, {"low": settings["low"], "high": settings["high"]}, "token_mean")


POLICY: dict[str, Settings] = {
    "ppo, sequence mean": clipped("seq_mean_token_mean"),
    "ppo, token mean": clipped("token_mean"),
    "ppo, constant horizon": clipped("constant_horizon"),
    "ppo, clip higher": clipped("token_mean"),
    "ppo, k3 in the loss": clipped("seq_mean_token_mean"),
    "gspo": clipped("seq_mean_token_mean", "gspo", form="sequence"),
    "sapo": lambda s: (
        "sapo",
        {name: s[name] for name in ("temperature_positive", "temperature_negative")},
        "seq_mean_token_mean",
    ),
    "cispo": lambda s: ("cispo", {"clip_low": 1.0, "clip_high": s["high"] - 1.0}, "token_mean"),
    "gmpo": clipped("seq_mean_token_mean", "gmpo"),
    "dppo_tv": trust_region("dppo_tv"),
    "dppo_kl": trust_region("dppo_kl"),
}


def theirs(path: Path) -> dict[str, tuple[str, list[float]]]:
    """name -> (version, [loss, gradient norm]) of every installed version."""
    found: dict[str, tuple[str, list[float]]] = {}
    for version in VERSIONS:
        command = [str(python_of(version)), str(HERE / "peers" / "trl_side.py"), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise SystemExit(f"TRL {version} failed:\n{done.stderr[-2000:]}")
        told = json.loads(done.stdout.splitlines()[-1])
        found.update({name: (told["version"], values) for name, values in told["values"].items()})
    return found


def main(seed: int) -> int:
    case = cases(seed)
    ours = Ours(case)
    sides = (ours.dpo, ours.reference_free, ours.kto, ours.bco, ours.policy, ours.reward_model, ours.xpo, ours.nash_md)
    own = {name: values for side in sides for name, values in side().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.json"
        path.write_text(json.dumps(case), encoding="utf8")
        peers = theirs(path)
    worst = 0.0
    print("| loss | TRL | its loss | ours | its gradient norm | ours | relative difference | convention |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (version, values) in peers.items():
        pairs = list(zip(own[name], values, strict=True))[1 if name in GRADIENT_ALONE else 0 :]
        gap = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
        worst = max(worst, gap)
        numbers = " | ".join(f"{b:.6f} | {a:.6f}" for a, b in zip(own[name], values, strict=True))
        print(f"| {name} | {version} | {numbers} | {gap:.1e} | {NOTES.get(name, '')} |")
    print(f"\n{len(peers)} losses, largest relative difference {worst:.1e} (bound {TOLERANCE:.0e}), seed {seed}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
