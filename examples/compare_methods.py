"""Five methods on the same federation: rotated digits, 20 clients in four hidden groups."""

import coterie
from coterie.data import digits

data = digits(n_clients=20, n_groups=4)
print("method      accuracy   ARI")
for method in ("local_only", "fedavg", "ifca", "clove", "census"):
    known = {"n_groups": 4} if method in ("ifca", "clove") else {}  # census finds the number
    fit = coterie.fit(data, method, rounds=10, compare=False, **known)
    ari = fit.summary.get("ari")
    shown = "" if ari is None else f"{ari:5.2f}"
    print(f"{method:10} {fit.summary['accuracy']['mean']:9.1%} {shown}")
