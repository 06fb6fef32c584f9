"""What a role holds: bytes of weights, gradients and optimiser moments of its engines, without a copy.

A storage is counted once, however many tensors and roles look at it: under the first role that holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tutelage.engines.engine import ModelEngine

DEPTH = 6
MOST_ENTRIES = 1000
"""Of a container that is searched for engines: a longer one holds data."""


@dataclass(frozen=True)
class Held:
    """Bytes, of this rank.

    weights    of the computing copy, its buffers, and the float32 masters where those are apart.
    gradients  and moments (with the step counters): as they are at this moment.
    shared     what another role was counted with; owners: those roles.
    """

    weights: int = 0
    gradients: int = 0
    moments: int = 0
    shared: int = 0
    owners: tuple[str, ...] = ()


def held_by_roles(roles: Mapping[str, object]) -> dict[str, Held]:
    """Of every role of a process, in their order; roles without an engine hold nothing."""
    seen: dict[tuple[torch.device, int], str] = {}
    return {name: _held(name, engines_of(role), seen) for name, role in roles.items()}


def held_bytes(engine: ModelEngine) -> Held:
    """Of one engine alone."""
    return _held("engine", [engine], {})


def _held(name: str, engines: Sequence[ModelEngine], seen: dict[tuple[torch.device, int], str]) -> Held:
    shared, owners, mine = 0, dict[str, None](), set[tuple[torch.device, int]]()

    def own(tensors: Iterable[Tensor]) -> int:
        """Bytes of the storages that nobody was counted with yet."""
        nonlocal shared
        total = 0
        for storage in (storage for tensor in tensors for storage in storages(tensor)):
            key = (storage.device, storage.data_ptr())
            if key[1] == 0 or storage.nbytes() == 0:  # meta, or let go of
                continue
            owner = seen.setdefault(key, name)
            if key in mine:
                continue
            mine.add(key)
            if owner == name:
                total += storage.nbytes()
            else:
                shared += storage.nbytes()
                owners[owner] = None
        return total

    weights = own(tensor for engine in engines for tensor in _weights(engine))
    gradients = own(t.grad for engine in engines for t in _weights(engine) if t.grad is not None)
    moments = own(tensor for engine in engines for tensor in _moments(engine))
    return Held(weights, gradients, moments, shared, tuple(owners))


def _weights(engine: ModelEngine) -> Iterator[Tensor]:
    module = engine.model.module
    yield from module.parameters()
    yield from module.buffers()
    yield from engine.model.masters.masters.values()


def _moments(engine: ModelEngine) -> Iterator[Tensor]:
    """The state of every optimiser that the engine holds."""
    for optimizer in vars(engine).values():
        if isinstance(optimizer, torch.optim.Optimizer):
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor on this rank; of a tensor made of others (sharded, quantised), theirs."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = (getattr(tensor, name) for name in names)  # a sharded one names its mesh too
        for part in parts:
            if isinstance(part, Tensor):
                yield from storages(part)
        return
    yield tensor.untyped_storage()
    quantised = getattr(tensor, "quant_state", None)  # bitsandbytes keeps its scales beside the weight
    while quantised is not None:
        yield from (v.untyped_storage() for v in vars(quantised).values() if isinstance(v, Tensor))
        quantised = getattr(quantised, "state2", None)


def engines_of(role: object) -> list[ModelEngine]:
    """The engines that a role can reach through its attributes, each once.

    Objects of this package, containers, bound methods and partial functions are looked into, closures are not.
    """
    found: dict[int, ModelEngine] = {}
    visited: set[int] = set()
    todo: list[tuple[Any, int]] = [(value, 0) for value in _attributes(role)]
    while todo:
        value, depth = todo.pop(0)
        if isinstance(value, ModelEngine):
            found[id(value)] = value
        elif depth < DEPTH and id(value) not in visited:
            visited.add(id(value))
            todo += [(inner, depth + 1) for inner in _inside(value)]
    return list(found.values())


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes | Tensor | nn.Module | type):
        return ()
    if isinstance(value, MethodType):
        return (value.__self__,)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, Mapping):
        return tuple(value.values()) if len(value) <= MOST_ENTRIES else ()
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(value) if len(value) <= MOST_ENTRIES else ()
    return _attributes(value) if type(value).__module__.partition(".")[0] == "tutelage" else ()


def _attributes(value: object) -> list[Any]:
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    own = [getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)]
    return [*own, *getattr(value, "__dict__", {}).values()]
