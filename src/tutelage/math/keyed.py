"""Keyed randomness: a number depends on what it is for, never on what was drawn before or beside it.

A key is a hash of (seed, step, prompt id, sample, purpose); a draw is a function of (key, counter). So a sample is the
same alone or in a batch, in any order, on any rank and any number of ranks. Integer arithmetic only: the same bits on
every device. Shapes: B keys.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tutelage.errors import ConfigError, ShapeError


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def sample_key(seed: int, step: int, prompt_id: str | int, sample: int, purpose: str) -> int:
    """A key in [0, 2^63): BLAKE2b of the five parts, the same in every process and on every platform.

    Each part is encoded with its type and length, so ("1", 1) and (1, "1"), or "ab" + "c" and "a" + "bc", differ.
    """
    digest = hashlib.blake2b(digest_size=8, person=b"tutelage.key")
    for part in (seed, step, prompt_id, sample, purpose):
        data = part.encode() if isinstance(part, str) else str(int(part)).encode()
        digest.update(b"%s%d:" % (b"s" if isinstance(part, str) else b"i", len(data)) + data)
    return int.from_bytes(digest.digest(), "big") >> 1


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits on the unsigned reading of int64: the sign is not copied in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keyed_bits(keys_B: Tensor, counter: int | Tensor) -> Tensor:
    """Output number `counter` (from 0) of SplitMix64 seeded with the key (Steele, Lea and Flood 2014); int64 (B,).

        z = key + (counter + 1) * 0x9E3779B97F4A7C15 mod 2^64, then two xor-shift-multiply rounds and a last xor-shift

    All 64 bits are random; as int64 the value may be negative. A tensor `counter` (int64) is broadcast against the
    keys. Keys are hashes (`sample_key`): two keys a small multiple of the constant apart would share a stream.
    Raises ShapeError when the keys or the counter are not int64, ConfigError for a negative counter.
    """
    if keys_B.dtype != torch.int64 or (isinstance(counter, Tensor) and counter.dtype != torch.int64):
        raise ShapeError(f"keys are {keys_B.dtype}", fix="pass int64 keys and an int64 counter")
    if isinstance(counter, int) and counter < 0:
        raise ConfigError(f"counter is {counter}", fix="count from 0")
    steps = (counter + 1) * _GAMMA if isinstance(counter, Tensor) else _signed((counter + 1) * _GAMMA)
    z = keys_B + steps
    z = (z ^ _logical_shift(z, 30)) * _MIX_1
    z = (z ^ _logical_shift(z, 27)) * _MIX_2
    return z ^ _logical_shift(z, 31)


def keyed_uniform(keys_B: Tensor, counter: int | Tensor) -> Tensor:
    """float64 in [0, 1), never 1: the upper 53 bits of `keyed_bits` times 2^-53. Shape and errors as there."""
    return _logical_shift(keyed_bits(keys_B, counter), 11).to(torch.float64) * 2.0**-53


def keyed_permutation(n: int, key: int) -> Tensor:
    """A permutation of 0..n-1 (int64, (n,)) that depends on n and key alone: the order of n keyed random words.

    Every order is equally likely up to ties, which have probability below n^2 / 2^65. Raises ConfigError for n < 0.
    """
    if n < 0:
        raise ConfigError(f"cannot permute {n} items", fix="pass a length >= 0")
    words_n = keyed_bits(torch.tensor(_signed(key), dtype=torch.int64), torch.arange(n))
    return torch.sort(words_n, stable=True).indices
