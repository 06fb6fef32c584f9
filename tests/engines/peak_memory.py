"""Peak resident memory of one rank while it loads a model: whole, or its shards alone.

    python tests/engines/peak_memory.py [HIDDEN] [LAYERS]

Prints the size of the model and, for one process that loads it whole and for 2 and 4 ranks that load their shards, the
growth of the largest peak over what the process had before.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import torch
from spmd_kit import run_ranks

from tutelage.config.common import ModelConfig
from tutelage.engines.mesh import RankMeshes
from tutelage.engines.ranks import MeshRanks
from tutelage.layout import Layout
from tutelage.models.load import load_causal_lm


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _anonymous() -> int:
    """Resident bytes that are no mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def growth(rank: int, world: int, folder: Path, sharded: bool) -> tuple[int, int]:
    """(growth of the peak, growth of what stays) in bytes."""
    before, resting = _peak(), _anonymous()
    sharding = MeshRanks(RankMeshes().of(Layout(shard=world))).sharding() if sharded else None
    model = load_causal_lm(ModelConfig(path=str(folder)), sharding=sharding)
    assert model.trunk.causal
    return _peak() - before, _anonymous() - resting


def main(hidden: int, layers: int) -> None:
    from conftest import build_tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(
            vocab_size=len(build_tokenizer()),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        size = sum(p.nbytes for p in model.parameters())
        block = sum(p.nbytes for p in model.model.layers[0].parameters())
        model.save_pretrained(folder)
        del model
        build_tokenizer().save_pretrained(folder)
        print(f"model {size / 1e6:.0f} MB float32, one block {block / 1e6:.0f} MB, torch {torch.__version__}")
        for world, sharded in ((1, False), (2, True), (4, True)):
            found = run_ranks(growth, world, folder, sharded, timeout=400)
            peak, rest = max(p for p, _ in found) / 1e6, max(r for _, r in found) / 1e6
            what = f"{world} ranks, sharded" if sharded else "1 process, whole"
            print(f"{what}: peak +{peak:.0f} MB ({peak * 1e6 / size:.2f} of the model), stays +{rest:.0f} MB")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(*(int(n) for n in (sys.argv[1:] or ["1024", "12"])))
