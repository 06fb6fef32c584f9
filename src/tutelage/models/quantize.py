"""A frozen base in 4-bit NormalFloat under LoRA adapters (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), by
bitsandbytes.

A matrix is cut into blocks of 64 weights.  Of each are kept its largest magnitude a and, for every weight, the number
of the nearest of 16 levels q_0 = -1 .. q_15 = 1, which are quantiles of a normal distribution:

    w ~ a q_i        i = argmin_i |w / a - q_i|

"Double quantisation" keeps a itself as 8 bits: its difference to the mean of all, in blocks of 256 with one float32
each.  So a weight takes 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits.  A forward or backward pass makes the matrix anew
in the compute type, multiplies, and drops it.

What is trained, saved and published is exact for the quantised base: a merged weight is a q_i + B A in float32, and
the reference is the quantised base with the adapter off.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tutelage.errors import MissingExtraError, ModelError, installed

BLOCK = 64
"""Weights with one scale."""
LARGEST_GAP = 0.304
"""Between two levels of NF4, the lowest two; rounding makes half of it."""
SCALE_ERROR = 0.02
"""Of a scale that is 8 bits itself, of the largest scale."""
READ_WEIGHTS = frozenset({"deepseek_v32", "glm_moe_dsa", "axk2", "gemma3n", "gemma3n_text"})
"""Architectures of transformers whose code casts to, or changes, a linear layer's weight: a packed one is bytes."""


def require_bitsandbytes() -> None:
    """Raises MissingExtraError where it is not installed."""
    if not installed("bitsandbytes"):
        raise MissingExtraError(
            "model.quantize is nf4, and bitsandbytes is not installed", fix="pip install 'tutelage[qlora]'"
        )


def quantize(model: PreTrainedModel, dtype: torch.dtype, device: str = "cpu") -> None:
    """Put all linear layers of `model` but its output head on `device` in NF4, in place, one after another.

    dtype   that they compute in.
    Layers that are quantised already stay as they are.  Everything else stays where it is, in its precision.
    Raises MissingExtraError without bitsandbytes, and ModelError for an architecture without plain linear layers, and
    where the library makes another matrix of a packed one than it should.
    """
    require_bitsandbytes()
    why = obstacle(model)
    if why is not None:
        raise ModelError(f"{type(model).__name__} cannot be quantised: {why}", fix="set model.quantize to none")
    names = [name for name, layer in _layers(model) if not is_quantized(layer)]
    for name in names:
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        made = _packed(layer, dtype, device)
        _require_near(name, layer.weight.detach(), made)
        setattr(model.get_submodule(owner), leaf, made)


def obstacle(model: PreTrainedModel) -> str | None:
    """Why an architecture cannot be packed, which shows without its weights too; None where it can."""
    layers = [layer for _, layer in _layers(model) if not is_quantized(layer)]
    strange = sorted({type(layer).__name__ for layer in layers if type(layer) is not nn.Linear})
    if strange:
        return f"its linear layers are of class {', '.join(strange)}"
    kind = model.config.get_text_config().model_type
    if kind in READ_WEIGHTS:
        return f"the code of {kind} reads the weight of a linear layer beside the layer's own product"
    return None if layers or any(is_quantized(m) for m in model.modules()) else "it has no linear layers"


def _layers(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """All linear layers but the output head, by name."""
    head = model.get_output_embeddings()
    return [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]


def _packed(layer: nn.Linear, dtype: torch.dtype, device: str) -> nn.Module:
    nn4 = _library().nn
    made: nn.Module = nn4.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=dtype,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = nn4.Params4bit(
        layer.weight.detach(), requires_grad=False, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    made.weight = weight.to(device)
    made.register_parameter("bias", layer.bias)
    # a processor with AVX512 bfloat16 would lay the base out anew, in place, at the first pass without gradient
    setattr(made, "support_avx512bf16_for_cpu", False)  # noqa: B010 - the module's type is not known here
    return made.train(layer.training)


def _require_near(name: str, weight: Tensor, made: nn.Module) -> None:
    """Raises ModelError unless every weight is within its block's largest distance between two levels of what it was.

    bitsandbytes 0.50 on processors with AVX512 mixes the blocks' scales up where a row is no whole number of blocks.
    """
    packed_weight = made.weight
    assert isinstance(packed_weight, Tensor)
    error = (dense(packed_weight).to(weight) - weight).abs().flatten()
    padding = -len(error) % BLOCK
    error_jB, size_jB = (
        nn.functional.pad(x, (0, padding)).view(-1, BLOCK).amax(1) for x in (error, weight.abs().flatten())
    )
    bad = int((error_jB > LARGEST_GAP * size_jB + SCALE_ERROR * size_jB.max()).sum())
    if bad:
        raise ModelError(
            f"{name} {tuple(weight.shape)} in 4 bits is another matrix in {bad} of {len(error_jB)} blocks of {BLOCK}: "
            "bitsandbytes does not read its blocks as it wrote them on this processor",
            fix="set model.quantize to none, or run on a GPU; rows of a multiple of 64 weights are read right",
        )


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer's weight is packed."""
    return packed(getattr(module, "weight", None))


def packed(weight: object) -> bool:
    return getattr(weight, "quant_state", None) is not None


def dense(weight: Tensor) -> Tensor:
    """A weight as a matrix: a packed one in the precision that it had, another as it is."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return weight
    made: Tensor = _library().functional.dequantize_4bit(weight.data, state)
    return made


def dense_shape(weight: Tensor) -> tuple[int, ...]:
    state = getattr(weight, "quant_state", None)
    return tuple(weight.shape if state is None else state.shape)


def rounded(weight: Tensor) -> Tensor:
    """A matrix after it was packed and made anew."""
    functional = _library().functional
    made, state = functional.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    found: Tensor = functional.dequantize_4bit(made, state)
    return found


def _library() -> ModuleType:
    """Imported at first use: it takes a second, and most runs never need it."""
    import bitsandbytes

    library: ModuleType = bitsandbytes
    return library
