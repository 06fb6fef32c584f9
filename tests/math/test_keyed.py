"""Keyed randomness: published vectors, uniformity, and independence of batch and order."""

from __future__ import annotations

import hashlib
import itertools

import pytest
import torch
from scipy import stats as scipy_stats

from tutelage.errors import ConfigError, ShapeError
from tutelage.math.keyed import keyed_bits, keyed_permutation, keyed_uniform, sample_key

# SplitMix64, seed 1234567: the outputs published with several implementations of the generator
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def splitmix64(seed: int, index: int) -> int:
    """The reference generator in unbounded Python integers, reduced mod 2^64."""
    word = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_published_vectors() -> None:
    ours = keyed_bits(torch.full((5,), 1234567), torch.arange(5))
    assert [x % 2**64 for x in ours.tolist()] == PUBLISHED
    assert [keyed_bits(torch.tensor([1234567]), i).item() % 2**64 for i in range(5)] == PUBLISHED


def test_wrapping_int64_arithmetic_is_the_unsigned_one() -> None:
    keys = [0, 1, 2**62 + 3, 2**63 - 1, 987654321987654321]
    for counter in (0, 1, 7, 10**6, 2**40):
        ours = keyed_bits(torch.tensor(keys), counter).tolist()
        assert [x % 2**64 for x in ours] == [splitmix64(key, counter) for key in keys]


def test_uniform_is_the_upper_53_bits_and_never_one() -> None:
    keys = torch.tensor([sample_key(0, 0, i, 0, "test") for i in range(500)])
    uniform = keyed_uniform(keys, 3)
    assert uniform.dtype == torch.float64
    for key, u in zip(keys.tolist(), uniform.tolist(), strict=True):
        assert u == (splitmix64(key, 3) >> 11) / 2**53
    assert (2**53 - 1) / 2**53 < 1.0


@pytest.mark.parametrize("along", ["keys", "counters"])
def test_draws_are_uniform_and_uncorrelated(along: str) -> None:
    n = 20_000
    if along == "keys":
        keys = torch.tensor([sample_key(1, 2, f"prompt-{i}", 0, "sampling") for i in range(n)])
        u, v = keyed_uniform(keys, 0), keyed_uniform(keys, 1)
    else:
        key = torch.tensor([sample_key(1, 2, "prompt", 0, "sampling")])
        u = keyed_uniform(key, torch.arange(n))
        v = u.roll(1)
    assert scipy_stats.kstest(u.numpy(), "uniform").pvalue > 1e-3
    assert abs(scipy_stats.pearsonr(u.numpy(), v.numpy()).statistic) < 4 / n**0.5
    assert u.min() >= 0.0
    assert u.max() < 1.0


def test_a_draw_does_not_depend_on_its_batch() -> None:
    keys = torch.tensor([sample_key(3, 5, i, 0, "sampling") for i in range(9)])
    counters = torch.arange(9) * 2
    together = keyed_uniform(keys, counters)
    order = torch.tensor([4, 0, 8, 2, 6, 1, 3, 7, 5])
    assert torch.equal(keyed_uniform(keys[order], counters[order]), together[order])
    alone = torch.cat([keyed_uniform(keys[i : i + 1], int(counters[i])) for i in range(9)])
    assert torch.equal(alone, together)


def test_every_part_of_a_key_matters_and_parts_do_not_run_together() -> None:
    prompts: tuple[str | int, ...] = ("a", "ab", "1", 1, "", 11)
    parts = itertools.product((0, 1, 11), (0, 1, 11), prompts, (0, 1, 11), ("b", "", "bb", "1"))
    keys = [sample_key(*part) for part in parts]
    assert len(set(keys)) == len(keys) == 3 * 3 * 6 * 3 * 4
    assert all(0 <= key < 2**63 for key in keys)
    assert sample_key(0, 0, "ab", 0, "c") != sample_key(0, 0, "a", 0, "bc")
    assert sample_key(-1, 0, "a", 0, "c") != sample_key(1, 0, "a", 0, "c")


def test_a_key_is_the_documented_hash_so_it_is_the_same_in_every_process() -> None:
    encoded = b"i1:7" + b"i2:12" + b"s3:p\xc3\xa9" + b"i1:0" + b"s8:sampling"
    digest = hashlib.blake2b(encoded, digest_size=8, person=b"tutelage.key").digest()
    assert sample_key(7, 12, "pé", 0, "sampling") == int.from_bytes(digest, "big") // 2


def test_permutations_are_permutations_and_keyed() -> None:
    for n in (0, 1, 2, 17, 1000):
        assert sorted(keyed_permutation(n, 5).tolist()) == list(range(n))
    assert torch.equal(keyed_permutation(50, 5), keyed_permutation(50, 5))
    assert not torch.equal(keyed_permutation(50, 5), keyed_permutation(50, 6))
    words = [splitmix64(5, i) for i in range(50)]
    signed = [w - 2**64 if w >= 2**63 else w for w in words]
    assert keyed_permutation(50, 5).tolist() == sorted(range(50), key=signed.__getitem__)


def test_every_order_of_four_is_equally_likely() -> None:
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for i in range(4800):
        counts[tuple(keyed_permutation(4, sample_key(0, i, 0, 0, "shuffle")).tolist())] += 1
    assert scipy_stats.chisquare(list(counts.values())).pvalue > 1e-3


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match="int64"):
        keyed_uniform(torch.tensor([1.0]), 0)
    with pytest.raises(ShapeError):
        keyed_uniform(torch.tensor([1]), torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ConfigError, match="counter is -1"):
        keyed_uniform(torch.tensor([1]), -1)
    with pytest.raises(ConfigError):
        keyed_permutation(-1, 5)
