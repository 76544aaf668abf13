"""Find the group of a new client without Coterie: numpy only. Part of every bundle with a router.

The client's rows are divided at random into four folds, class by class. Their mean losses on
networks that were never trained are compared with those of each group, in units of noise. What the
client differs by must not repeat itself in its folds more than chance allows.
"""

import math
from statistics import NormalDist

import numpy as np

FOLDS = 4


def find_group(losses, y, kept, units=None, level=0.01, refusal=1.5, seed=0):
    """The nearest group, whether the client fits it, and the p-value for each group.

    Parameters
    ----------
    losses
        Loss of each row on each network: [n, networks].
    y
        Class of each row, 0, 1, ...; zeros if there are none: [n].
    kept
        The arrays of router.npz.
    units
        Which rows belong together, such as those of a patient: [n]. None: every row is a unit.
    level
        The p-value below which a score exceeds 1.
    refusal
        The score from which a client is refused.
    """
    units = np.arange(len(losses)) if units is None else np.unique(units, return_inverse=True)[1]
    by_class = kept["losses_mean"].shape[1] > 1
    values = _compare(losses, y if by_class else 0 * y, units, kept, "losses", seed)
    far, p = values
    if "shares_mean" in kept:  # they tell which group is near; a client must fit in both respects
        classes = np.arange(kept["shares_mean"].shape[2])
        rows = (y[:, None] == classes).astype(float)
        far, by_shares = _compare(rows, 0 * y, units, kept, "shares", seed + 1)
        p = np.minimum(2 * np.minimum(p, by_shares), 1)
    place = int(far.argmin())
    near = np.sort(far)
    margin = 1.0
    if len(near) > 1:
        margin = float((near[1] - near[0]) / (near[1] + near[0])) if near[1] + near[0] > 0 else 1.0
    margin = margin if np.isfinite(near[0]) else 0.0
    number = [int(one) for one in kept["number"]]
    score = max(_normal_isf(p[place]) / _normal_isf(level), 0.0)
    return {
        "group": number[place],
        "fits": score <= refusal and number[place] >= 0,
        "score": score,
        "margin": margin,
        "p": {one: float(value) for one, value in zip(number, p, strict=True)},
    }


def _compare(values, label, units, kept, name, seed):
    """How far a client is from each group, and the p-value of "it is of this group"."""
    mean, weight = kept[f"{name}_mean"], kept[f"{name}_weight"]  # [k, c, r] and [k, c]
    values, label, units = _average(values, label, units)
    fold = _folds(label, units, seed)
    count = np.zeros((FOLDS, mean.shape[1]))
    total = np.zeros((*count.shape, mean.shape[2]))
    np.add.at(count, (fold, label), 1)
    np.add.at(total, (fold, label), values)
    own = total / np.maximum(count, 1)[..., None] - kept[f"{name}_centre"]
    x = np.einsum("fcr,crs->fcs", own, kept[f"{name}_root"])  # in units of noise
    rows = count.sum(0)  # [c]
    whole = (count[..., None] * x).sum(0) / np.maximum(rows, 1)[:, None]
    size = rows * weight / np.maximum(rows + weight, 1)
    squares = (size * ((whole - mean) ** 2).sum(2)).sum(1)
    shared = (size > 0).sum(1)
    far = np.where(shared > 0, squares / np.maximum(shared, 1), np.inf)
    p = []
    for k in range(len(mean)):
        z, skew = _deviation(x, count, mean[k], weight[k])
        z = (z - kept[f"{name}_shift"][k]) / kept[f"{name}_spread"][k]
        chance, members = gamma_sf(z, skew), kept[f"{name}_members"][k]
        if members > 1:
            chance = max(chance, student_sf(z / math.sqrt(1 + 1 / members), members - 1))
        p.append(chance)
    return far, np.array(p)


def _average(values, label, units):
    """Rows of a unit that have the same class are one observation, their mean."""
    _, first, place = np.unique(
        np.stack([units, label]), axis=1, return_index=True, return_inverse=True
    )
    place = place.reshape(-1)
    total = np.zeros((len(first), values.shape[1]))
    np.add.at(total, place, values)
    return total / np.bincount(place)[:, None], label[first], units[first]


def _folds(label, units, seed):
    """A fold for each unit, evenly within the class of its first row."""
    _, first, place = np.unique(units, return_index=True, return_inverse=True)
    of_unit = label[first]
    fold = np.zeros(len(first), dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(first))
    for one in np.unique(of_unit):
        members = order[of_unit[order] == one]
        fold[members] = (np.arange(len(members)) + one) % FOLDS
    return fold[place.reshape(-1)]


def _deviation(x, count, mean, weight):
    """How far the client deviates from a group, in standard deviations, and the skewness."""
    root = np.sqrt(np.where(weight > 0, count, 0.0))  # [f, c]
    apart = root[..., None] * (x - mean)
    seen = (apart.sum(0) ** 2).sum() - (apart**2).sum()
    root = root.T
    there = (root > 0).astype(float)
    pairs = there[:, :, None] * there[:, None, :] * (1 - np.eye(FOLDS))
    product = root[:, :, None] * root[:, None, :] / np.maximum(weight, 1)[:, None, None]
    step = pairs @ (np.eye(FOLDS) + product)
    power, moments = step, []
    for _ in range(3):
        moments.append(np.trace(power, axis1=1, axis2=2).sum() * x.shape[-1])
        power = power @ step
    first, second, third = moments
    if second <= 0:
        return 0.0, 0.0
    spread = math.sqrt(2 * second)
    return float((seen - first) / spread), float(8 * third / spread**3)


def _normal_isf(p):
    return -NormalDist().inv_cdf(min(max(float(p), 1e-300), 1 - 1e-16))


def gamma_sf(z, skew):
    """Probability that a standardised gamma variable with this skewness exceeds z."""
    if abs(skew) < 1e-4:
        return 0.5 * math.erfc(z / math.sqrt(2))
    if skew < 0:
        return 1 - gamma_sf(-z, -skew)
    shape = 4 / skew**2
    return _upper_gamma(shape, shape + z * math.sqrt(shape))


def _upper_gamma(a, x):
    """The regularised incomplete gamma function Q(a, x)."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:  # the series of P
        term = total = 1 / a
        n = a
        while abs(term) > 1e-16 * abs(total):
            n += 1
            term *= x / n
            total += term
        return max(1 - scale * total, 0.0)
    return scale * _fraction(lambda i: (-i * (i - a), x + 2 * i + 1 - a), x + 1 - a)


def student_sf(t, free):
    """Probability that a variable with Student's distribution exceeds t."""
    x = free / (free + t * t)
    tail = 0.5 * _beta(free / 2, 0.5, x)
    return tail if t > 0 else 1 - tail


def _beta(a, b, x):
    """The regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    whole = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    scale = math.exp(whole + a * math.log(x) + b * math.log1p(-x)) / a

    def step(i):
        m = i // 2
        if i % 2:
            return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)), 1.0
        return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), 1.0

    return scale * _fraction(step, 1.0)


def _fraction(step, first):
    """1 / (first + a1 / (b1 + a2 / (b2 + ...))), by Lentz's method; `step` gives a and b."""
    tiny = 1e-300
    value = first or tiny
    c, d = value, 0.0
    for i in range(1, 100_000):
        a, b = step(i)
        d = 1 / ((b + a * d) or tiny)
        c = (b + a / c) or tiny
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 / value
