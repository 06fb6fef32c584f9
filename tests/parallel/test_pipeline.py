"""Pipeline stages compute what one process computes: losses, gradients, updates, inference, states, exports."""

from __future__ import annotations

import itertools

import pipeline_kit as pk
import pytest
import torch
from pipeline_kit import kit
from safetensors.torch import load_file
from spmd_kit import run_ranks
from transformers import BertConfig, LlamaConfig

from tutelage.config.common import ModelConfig
from tutelage.models.load import load_causal_lm, load_scalar_model
from tutelage.models.parallel.pipeline import PARTS, pipeline_obstacle, stage_bounds

LR = 1e-2


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory, tiny_tokenizer):
    return pk.save_llama(tmp_path_factory.mktemp("tied"), tiny_tokenizer, tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory, tiny_tokenizer):
    return pk.save_llama(tmp_path_factory.mktemp("untied"), tiny_tokenizer, tied=False)


def require_equal_runs(ours: list[dict], theirs: dict, rel: float = 2e-6) -> None:
    """Every rank of every stage has the one process's gradient, statistics and weights (weights: Adam amplifies)."""
    for one in ours:
        kit.require_close(one["gradients"], theirs["gradients"], rel)
        for mine, other in zip([one["before"], *one["stats"]], [theirs["before"], *theirs["stats"]], strict=True):
            assert mine.keys() == other.keys()
            for name in mine:
                if name != "micro_batches":
                    assert mine[name].mean == pytest.approx(other[name].mean, rel=10 * rel, abs=1e-6), name
                    assert mine[name].weight == other[name].weight, name
        assert list(one["weights"]) == list(theirs["weights"])
        for name, weight in theirs["weights"].items():
            assert float((one["weights"][name] - weight).abs().max()) < 2 * LR * 0.05, name
    assert all(one["stats"] == ours[0]["stats"] for one in ours), "ranks report different numbers"


@pytest.mark.parametrize(
    "own",
    [
        {"tokens_per_micro_batch": 20},
        pytest.param({"tokens_per_micro_batch": 20, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param({"tokens_per_micro_batch": 10_000}, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "gpipe", "one micro-batch"],
)
def test_gradients_and_two_updates_equal_one_process(own, tied_folder, untied_folder):
    runs = [(case, tied_folder if case in ("tokens", "sorted") else untied_folder, None, own) for case in pk.CASES]
    ours = run_ranks(pk.on_rank, 2, runs, "pipeline 2")
    for i, (case, folder, settings, _) in enumerate(runs):
        require_equal_runs([one[i] for one in ours], pk.two_steps(case, folder, None, settings))


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline 2 x shard 2",
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                "pipeline 4",
                "pipeline 2 x replicate 2",
                "pipeline 2 x tensor 2",
                "pipeline 2 x sequence 2",
                "pipeline 2 x context 2",
            )
        ),
    ],
)
def test_stages_with_other_axes_equal_one_process(layout, tied_folder, untied_folder):
    few = {"tokens_per_micro_batch": 20}
    runs = [
        (case, tied_folder if case in ("tokens", "sorted") else untied_folder, None, own)
        for case in pk.CASES
        for own in ((few,) if case != "tokens" else (few, {**few, "schedule": "gpipe", "max_grad_norm": 0.01}))
    ]
    ours = run_ranks(pk.on_rank, pk.LAYOUTS[layout].size, runs, layout)
    for i, (case, folder, settings, own) in enumerate(runs):
        clipped = {k: v for k, v in own.items() if k == "max_grad_norm"}
        require_equal_runs([one[i] for one in ours], pk.two_steps(case, folder, None, settings, **clipped))


@pytest.mark.parametrize(
    "layout", ["pipeline 2 x shard 2", pytest.param("pipeline 2 x replicate 2", marks=pytest.mark.slow)]
)
def test_data_ranks_with_other_numbers_of_micro_batches(layout, tied_folder):
    ours = run_ranks(pk.uneven, 4, tied_folder, layout)
    theirs = pk.uneven(0, 1, tied_folder, None)
    for rank in ours:
        for mine, other in zip(rank, theirs, strict=True):
            assert mine["stats"]["loss"].mean == pytest.approx(other["stats"]["loss"].mean, rel=1e-5)
            assert mine["stats"]["grad_norm"].mean == pytest.approx(other["stats"]["grad_norm"].mean, rel=1e-5)
            for name, weight in other["weights"].items():
                assert float((mine["weights"][name] - weight).abs().max()) < 2 * LR * 0.05, name


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline 2",
        pytest.param("pipeline 2 x replicate 2", marks=pytest.mark.slow),
        pytest.param("pipeline 2 x shard 2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_has_the_rows_of_inference(layout, tied_folder):
    ours = run_ranks(pk.inference, pk.LAYOUTS[layout].size, tied_folder, layout)
    theirs = pk.inference(0, 1, tied_folder, None)
    for one in ours:
        for k, (start, end) in enumerate(one["shares"]):
            for what in ("logprobs", "values", "frozen"):
                assert len(one[what][k]) == end - start
                for mine, other in zip(one[what][k], theirs[what][k][start:end], strict=True):
                    torch.testing.assert_close(mine, other, atol=2e-5, rtol=0)
            torch.testing.assert_close(one["scores"][k], theirs["scores"][k][start:end], atol=2e-5, rtol=0)
            torch.testing.assert_close(one["shifted"][k], theirs["scores"][k][start:end] + 2.0, atol=2e-5, rtol=0)


def test_a_stage_holds_its_own_blocks_and_both_ends_the_same_tied_weight(tied_folder):
    first, last = run_ranks(pk.held, 2, tied_folder, "pipeline 2", None)
    whole = dict(pk.make("tokens", tied_folder, None)[0].model.module.named_parameters())
    tied = "model.embed_tokens.weight"
    assert set(first["own"]) & set(last["own"]) == {tied}
    assert set(first["own"]) | set(last["own"]) == set(whole)
    assert torch.equal(first["own"][tied], last["own"][tied])
    assert not torch.equal(first["own"][tied], whole[tied])
    assert all(not p.is_meta and p.shape == whole[n].shape for one in (first, last) for n, p in one["own"].items())
    assert {n.split(".")[2] for n in first["own"] if ".layers." in n} == {"0", "1"}
    assert {n.split(".")[2] for n in last["own"] if ".layers." in n} == {"2", "3"}
    assert "model.norm.weight" in last["own"]
    assert first["bytes"] == last["bytes"] == 16 * sum(p.numel() for p in whole.values())
    for one in (first, last):
        assert one["refusals"]["generate"][0] == "RolloutError"
        assert "2 pipeline stages" in one["refusals"]["generate"][1]
        assert one["refusals"]["train_layers"][0] == "ModelError"
        assert one["refusals"]["schedule"][0] == "ConfigError"
        assert "Did you mean 1f1b" in one["refusals"]["schedule"][1]


@pytest.mark.parametrize("layout", ["pipeline 2", pytest.param("pipeline 2 x replicate 2", marks=pytest.mark.slow)])
def test_every_rank_raises_what_one_found_and_goes_on(layout, tied_folder):
    ours = run_ranks(pk.failures, pk.LAYOUTS[layout].size, tied_folder, layout)
    expected = pk.two_steps("tokens", tied_folder, None)["stats"][0]["loss"].mean
    for one in ours:
        assert one["nan"] == ours[0]["nan"]
        assert one["nan"][0] == "TrainingError"
        assert "TokenLoss is not finite at update 1, first in item 3 of the mini-batch" in one["nan"][1]
        assert one["scalars"] == ours[0]["scalars"]
        assert "NanScalars is not finite at update 1, first in item 0" in one["scalars"][1]
        for case, text in (("stage", "out of order"), ("loss", "no loss today")):
            assert text in one[case][1]
        for case in ("nan", "scalars", "stage", "loss"):
            assert one[f"{case} unchanged"], case
        for case in ("nan", "stage", "loss"):
            assert one[f"{case} then"] == pytest.approx(expected, rel=1e-5), case
    assert [one["stage"][0] for one in ours] == ["BrokenError"] + ["TrainingError"] * (len(ours) - 1)


@pytest.mark.parametrize("layout", ["pipeline 2", pytest.param("pipeline 2 x shard 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("settings", [None, {"lora_rank": 3}], ids=["full", "lora"])
def test_states_and_exports_are_those_of_the_whole_model(layout, settings, tied_folder, tmp_path):
    one, batch, loss = pk.make("tokens", tied_folder, None, settings)
    base = one.logprobs(batch.sequences, 1.0, adapter=False).flat if settings else None
    one.step(batch, loss)
    one.save_state(tmp_path / "one_state")
    named = {n: t.clone() for n, t in one.named_weights()}
    adapter = {n: t.clone() for n, t in one.named_weights(adapter_only=True)}
    ours = run_ranks(pk.saved, pk.LAYOUTS[layout].size, tied_folder, layout, tmp_path, settings)
    back, _, _ = pk.make("tokens", tied_folder, None, settings)
    back.load_state(tmp_path / "stages_state")
    exported = load_causal_lm(ModelConfig(path=str(tmp_path / "stages_model")))
    second = one.step(batch, loss)
    again = back.step(batch, loss)
    assert again["loss"].mean == pytest.approx(second["loss"].mean, rel=1e-4)
    written = dict(exported.model.named_parameters(remove_duplicate=False))
    for rank in ours:
        assert list(rank["named"]) == list(named)
        assert list(rank["adapter"]) == list(adapter)
        for name, weight in (named | adapter).items():
            mine = (rank["named"] | rank["adapter"])[name]
            assert float((mine - weight).abs().max()) < LR * 0.05, name
            assert name in adapter or torch.equal(mine, written[name]), name
        assert rank["stats"]["loss"].mean == pytest.approx(second["loss"].mean, rel=1e-4)
        if base is not None:
            torch.testing.assert_close(rank["base"], base, atol=2e-5, rtol=0)
    if settings:
        assert adapter
        assert (tmp_path / "stages_model" / "adapter" / "adapter_model.safetensors").is_file()
        written = load_file(tmp_path / "stages_model" / "adapter" / "adapter_model.safetensors")
        assert written.keys() == adapter.keys()
        one.save_pretrained(tmp_path / "one_model")
        assert load_file(tmp_path / "one_model" / "adapter" / "adapter_model.safetensors").keys() == written.keys()
        assert all(torch.equal(written[n], ours[0]["adapter"][n]) for n in written)


def test_a_critic_of_stages_is_written_whole(untied_folder, tmp_path):
    one, batch, loss = pk.make("values", untied_folder, None)
    one.step(batch, loss)
    ours = run_ranks(pk.saved_values, 2, untied_folder, "pipeline 2", tmp_path)
    read = load_scalar_model(ModelConfig(path=str(tmp_path / "stages_critic")), "value")
    again = dict(read.named_parameters())
    for rank in ours:
        assert list(rank["named"]) == [n for n, _ in one.named_weights()]
        for name, weight in one.named_weights():
            assert float((rank["named"][name] - weight).abs().max()) < LR * 0.05, name
            written = again[name] if name in again else again[f"backbone.{name}"]
            assert torch.equal(written, rank["named"][name]), name


@pytest.mark.parametrize("layout", ["pipeline 2", pytest.param("pipeline 2 x shard 2", marks=pytest.mark.slow)])
def test_lora_under_stages_equals_one_process(layout, tied_folder):
    runs = [("tokens", tied_folder, {"lora_rank": 3}, {"tokens_per_micro_batch": 20})]
    ours = run_ranks(pk.on_rank, pk.LAYOUTS[layout].size, runs, layout)
    require_equal_runs([one[0] for one in ours], pk.two_steps("tokens", tied_folder, None, {"lora_rank": 3}))


@pytest.mark.slow
def test_activation_checkpointing_under_stages_equals_one_process(tied_folder):
    settings = {"gradient_checkpointing": True}
    runs = [("tokens", tied_folder, settings, {"tokens_per_micro_batch": 20})]
    ours = run_ranks(pk.on_rank, 2, runs, "pipeline 2")
    require_equal_runs([one[0] for one in ours], pk.two_steps("tokens", tied_folder, None))


@pytest.mark.slow
def test_every_architecture_with_a_plan_computes_the_same_in_stages(tiny_tokenizer, tmp_path):
    folders = {}
    for kind, changes in pk.ARCHITECTURES.items():
        folders[kind] = pk.save_kind(tmp_path / kind, kind, tiny_tokenizer, **changes)
    assert {pk.config_of(folder).model_type for folder in folders.values()} == set(PARTS)
    ours = run_ranks(pk.architectures, 2, folders, "pipeline 2")
    theirs = pk.architectures(0, 1, folders, None)
    for rank in ours:
        for kind, expected in theirs.items():
            torch.testing.assert_close(
                rank[kind]["logprobs"], expected["logprobs"], atol=3e-5, rtol=0, msg=lambda m, k=kind: f"{k} {m}"
            )
            kit.require_close(rank[kind]["gradients"], expected["gradients"], 5e-6)


# ---- the cut, without ranks ----


@pytest.mark.parametrize(("depth", "count"), [(1, 1), (4, 2), (5, 3), (7, 4), (6, 6)])
@pytest.mark.parametrize("tail", [0.0, 3.0, 50.0])
def test_the_costliest_stage_is_as_cheap_as_any_cut_makes_it(depth, count, tail):
    costs = [float(1 + (7 * i) % 5) for i in range(depth)]

    def worst(cuts):
        edges = [0, *cuts, depth]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(edges)]
        sums[-1] += tail
        return max(sums)

    best = min(worst(cuts) for cuts in itertools.combinations(range(1, depth), count - 1))
    bounds = stage_bounds(costs, tail, count)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == depth
    assert all(a < b for a, b in bounds)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    assert worst([a for a, _ in bounds[1:]]) == best


def test_equal_blocks_are_cut_evenly_and_a_heavy_head_has_fewer():
    assert stage_bounds([1.0] * 8, 0.0, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert stage_bounds([1.0] * 8, 2.0, 2) == [(0, 5), (5, 8)]


def test_obstacles_are_read_from_the_configuration():
    config = LlamaConfig(num_hidden_layers=4)
    assert pipeline_obstacle(config, 1) is None
    assert pipeline_obstacle(config, 4) is None
    assert "5 pipeline stages for 4 blocks" in pipeline_obstacle(config, 5)
    assert "bert has no pipeline plan" in pipeline_obstacle(BertConfig(), 2)
    assert pipeline_obstacle(BertConfig(), 1) is None
