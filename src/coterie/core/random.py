"""Random numbers from keys, without a global state.

A key is a 0-d int64 tensor. `fold` derives a key from a key. Draws hash a counter, so number `i` of
a draw depends only on the key and on `i`, and not on the engine, the padding or the order of
clients. Everything is integer arithmetic that works under `vmap`.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
generators, OOPSLA 2014).
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; the arithmetic shift of int64 would keep the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def seed_key(seed: int) -> Tensor:
    """The root key of a run."""
    return _mix(torch.tensor(_signed(seed * 2 + 1), dtype=torch.int64))


def codes(labels: Sequence[str]) -> Tensor:
    """Labels as integers; `fold` gives the same key for the integer as for the label.

    >>> key = seed_key(0)
    >>> bool(fold(key, codes(["a", "b"]))[1] == fold(key, "b"))
    True
    """
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in labels)
    if not digests:
        return torch.zeros(0, dtype=torch.int64)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64)


def fold(key: Tensor, *labels: int | str | Tensor) -> Tensor:
    """A new key from a key and labels; different labels give unrelated keys.

    >>> key = seed_key(0)
    >>> bool(fold(key, "models") == fold(key, "models")), bool(fold(key, 1) == fold(key, 2))
    (True, False)
    """
    for label in labels:
        if isinstance(label, str):
            digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
            label = int.from_bytes(digest, "little", signed=True)
        if isinstance(label, int):
            label = torch.tensor(_signed(label), dtype=torch.int64, device=key.device)
        key = _mix(key * _MIX_1 + _mix(label * _GOLDEN + 1))
    return key


def initial_key(run_key: Tensor, number: int = 0) -> Tensor:
    """Key of the initial model of this number, for server and clients alike.

    All methods begin with the model of number 0; those with several models have more numbers.
    """
    return fold(run_key, "server", -1, "models", number)


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Hashed counters, over the whole range of int64."""
    counter = torch.arange(1, math.prod(shape) + 1, device=key.device).reshape(shape)
    return _mix(key + counter * _GOLDEN)


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1) on a grid of 2**-24, which is exact in float32 and in float64.

    >>> uniform(seed_key(1), (2,)).shape
    torch.Size([2])
    """
    return _shift(bits(key, shape), 40).to(dtype) * 2.0**-24


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box-Muller)."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(fold(key, 0), shape, torch.float64) + 2.0**-25))
    angle = 2.0 * math.pi * uniform(fold(key, 1), shape, torch.float64)
    return (radius * torch.cos(angle)).to(dtype)


def permutation(key: Tensor, mask: Tensor) -> Tensor:
    """Row numbers in random order, with the rows outside `mask` last.

    Padding does not change the order of the real rows.

    >>> permutation(seed_key(3), torch.tensor([True, True, False]))[-1]
    tensor(2)
    """
    draw = _shift(bits(key, tuple(mask.shape)), 1)
    return torch.where(mask, draw, torch.iinfo(torch.int64).max).argsort(stable=True)


def shuffled(key: Tensor, n: int) -> Tensor:
    """The numbers below n in random order (server side)."""
    return permutation(key, torch.ones(n, dtype=torch.bool, device=key.device))
