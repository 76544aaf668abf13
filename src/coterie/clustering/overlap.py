"""Balls around the components of clients: which of them overlap, and the groups they form."""

import numpy as np
from scipy.spatial import cKDTree

from coterie.clustering.arrays import Array, Labels


def overlaps(centres: Array, radii: Array, clients: Labels) -> tuple[Labels, Array]:
    """Pairs of components of different clients whose balls overlap, and distance over summed radii.

    Pairs [p, 2] are sorted by this ratio (ties by index). A negative radius means: no ball.

    >>> centres, radii = np.array([[0.0], [3.0]]), np.array([1.0, 2.0])
    >>> pairs, closeness = overlaps(centres, radii, clients=np.array([0, 1]))
    >>> pairs.tolist(), closeness.tolist()
    ([[0, 1]], [1.0])
    """
    real = np.flatnonzero(radii >= 0)
    none = np.zeros((0, 2), dtype=np.int64), np.zeros(0)
    if len(real) < 2:
        return none
    points, reach = centres[real], radii[real]
    # Slightly more than the exact distance, which is checked afterwards.
    near = cKDTree(points).query_ball_point(points, (reach + reach.max()) * (1 + 1e-9))
    a = real[np.repeat(np.arange(len(points)), [len(found) for found in near])]
    b = real[np.concatenate([np.asarray(found, dtype=np.int64) for found in near])]
    wanted = (a < b) & (clients[a] != clients[b])
    a, b = a[wanted], b[wanted]
    distance = np.linalg.norm(centres[a] - centres[b], axis=1)
    total = radii[a] + radii[b]
    meet = distance <= total
    a, b, distance, total = a[meet], b[meet], distance[meet], total[meet]
    closeness = np.divide(distance, total, out=np.zeros_like(distance), where=total > 0)
    order = np.lexsort((b, a, closeness))
    return np.stack([a, b], 1)[order], closeness[order]


def connect(pairs: Labels, clients: Labels) -> Labels:
    """Join components to groups pair by pair, with no client twice in a group: labels [c].

    >>> connect(np.array([[0, 1], [1, 2]]), clients=np.array([0, 1, 0])).tolist()
    [0, 0, 1]
    """
    parent = list(range(len(clients)))
    holders = [1 << int(client) for client in clients]  # clients of a group, as bits

    def find(a: int) -> int:
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        return a

    for pair in pairs.tolist():
        low, high = sorted(map(find, pair))
        if low != high and not holders[low] & holders[high]:
            parent[high] = low
            holders[low] |= holders[high]
    roots = np.array([find(a) for a in range(len(parent))], dtype=np.int64)
    return np.unique(roots, return_inverse=True)[1].astype(np.int64)
