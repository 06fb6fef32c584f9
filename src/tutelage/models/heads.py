"""Scalar heads on a transformer: reward models and critics.

Shapes: B sequences, N flat tokens, H hidden.  A score is read where `pooling` says:

    last   the hidden state of the sequence's last real token (decoders; also when that token is the pad token)
    first  of its first token (encoders trained with a class token)
    mean   the mean over its tokens
    response_mean  the mean over the tokens of its response

A critic reads every token.  The head is one linear layer H -> 1, in float32 always; heads of transformers' encoder
classifiers have a dense layer and an activation before it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from tutelage.errors import ModelError, ShapeError
from tutelage.models.computation import Computation
from tutelage.models.export import Writers, adapter_weights, named_weights, of_all_stages, write_folder, write_shards
from tutelage.models.features import FeatureCache
from tutelage.models.lora import plain_copy, save_adapter
from tutelage.models.paths import HEAD_FILE, is_local, load_config, loading, local_path, read_json
from tutelage.models.precision import MasterWeights
from tutelage.models.sharding import Sharding
from tutelage.models.trunk import States, Trunk
from tutelage.types import Ragged

Kind = Literal["reward", "value"]
Pooling = Literal["last", "first", "mean", "response_mean"]

POOLINGS: tuple[Pooling, ...] = ("last", "first", "mean", "response_mean")
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
BACKBONE = "backbone."
VALUE_STD = 1e-3
"""Of a new critic's head: values start near 0, so the first advantages are the rewards' own."""


@dataclass(frozen=True)
class Head:
    """layers: "score" (H -> 1), and "dense" (H -> H) before it where `activation` is given."""

    kind: Kind
    pooling: Pooling
    layers: dict[str, nn.Linear]
    activation: str | None = None


class ScalarModel(nn.Module):
    """One number per sequence (reward) or per token (value). Parameters: backbone.*, score.*, dense.* where given."""

    masters: MasterWeights

    def __init__(
        self,
        trunk: Trunk,
        layers: dict[str, nn.Linear],
        kind: Kind,
        pooling: Pooling,
        activation: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapted: PeftModel | None = None,
    ) -> None:
        super().__init__()
        if pooling == "first" and trunk.causal:
            raise ModelError(
                "the first token of a decoder sees nothing of the response",
                fix="use last or mean pooling, or an encoder",
            )
        self.trunk = trunk
        self.backbone = trunk.model
        self.score = layers["score"]
        self.dense = layers.get("dense")
        self.kind = kind
        self.pooling = pooling
        self.activation = activation
        self.tokenizer = tokenizer
        self.features: FeatureCache | None = None
        self._adapted = (adapted,)
        self._root = (Computation(self),)
        self.sharding: Sharding | None = None

    @property
    def root(self) -> Computation:
        """What an engine's computations run inside of."""
        return self._root[0]

    @property
    def adapted(self) -> PeftModel | None:
        return self._adapted[0]

    @property
    def module(self) -> nn.Module:
        return self

    def scalars(self, hidden_NH: Tensor) -> Tensor:
        """(N,) float32: the head on every hidden state."""
        x = hidden_NH.float()
        if self.dense is not None:
            assert self.activation is not None
            x = ACTIVATIONS[self.activation](self.dense(x))
        return self.score(x).squeeze(-1)

    def pooled(self, states: States, lens_B: Tensor, prompt_lens_B: Tensor) -> Tensor:
        """(B, H): one hidden state per sequence. Raises ShapeError for the mean over a response without tokens."""
        ends_B = lens_B.cumsum(0)
        if self.pooling == "last":
            return states.read(ends_B - 1, lambda hidden_bH, _: hidden_bH)
        if self.pooling == "first":
            return states.read(ends_B - lens_B, lambda hidden_bH, _: hidden_bH)
        rows_N = torch.repeat_interleave(torch.arange(len(lens_B), device=lens_B.device), lens_B)
        counted_B, index_N = lens_B, torch.arange(len(rows_N), device=lens_B.device)
        if self.pooling == "response_mean":
            kept_N = index_N - (ends_B - lens_B)[rows_N] >= prompt_lens_B[rows_N]
            rows_N, index_N, counted_B = rows_N[kept_N], index_N[kept_N], lens_B - prompt_lens_B
            if bool((counted_B < 1).any()):
                raise ShapeError(
                    f"sequence {int(counted_B.argmin())} has no response to take the mean of",
                    fix="drop empty responses",
                )
        return states.sums(index_N, rows_N, len(lens_B)) / counted_B[:, None]

    def scores(self, tokens: Ragged, prompt_lens_B: Tensor | None = None) -> Tensor:
        """(B,) float32, with gradient where it is recorded; prompt lengths matter to response_mean alone."""
        prompts_B = torch.zeros_like(tokens.lens) if prompt_lens_B is None else prompt_lens_B

        def vectors(index_b: Tensor) -> Tensor:
            part, prompts_b = tokens.select(index_b), prompts_B[index_b]
            states = self.trunk.states(part)
            return self.pooled(states, part.lens.to(states.hidden.device), prompts_b.to(states.hidden.device))

        if self.features is not None:
            return self.scalars(self.features.get(tokens, prompts_B, vectors))
        return self.scalars(vectors(torch.arange(len(tokens), device=tokens.lens.device)))

    def critic_obstacle(self, policy_tokenizer: PreTrainedTokenizerBase | None = None) -> str | None:
        """Why a critic cannot start from this reward model, or None where it can.

        policy_tokenizer: where given, it must have the same vocabulary, since a critic reads the policy's tokens.
        """
        if not self.trunk.causal:
            return "it is an encoder, whose tokens see what comes after them"
        if self.pooling != "last":
            return f"its head was trained on {self.pooling} pooling, a critic's reads single tokens"
        own = self.tokenizer
        if policy_tokenizer is not None and own is not None and own.get_vocab() != policy_tokenizer.get_vocab():
            return "it has another vocabulary than the policy"
        return None

    def plain_trunk(self) -> Trunk:
        """A float32 copy of the trunk, an adapter merged in."""
        return Trunk(
            plain_copy(self.backbone, self.adapted, self.weights("backbone.")), self.trunk.layout, self.trunk.causal
        )

    def copied_head(self) -> dict[str, nn.Linear]:
        """To be trained, also where this model is frozen."""
        return {name: copy.deepcopy(layer).requires_grad_(True) for name, layer in self._layers()}

    def _layers(self) -> Iterable[tuple[str, nn.Linear]]:
        return (("score", self.score),) if self.dense is None else (("score", self.score), ("dense", self.dense))

    def weights(self, prefix: str) -> dict[str, Tensor]:
        """Float32 weights below a prefix, by the names there."""
        every = self.masters.full_precision()
        return {name.removeprefix(prefix): w for name, w in every.items() if name.startswith(prefix)}

    def save_pretrained(self, folder: Path) -> None:
        """A Hugging Face folder: the backbone, the head in the same safetensors (`score.weight`, `score.bias`), and
        `tutelage_head.json`. With LoRA the merged weights, and the adapter alone in `adapter/`."""
        if self.adapted is not None:
            save_adapter(self.adapted, adapter_weights(self, self.masters, BACKBONE), folder / "adapter")
        weights = {name: weight.cpu() for name, weight in self.named_weights()}
        write_folder(self.backbone, weights, self.tokenizer, folder)
        self._write_head_file(folder)

    def named_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name in the saved folder, whole float32 tensor); collective where sharded."""
        weights = named_weights(self, self.masters, adapter_only=adapter_only, tied=True, prefix=BACKBONE)
        return of_all_stages(weights, None if self.sharding is None else self.sharding.stages)

    def save_sharded(self, folder: Path, writers: Writers) -> None:
        """`save_pretrained` by all ranks together, each writing some of the files."""

        def head_file() -> None:
            self._write_head_file(folder)

        write_shards(
            self.backbone, self.masters, self.adapted, self.tokenizer, folder, writers,
            holder=self, prefix=BACKBONE, besides=head_file,
            stages=None if self.sharding is None else self.sharding.stages,
        )  # fmt: skip

    def _write_head_file(self, folder: Path) -> None:
        about = {"format": 1, "kind": self.kind, "pooling": self.pooling, "activation": self.activation}
        (folder / HEAD_FILE).write_text(json.dumps(about, indent=2) + "\n")


def resolve_pooling(pooling: Pooling | Literal["auto"], trunk: Trunk) -> Pooling:
    """auto: last for decoders, mean for encoders."""
    if pooling == "auto":
        return "last" if trunk.causal else "mean"
    return pooling


def fresh_head(kind: Kind, hidden_size: int, pooling: Pooling, seed: int = 0) -> Head:
    """A new head with bias 0; its weights depend on `seed` alone.

    reward: normal with standard deviation 1 / sqrt(H + 1) (Stiennon et al. 2020; arXiv:2403.17031).
    value: normal with standard deviation 0.001.
    """
    generator = torch.Generator().manual_seed(seed)
    std = 1.0 / math.sqrt(hidden_size + 1) if kind == "reward" else VALUE_STD
    return Head(kind, pooling, {"score": _linear(torch.randn(1, hidden_size, generator=generator) * std, None)})


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_() if bias is None else layer.bias.copy_(bias)
    return layer


def saved_head(path: str) -> Head | None:
    """The head of a folder that Tutelage wrote, or of a transformers sequence classifier with one label; else None.

    Raises ModelError for a classifier of several labels or of an unknown form, and for a head file that is broken.
    """
    folder = Path(path).expanduser()
    if (folder / HEAD_FILE).is_file():
        return _own_head(path, read_json(folder / HEAD_FILE))
    config = load_config(path)
    names = getattr(config, "architectures", None) or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return None
    if config.num_labels != 1:
        raise ModelError(
            f"{path} is a classifier of {config.num_labels} labels", fix="give a model with one output (num_labels=1)"
        )
    return _classifier_head(path)


def _own_head(path: str, about: dict[str, Any]) -> Head:
    kind, pooling, activation = about.get("kind"), about.get("pooling"), about.get("activation")
    if kind not in ("reward", "value") or pooling not in POOLINGS or activation not in (None, *ACTIVATIONS):
        raise ModelError(f"{path}/{HEAD_FILE} holds {about}", fix="write the model again with save_pretrained")
    found = _read(path, ("score.weight", "score.bias", "dense.weight", "dense.bias"))
    if "score.weight" not in found or (activation is not None and "dense.weight" not in found):
        raise ModelError(f"{path} has no head weights (score.weight)", fix="write the model again with save_pretrained")
    layers = {"score": _linear(found["score.weight"], found.get("score.bias"))}
    if activation is not None:
        layers["dense"] = _linear(found["dense.weight"], found.get("dense.bias"))
    return Head(kind, pooling, layers, activation)


# score layer, dense layer (None: the score reads the hidden state), activation, pooling
_CLASSIFIERS: tuple[tuple[str, str | None, str | None, Pooling], ...] = (
    ("score", None, None, "last"),
    ("classifier", "bert.pooler.dense", "tanh", "first"),
    ("classifier", "pre_classifier", "relu", "first"),
    ("classifier.out_proj", "classifier.dense", "tanh", "first"),
)


def _classifier_head(path: str) -> Head:
    wanted = [f"{n}.{leaf}" for row in _CLASSIFIERS for n in row[:2] if n for leaf in ("weight", "bias")]
    found = _read(path, wanted)
    for score, dense, activation, pooling in _CLASSIFIERS:
        if f"{score}.weight" in found and (dense is None or f"{dense}.weight" in found):
            layers = {"score": _linear(found[f"{score}.weight"], found.get(f"{score}.bias"))}
            if dense is not None:
                layers["dense"] = _linear(found[f"{dense}.weight"], found.get(f"{dense}.bias"))
            return Head("reward", pooling, layers, activation)
    raise ModelError(
        f"the classification head of {path} has a form that is not known",
        fix="give a decoder classifier (score), or one of the BERT, DistilBERT or RoBERTa kind",
    )


def _read(path: str, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors among `names` that the safetensors files of a folder or hub name hold."""
    found: dict[str, Tensor] = {}
    for file in weight_files(path):
        with safe_open(str(file), framework="pt") as tensors:
            held = set(tensors.keys())
            found |= {name: tensors.get_tensor(name).float() for name in names if name in held}
    return found


def weight_files(path: str) -> list[Path]:
    if is_local(path):
        return sorted(Path(local_path(path)).glob("*.safetensors"))
    from huggingface_hub import snapshot_download

    with loading(path):
        return sorted(Path(snapshot_download(path, allow_patterns=["*.safetensors"])).glob("*.safetensors"))
