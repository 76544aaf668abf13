"""The privacy of noise on sums: zero-concentrated differential privacy of the Gaussian mechanism.

References: Bun, Steinke: Concentrated differential privacy, TCC 2016, arXiv 1605.02065.
"""

import math


def epsilon(noise: float, rounds: int, parts: int = 3, delta: float = 1e-5) -> float:
    """The epsilon of `rounds` rounds, in each of which `parts` sums get Gaussian noise.

    Each part has sensitivity 1 in units of its bound, so rho = parts * rounds / (2 noise**2), and
    epsilon = rho + 2 sqrt(rho log(1 / delta)).

    >>> round(epsilon(noise=10.0, rounds=5), 3)
    1.933
    """
    rho = parts * rounds / (2 * noise**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def noise_for(target: float, rounds: int, parts: int = 3, delta: float = 1e-5) -> float:
    """The multiplier whose `epsilon` is the target.

    >>> round(epsilon(noise_for(2.0, rounds=5), rounds=5), 6)
    2.0
    """
    log = math.log(1 / delta)
    rho = (math.sqrt(log + target) - math.sqrt(log)) ** 2
    return math.sqrt(parts * rounds / (2 * rho))
