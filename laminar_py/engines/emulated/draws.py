"""Random numbers of emulated engines and environments, of a seed or a name alone. Pure."""

from hashlib import blake2b
from statistics import NormalDist

_WORD = (1 << 64) - 1
_NORMAL = NormalDist()


def bits_of(name: str) -> int:
    """64 bits from a name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def splitmix(value: int) -> int:
    """64 bits from an integer: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def uniform(bits: int) -> float:
    """A number between 0 and 1, neither of them, from 64 random bits."""
    return ((bits >> 11) + 0.5) * 2.0**-53


def normal(bits: int) -> float:
    """A standard normal variate from 64 random bits."""
    return _NORMAL.inv_cdf(uniform(bits))
