"""The data that flows: ragged columns, token sequences, rollouts, preference pairs, statistics."""

from tutelage.types.batches import Demonstrations, Pairs, Prompts, Rollout, Scores, Unpaired
from tutelage.types.labelled import Labelled, StepLabels
from tutelage.types.ragged import Ragged, Sequences, flat_index, valid_mask
from tutelage.types.stats import Outputs, Stat, Stats, merge_stats

__all__ = [
    "Demonstrations",
    "Labelled",
    "Outputs",
    "Pairs",
    "Prompts",
    "Ragged",
    "Rollout",
    "Scores",
    "Sequences",
    "Stat",
    "Stats",
    "StepLabels",
    "Unpaired",
    "flat_index",
    "merge_stats",
    "valid_mask",
]
