"""Which rows a step trains on: a keyed permutation per epoch and a cursor that is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from tutelage.errors import CheckpointError, DataError
from tutelage.math.keyed import keyed_permutation, sample_key


class EpochSampler:
    """Batches of row indices (int64): each epoch visits every row once, in an order keyed by (seed, epoch).

    The last batch of an epoch is smaller unless `drop_last`; an epoch never shares a batch with the next.
    Iteration goes on from the cursor; `state()` inside the loop counts the batch in hand as done.
    Raises DataError when an epoch would have no batch.
    """

    def __init__(self, n: int, batch_size: int, epochs: int, seed: int, drop_last: bool = False) -> None:
        self.n, self.batch_size, self.epochs, self.seed, self.drop_last = n, batch_size, epochs, seed, drop_last
        self._per_epoch = n // batch_size if drop_last else -(-n // batch_size)
        self._step = 0
        if self._per_epoch < 1 or epochs < 1:
            raise DataError(
                f"{n} rows in batches of {batch_size}{', the last one dropped,' if drop_last else ''} over {epochs} "
                "epochs give no step",
                fix="lower the batch size or give more data",
            )

    @property
    def steps(self) -> int:
        """Batches of all epochs, from the start."""
        return self._per_epoch * self.epochs

    def order(self, epoch: int) -> Tensor:
        """The permutation of the rows in an epoch (from 0)."""
        return keyed_permutation(self.n, sample_key(self.seed, epoch, "rows", 0, "epoch"))

    def __iter__(self) -> Iterator[Tensor]:
        epoch, order = -1, None
        while self._step < self.steps:
            wanted, within = divmod(self._step, self._per_epoch)
            if order is None or wanted != epoch:
                epoch, order = wanted, self.order(wanted)
            self._step += 1
            yield order[within * self.batch_size : (within + 1) * self.batch_size]

    def state(self) -> dict[str, Any]:
        """The cursor, and what it is a cursor of."""
        return {"step": self._step, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.  Raises CheckpointError when it belongs to other data or batches."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the saved data cursor has {name}={state.get(name)}, this run has {name}={value}",
                    fix="resume with the same data, batch size, epochs and seed",
                )
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.steps:
            raise CheckpointError(
                f"the saved data cursor is at step {step} of {self.steps}", fix="resume from another checkpoint"
            )
        self._step = step

    def _identity(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }
