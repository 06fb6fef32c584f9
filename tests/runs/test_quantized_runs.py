"""Runs with a base in 4 bits: a KL that begins at 0, exact resume, the folder that comes out, what `check` refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tutelage.build import check_recipe, layouts, resume_run, roles
from tutelage.build.critic import starting_point
from tutelage.build.generation import first_weights_are_published
from tutelage.build.kit import Facts, Kit
from tutelage.config import load_checked
from tutelage.engines.held import engines_of
from tutelage.errors import ConfigError, DataError, MissingExtraError, ModelError
from tutelage.layout import Place
from tutelage.models import lora, quantize
from tutelage.reports.metrics_log import read_events, read_metrics

pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")

QLORA = ("model.lora_rank=4", "model.quantize=nf4")
RULES = ("reward.model=null", "reward.rules=[{function: length_range(low=2)}]")
RAY = ("cluster.transport=ray", "cluster.pools.main.devices=2")


def lasting(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time", "memory/"))} for row in read_metrics(folder)]


def weights(folder: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step_{step:06d}" / role / "rank_00000.safetensors")


def checked(tmp_path: Path, algorithm: str, *given: str) -> None:
    (tmp_path / "recipe.yaml").write_text(f"algorithm: {algorithm}\n")
    last = {text.split("=", 1)[0]: text for text in given}
    check_recipe(load_checked(str(tmp_path / "recipe.yaml"), list(last.values()))[0])


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared base"])
def test_ppo_begins_at_its_reference_learns_and_goes_on_bit_for_bit(run, ppo_overrides, shared):
    extra = (*QLORA, *RULES, f"model.shared_base={str(shared).lower()}")
    result = run("ppo", *ppo_overrides, *extra, "checkpoint.every=2", "max_steps=4", "optim.lr=1e-2")
    metrics = lasting(result.folder)
    kl = [row["kl/sequence"] for row in metrics if "kl/sequence" in row]
    assert kl[0] == 0
    assert kl[-1] > 0.1
    gaps = [row["policy/logp_gap"] for row in metrics if "policy/logp_gap" in row]
    assert gaps
    assert max(gaps) < 1e-4
    before = {role: weights(result.folder, 4, role) for role in ("actor", "critic")}
    assert all(".lora_" in name for name in before["actor"])
    shutil.rmtree(result.folder / "checkpoints" / "step_000004")
    shutil.rmtree(result.folder / "checkpoints" / "best")
    (result.folder / "summary.json").unlink()
    assert resume_run(result.folder, "plain").summary["after"] == result.summary["after"]
    assert lasting(result.folder) == metrics
    for role, saved in before.items():
        again = weights(result.folder, 4, role)
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[name], again[name]) for name in saved)


def test_a_smaller_base_is_said_where_it_is_shared(run, ppo_overrides):
    said = []
    for form in ("none", "nf4"):
        extra = ("model.lora_rank=4", f"model.quantize={form}", "model.shared_base=true", *RULES, "max_steps=1")
        events = read_events(run("ppo", *ppo_overrides, *extra).folder)
        note = next(e["message"] for e in events if "one frozen base of" in e["message"])
        said.append(float(note.split("one frozen base of ")[1].split(" MB")[0]))
    assert said[1] < said[0]


def test_what_a_dpo_reference_said_of_the_whole_base_is_not_taken_for_the_packed_one(run, files, sft_run, tmp_path):
    base = [f"model.path={sft_run.best_model}", f"data.train={files['preferences']}", "model.lora_rank=4", "max_steps=1"]
    base += [f"dpo.reference_cache={tmp_path / 'reference.safetensors'}", "dpo.batch_size=8"]
    run("dpo", *base)
    run("dpo", *base)
    with pytest.raises(DataError, match=r"what differs: model\.quantize"):
        run("dpo", *base, "model.quantize=nf4")
    (tmp_path / "reference.safetensors").unlink()
    run("dpo", *base, "model.quantize=nf4")
    with pytest.raises(DataError, match=r"what differs: model\.quantize"):
        run("dpo", *base)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("model.quantize=nf4", "model.lora_rank=0"), "model.lora_rank is above 0"),
        (("model.quantize=nf8", "model.lora_rank=4"), "nf4"),
        ((*QLORA, *RAY, "cluster.layout.default.shard=2"), "the layout of actor"),
        ((*QLORA, *RAY, "cluster.layout.critic.context=2"), "the layout of critic"),
        ((*QLORA, "rollout.engine=vllm", "rollout.vllm.lora=adapter"), "rollout.vllm.lora=merged"),
    ],
)
def test_refused_before_anything_is_loaded(ppo_overrides, tmp_path, given, said):
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, "ppo", *ppo_overrides, *RULES, *given)
    assert said in str(error.value)
    assert "quantize" in str(error.value)


def test_an_architecture_is_refused_before_its_weights_are_read(ppo_overrides, tmp_path, tiny_gpt2_folder):
    with pytest.raises(ModelError, match="Conv1D"):
        checked(tmp_path, "ppo", *ppo_overrides, *RULES, *QLORA, f"model.path={tiny_gpt2_folder}")


def config(tmp_path: Path, algorithm: str, *given: str) -> Any:
    (tmp_path / "recipe.yaml").write_text(f"algorithm: {algorithm}\n")
    last = {text.split("=", 1)[0]: text for text in given}
    return load_checked(str(tmp_path / "recipe.yaml"), list(last.values()))[0].config


def test_a_layout_of_a_role_that_the_stage_lacks_is_no_matter(ppo_overrides, tmp_path):
    given = (*QLORA, *RAY, "cluster.layout.critic.shard=2")
    cfg = config(tmp_path, "ppo", *ppo_overrides, *RULES, *given)
    layouts.require_whole_base(cfg, ("actor", "reference"))
    with pytest.raises(ConfigError, match="the layout of critic"):
        layouts.require_whole_base(cfg, ("actor", "critic"))


def test_engines_that_hold_the_whole_base_get_the_packed_ones_weights_first(ppo_overrides, tmp_path):
    def first(*given: str) -> bool:
        return first_weights_are_published(config(tmp_path, "ppo", *ppo_overrides, *RULES, *given))

    elsewhere = (*RAY, "cluster.pools.other.devices=2", "cluster.place.rollout=other")
    assert not first("model.lora_rank=4", *elsewhere)
    assert not first(*QLORA)
    assert first(*QLORA, *elsewhere)
    assert first(*QLORA, "rollout.engine=vllm")
    assert not first("model.lora_rank=4", "rollout.engine=vllm")


def test_a_reference_elsewhere_is_the_actors_base_and_a_generator_elsewhere_is_whole(ppo_overrides, tmp_path):
    cfg = config(tmp_path, "ppo", *ppo_overrides, *RULES, *QLORA)
    kit = Kit(Facts(cfg, 1), ("actor", "reference"), Place())
    packed = [n for n, m in kit.policy.model.named_modules() if quantize.is_quantized(m) and ".base_layer" in n]
    assert packed
    reference, generator = kit.frozen_policy("reference", as_trained=True), kit.frozen_policy("rollout")
    ours = {lora.plain_name(n): w for n, w in kit.policy.masters.full_precision().items()}
    theirs = reference.masters.full_precision()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())
    assert sum(quantize.is_quantized(m) for m in reference.model.modules()) == len(packed)
    assert not any(quantize.is_quantized(m) for m in generator.model.modules())
    (role,) = engines_of(roles.reference(Kit(Facts(cfg, 1), ("reference",), Place())))
    assert sum(quantize.is_quantized(m) for m in role.model.module.modules()) == len(packed)
    critic, _ = starting_point(kit)
    for name, weight in critic.masters.full_precision().items():
        if name.startswith("backbone.") and ".lora_" not in name:
            assert torch.equal(weight, ours[f"model.{lora.plain_name(name).removeprefix('backbone.')}"]), name


def test_without_the_package_check_names_the_extra(ppo_overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(quantize, "installed", lambda name: name != "bitsandbytes")
    with pytest.raises(MissingExtraError, match=r"tutelage\[qlora\]"):
        checked(tmp_path, "ppo", *ppo_overrides, *RULES, *QLORA)
