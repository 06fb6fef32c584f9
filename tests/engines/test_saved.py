"""A state saved by any number of ranks is loaded by any other number; what is damaged or strange is refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import engine_kit as kit
import pytest
import ranks_kit
import torch
from safetensors.torch import load_file, save_file
from spmd_kit import run_ranks

from tutelage.engines.saved import SavedTensors, overlap
from tutelage.errors import CheckpointError


def save_after_two(rank: int, world: int, folder: Path, layout: str | None, settings: dict, to: Path) -> float:
    """Two updates, saved; then the loss of the third."""
    engine = ranks_kit.policy(folder, ranks_kit.LAYOUTS[layout] if layout else None, settings)
    for _ in range(2):
        engine.step(kit.batch(), kit.TokenLoss())
    engine.save_state(to)
    engine.step(kit.batch(), kit.TokenLoss())
    return engine.evaluate(kit.batch(), kit.TokenLoss())["loss"].mean


def load_and_go_on(rank: int, world: int, folder: Path, layout: str | None, settings: dict, saved: list[Path]) -> list:
    found = []
    for path in saved:
        engine = ranks_kit.policy(folder, ranks_kit.LAYOUTS[layout] if layout else None, settings)
        engine.load_state(path)
        stats = engine.step(kit.batch(), kit.TokenLoss())
        after = engine.evaluate(kit.batch(), kit.TokenLoss())["loss"].mean
        found.append({"updates": engine.updates, "loss": stats["loss"].mean, "after": after})
    return found


@pytest.mark.parametrize(
    ("settings", "layouts"),
    [
        pytest.param({}, (None, "hsdp 2x2"), id="full"),
        *(
            pytest.param(settings, (None, *ranks_kit.LAYOUTS), id=f"{name} to every layout", marks=pytest.mark.slow)
            for name, settings in (("full", {}), ("lora", {"lora_rank": 2}))
        ),
    ],
)
def test_a_state_moves_between_one_two_and_four_ranks(settings, layouts, tiny_llama_folder, tmp_path):
    single, pair = tmp_path / "single", tmp_path / "pair"
    expected = save_after_two(0, 1, tiny_llama_folder, None, settings, single)
    assert run_ranks(save_after_two, 2, tiny_llama_folder, "shard 2", settings, pair) == pytest.approx(
        [expected] * 2, rel=1e-6
    )
    assert {p.suffix for p in pair.iterdir()} == {".safetensors", ".json"}
    assert len(list(pair.glob("*.safetensors"))) == 2, "each rank writes its own part"
    sizes = [sum(t.numel() for t in load_file(p).values()) for p in sorted(pair.glob("*.safetensors"))]
    whole = sum(t.numel() for t in load_file(single / "rank_00000.safetensors").values())
    assert sum(sizes) == whole, "every number once"
    assert max(sizes) < 0.6 * whole
    for layout in layouts:
        args = (tiny_llama_folder, layout, settings, [single, pair])
        world = ranks_kit.LAYOUTS[layout].size if layout else 1
        for one in run_ranks(load_and_go_on, world, *args) if layout else [load_and_go_on(0, 1, *args)]:
            for found in one:
                assert found["updates"] == 3
                assert found["after"] == pytest.approx(expected, rel=1e-6)


@pytest.fixture
def saved(tiny_llama_folder, tmp_path) -> Path:
    save_after_two(0, 1, tiny_llama_folder, None, {}, tmp_path / "state")
    return tmp_path / "state"


def test_the_resumed_run_is_the_same_to_the_bit_in_one_process(saved, tiny_llama_folder):
    whole = ranks_kit.policy(tiny_llama_folder, None)
    for _ in range(2):
        whole.step(kit.batch(), kit.TokenLoss())
    again = ranks_kit.policy(tiny_llama_folder, None)
    again.load_state(saved)
    for _ in range(2):
        assert whole.step(kit.batch(), kit.TokenLoss()) == again.step(kit.batch(), kit.TokenLoss())
    for name, weight in whole.state()["weights"].items():
        assert torch.equal(weight, again.state()["weights"][name])


def test_a_state_of_another_model_is_refused(saved, tiny_gpt2_folder, tiny_llama_folder):
    for other in (
        ranks_kit.policy(tiny_gpt2_folder, None),
        ranks_kit.policy(tiny_llama_folder, None, {"lora_rank": 2}),
        ranks_kit.policy(tiny_llama_folder, None, train_layers=1),
    ):
        before = other.state()["weights"]
        with pytest.raises(CheckpointError, match="does not fit the model"):
            other.load_state(saved)
        assert all(torch.equal(before[n], w) for n, w in other.state()["weights"].items())


@pytest.mark.parametrize("damage", ["short", "gone", "index", "no_index", "chunk", "shape"])
def test_a_damaged_state_is_refused_by_the_name_of_its_file(damage, saved, tiny_llama_folder):
    file, index = saved / "rank_00000.safetensors", saved / "index.json"
    content = json.loads(index.read_text())
    name = "weights/model.norm.weight"
    if damage == "short":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "gone":
        file.unlink()
    elif damage == "index":
        index.write_text("{")
    elif damage == "no_index":
        index.unlink()
    elif damage == "chunk":
        content["tensors"][name]["chunks"] = []
        index.write_text(json.dumps(content))
    else:
        save_file({**load_file(file), name: torch.ones(3)}, file)
    engine = ranks_kit.policy(tiny_llama_folder, None)
    before = engine.state()["weights"]
    expected = "rank_00000.safetensors" if damage in ("short", "gone", "shape") else "index.json"
    with pytest.raises(CheckpointError, match=expected):
        engine.load_state(saved)
    assert all(torch.equal(before[n], w) for n, w in engine.state()["weights"].items())


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_nothing_is_ever_unpickled(saved, tiny_llama_folder, tmp_path):
    mark = tmp_path / "went_off"
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists(), "the bomb works"
    mark.unlink()
    engine = ranks_kit.policy(tiny_llama_folder, None)
    for name in (".metadata", "__0_0.distcp", "extra.safetensors", "state.pt"):
        (saved / name).write_bytes(bomb)
    engine.load_state(saved)  # files that the index does not name are not opened
    (saved / "rank_00000.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        engine.load_state(saved)
    content = json.loads((saved / "index.json").read_text())
    for where in ("../bomb.safetensors", str(tmp_path / "bomb.safetensors"), "state.pt", 3):
        content["tensors"]["weights/model.norm.weight"]["chunks"][0]["file"] = where
        (saved / "index.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"index\.json: the entry of weights/model\.norm\.weight"):
            engine.load_state(saved)
    (saved / "index.json").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        engine.load_state(saved)
    assert not mark.exists()


def damaged_on_one(rank: int, world: int, folder: Path, path: Path, unwritable: Path) -> list[str]:
    engine = ranks_kit.policy(folder, ranks_kit.LAYOUTS["shard 2"])
    engine.step(kit.batch(), kit.TokenLoss())
    engine.save_state(path)
    if rank == 1:
        (path / "rank_00001.safetensors").write_bytes(b"x")
    torch.distributed.barrier()
    texts = []
    for attempt in (lambda: engine.load_state(path), lambda: engine.save_state(unwritable)):
        try:
            attempt()
        except CheckpointError as error:
            texts.append(str(error))
    engine.step(kit.batch(), kit.TokenLoss())
    return texts


def test_a_damaged_part_of_one_rank_is_refused_on_all(tiny_llama_folder, tmp_path):
    file = tmp_path / "file"
    file.write_text("a file, not a folder")
    for read, written in run_ranks(damaged_on_one, 2, tiny_llama_folder, tmp_path / "state", file / "below"):
        assert "rank_00001.safetensors cannot be read" in read
        assert "cannot be written" in written


def test_overlap_by_hand():
    assert overlap((0, 0), (4, 3), [2, 1], [4, 2]) == ((slice(2, 4), slice(1, 3)), (slice(0, 2), slice(0, 2)))
    assert overlap((4,), (2,), [0], [4]) is None
    assert overlap((), (), [], []) == ((), ())
    assert overlap((5,), (3,), [4], [10]) == ((slice(0, 3),), (slice(1, 4),))


def test_a_tensor_is_read_in_other_cuts_than_it_was_saved_in(tmp_path):
    full = torch.arange(24.0).reshape(6, 4)
    save_file({"x": full[:4].contiguous()}, tmp_path / "rank_00000.safetensors")
    save_file({"x": full[4:].contiguous()}, tmp_path / "rank_00001.safetensors")
    chunks = [
        {"file": "rank_00000.safetensors", "offset": [0, 0], "shape": [4, 4]},
        {"file": "rank_00001.safetensors", "offset": [4, 0], "shape": [2, 4]},
    ]
    content = {"format": 1, "plain": {}, "tensors": {"x": {"shape": [6, 4], "chunks": chunks}}}
    (tmp_path / "index.json").write_text(json.dumps(content))
    assert torch.equal(SavedTensors.open(tmp_path).read("x", torch.zeros(6, 4)), full)
