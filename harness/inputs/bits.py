"""Numbers from a hash: the same bits on every device and machine.

    element i  =  (2 (b0 + b1 + b2 + b3) - 1019) f x 2^e      bell-shaped, sd 1.85e6 x 2^e
    b0 .. b3   =  the bytes of h = hash32(i, key)             key: seed, operand name, draw
    f          =  4097 to 8191, odd, from 11 more bits of h

An odd integer is never zero, so the non-zeros of a masked matrix are exactly its mask. f fills
fp32's mantissa: without it, products would be exact in TF32, and sums in fp32. The integer has at
most 23 bits and the scale is a power of two, so the only rounding is that to the dtype. All else is
integer arithmetic without state, whose results are the same on all CPUs and GPUs.

An int8 element is that value times 32 (STEPS), rounded away from zero and at most 127 in magnitude,
so that it is never zero either.
"""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sparsebench.formats._format import BITS
from sparsebench.kernels._kernel import STEPS

# lowbias32 by Chris Wellons, https://github.com/skeeto/hash-prospector
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
SHIFTS = (16, 15, 16)

MIX = 0x9E3779B1  # a prime near 2^32 over the golden ratio: f is made of the upper bits of h MIX

UNIT = 2.0**-21
"""The scale that gives a standard deviation of 0.88, and no zero in e4m3: elements are at least
4097 x 2^-21 in magnitude, which rounds to its smallest number, 2^-9."""

INT8 = 127
"""The largest magnitude of an int8 element; -128 would have no opposite."""

CHUNK = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Elements per step, a power of two. On a CPU a buffer (512 KB) fits a core's cache: 2^20 took 1.7
times as long on two cores."""


def fill(out: Tensor, seed: int, name: str, draw: int = 0, scale: float = UNIT) -> None:
    """Overwrite a contiguous tensor with an operand's elements; `scale` is a power of two."""
    flat = out.view(-1)
    for start, h in _hashes(f"{seed}/{name}/{draw}", flat.numel(), flat.device):
        pairs = (h >> 8).bitwise_and_(0x00FF00FF)  # b1 and b3, each with room to add b0 and b2
        pairs += h & 0x00FF00FF
        total = (pairs >> 16).add_(pairs).bitwise_and_(0x7FF)
        factor = (h.mul_(_int32(MIX)) >> 20).bitwise_and_(0xFFF).bitwise_or_(0x1001)
        whole = total.mul_(2).sub_(1019).mul_(factor)
        values = whole.float().mul_(scale)
        if not flat.is_floating_point():
            values = values.mul_(STEPS).add_(values.sign()).clamp_(-INT8, INT8)
        flat[start : start + len(h)].copy_(values)


def scores(seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """Return `count` random integers of 31 bits, the scores by which a pattern chooses."""
    out = torch.empty(count, dtype=torch.int32, device=device)
    for start, h in _hashes(f"{seed}/{name} scores", count, device):
        out[start : start + len(h)] = h.bitwise_and_(0x7FFFFFFF)
    return out


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, dtypes, shapes and bits: a checksum against accidents, not against malice."""
    text = [f"{n} {t.dtype} {list(t.shape)} {_checksum(t)}" for n, t in sorted(tensors.items())]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _hashes(key: str, count: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield starts and the hashes of the indices from there, in one int32 buffer that is reused.

    The second word of the key enters between the multiplications. If the whole key entered at the
    start, two operands would be permutations of the same numbers.
    """
    chunk = min(CHUNK[device.type], 1 << max(count - 1, 0).bit_length())
    index = torch.arange(chunk, dtype=torch.int32, device=device)
    whole, spare = torch.empty_like(index), torch.empty_like(index)
    for start in range(0, count, chunk):
        first, second = _words(key, start)
        size = min(chunk, count - start)
        x, t = whole[:size], spare[:size]
        torch.bitwise_xor(index[:size], _int32(first), out=x)
        _xorshift(x, SHIFTS[0], t)
        x.mul_(_int32(MULTIPLIERS[0])).bitwise_xor_(_int32(second))
        _xorshift(x, SHIFTS[1], t)
        x.mul_(_int32(MULTIPLIERS[1]))
        _xorshift(x, SHIFTS[2], t)
        yield start, x


def _words(key: str, start: int) -> tuple[int, int]:
    """Return two words that combine the key with the start of a chunk.

    A chunk starts at a multiple of its size, so xor adds its start. Each range of 2^32 indices has
    its own key.
    """
    high, low = divmod(start, 2**32)
    words = hashlib.sha256(f"{key}/{high}".encode()).digest()
    return int.from_bytes(words[:4], "little") ^ low, int.from_bytes(words[4:8], "little")


def _xorshift(x: Tensor, by: int, spare: Tensor) -> None:
    """Compute x ^= x >> by, as for unsigned integers."""
    torch.bitwise_right_shift(x, by, out=spare)
    x.bitwise_xor_(spare.bitwise_and_((1 << (32 - by)) - 1))


def _checksum(tensor: Tensor) -> int:
    """Sum bits x hash of the index, modulo 2^64: the order of summation does not matter."""
    bits = tensor.contiguous().view(BITS[tensor.element_size()]).view(-1)
    total = 0
    for start, h in _hashes("digest", bits.numel(), bits.device):
        total += int(h.long().bitwise_or_(1).mul_(bits[start : start + len(h)]).sum())
    return total % 2**64


def _int32(word: int) -> int:
    return (word + 2**31) % 2**32 - 2**31
