"""A million clients: clustering on the server, a survey, and rounds of a simulation, measured.

    python benchmarks/scale/million.py            # all cases that have no stored line
    python benchmarks/scale/million.py --only kmeans-1000000-10

Every case runs in a process of its own with one thread. Seconds are those of the processor, so
that other work on the machine does not matter; memory is the largest of that process, in MB.
Stopped and started again, it goes on where it was.
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

import torch
from common import alone, peak

from coterie.clustering.hierarchical import choose_k
from coterie.clustering.kmeans import kmeans
from coterie.clustering.labels import centroids
from coterie.clustering.matching import match_clusters
from coterie.core.random import normal, seed_key
from coterie.running.build import build
from coterie.running.loop import start_engine
from coterie.running.survey import survey_clients

SIZES = (10**4, 10**5, 10**6)
CASES = [f"kmeans-{m}-{k}" for m in SIZES for k in (4, 10)]
CASES += [f"count-{m}-10" for m in SIZES]
CASES += [f"survey-{m}-16" for m in SIZES]
CASES += [f"round-{m}-{method}" for m in SIZES for method in ("ifca", "clove", "census")]


def losses(m: int, k: int) -> torch.Tensor:
    """Losses of m clients of k groups on k models; groups overlap a little."""
    group = torch.arange(m) % k
    apart = torch.full((k, k), 2.0).fill_diagonal_(0.7)
    return apart[group] + 0.3 * normal(seed_key(1), (m, k), torch.float32)


def cluster(m: int, k: int) -> dict[str, Any]:
    """CLoVE's lines 11 and 12: k-means, matching, centroids."""
    vectors = losses(m, k)
    data, began = peak(), time.process_time()
    labels, _ = kmeans(vectors.double(), k, 1)
    middle = time.process_time()
    group = match_clusters(vectors, labels)[labels]
    centroids(vectors.double(), group, k)
    ended = time.process_time()
    right = float((group == torch.arange(m) % k).double().mean())
    return {
        "seconds": round(ended - began, 2),
        "kmeans": round(middle - began, 2),
        "memory": peak(),
        "before": data,
        "right": round(right, 4),
    }


def count(m: int, k: int) -> dict[str, Any]:
    """CLoVE's line 10: the number of clusters by Algorithm 2, from 2 to k."""
    vectors = losses(m, k).double()
    data, began = peak(), time.process_time()
    found, _ = choose_k(vectors, k)
    seconds = round(time.process_time() - began, 2)
    return {"seconds": seconds, "memory": peak(), "before": data, "k": found}


def tiny(m: int, method: str = "ifca") -> Any:
    """A run with m clients of five rows of four numbers, two groups, and a linear model."""
    return build(
        {
            "algorithm": {"name": method, "n_groups": 2},
            "model": {"name": "linear"},
            "local": {"learning_rate": 0.05, "batch_size": 5},
            "data": {
                "name": "blobs",
                "n_groups": 2,
                "clients_per_group": m // 2,
                "n": 5,
                "d": 4,
                "n_classes": 2,
                "test": 0,
            },
            "run": {"rounds": 4, "threads": 1},
        }
    )


def survey(m: int, networks: int) -> dict[str, Any]:
    """A survey of all clients: groups among 1,000 of them, the others placed."""
    ready = tiny(m)
    data, began = peak(), time.process_time()
    found = survey_clients(ready.data, ready.algorithm.model, networks=networks)
    seconds = round(time.process_time() - began, 2)
    names = list(ready.data.names)
    truth = dict(zip(names, ready.data.truth.tolist(), strict=True))
    placed = found.assignment
    same = sum(truth[n] == g for n, g in placed.items()) / max(1, len(placed))
    return {
        "seconds": seconds,
        "memory": peak(),
        "before": data,
        "groups": found.n_groups,
        "odd": len(found.odd),
        "networks": found.evidence["networks"],
        "right": round(max(same, 1 - same), 4),
    }


def rounds(m: int, method: str) -> dict[str, Any]:
    """Rounds of a simulation, without evaluations: median seconds, and the part of the clients."""
    began = time.process_time()
    ready = tiny(m, method)
    made, data = time.process_time() - began, peak()
    fed = start_engine(ready.algorithm, ready.data, ready.settings, ready.description)
    spent, old = [0.0], fed.gather

    def gather(*given: Any) -> Any:
        began = time.process_time()
        try:
            return old(*given)
        finally:
            spent[0] += time.process_time() - began

    fed.gather = gather  # type: ignore[method-assign]
    fed.begin(-1)
    state = ready.algorithm.init(fed)
    fed.commit()
    times, clients = [], []
    for number in range(4):
        began, spent[0] = time.process_time(), 0.0
        fed.begin(number)
        state, _ = ready.algorithm.step(fed, state)
        fed.commit()
        times.append(time.process_time() - began)
        clients.append(spent[0])
    return {
        "seconds": round(statistics.median(times[1:]), 2),
        "first": round(times[0], 2),
        "clients": round(statistics.median(clients[1:]), 2),
        "making": round(made, 2),
        "memory": peak(),
        "before": data,
        "bytes": fed.traffic.total() // 4,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=CASES, help="cases to measure")
    parser.add_argument("--case", help="measure this one here, without storing it")
    parser.add_argument("--most", type=int, default=11, help="GB of memory a case may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_DATA, (options.most << 30, options.most << 30))
    if options.case is None:
        for case in options.only:
            alone(__file__, "million", case)
        return
    what, m, how = options.case.split("-")
    if what == "round":
        print(json.dumps(rounds(int(m), how)))
        return
    study = {"kmeans": cluster, "count": count, "survey": survey}[what]
    print(json.dumps(study(int(m), int(how))))


if __name__ == "__main__":
    main()
