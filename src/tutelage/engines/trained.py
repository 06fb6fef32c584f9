"""Which weights of a model are trained, where a recipe trains the topmost blocks alone."""

from __future__ import annotations

from tutelage.errors import ModelError
from tutelage.models.forward import Model
from tutelage.models.heads import ScalarModel
from tutelage.models.weights import blocks_of


def below_top(model: Model, train_layers: int) -> list[str]:
    """Names of the parameters outside the topmost `train_layers` blocks and the head. Raises ModelError."""
    backbone = model.trunk.model
    depth = int(backbone.config.num_hidden_layers)
    if train_layers > depth:
        raise ModelError(f"train_layers is {train_layers}, the model has {depth} blocks", fix=f"use 0 to {depth}")
    blocks = blocks_of(backbone)
    trained = {id(p) for block in blocks[depth - train_layers :] for p in block.parameters()}
    if isinstance(model, ScalarModel):
        trained |= {id(p) for name, p in model.named_parameters() if not name.startswith("backbone.")}
    elif (head := model.model.get_output_embeddings()) is not None:
        trained |= {id(p) for p in head.parameters()}
    return [name for name, p in model.module.named_parameters() if id(p) not in trained]
