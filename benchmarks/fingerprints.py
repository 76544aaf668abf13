"""Fingerprints: hashes of what every method computes, to see what a change of the code changes.

    python benchmarks/fingerprints.py                    compare with the stored fingerprints
    python benchmarks/fingerprints.py --only census      compare some methods
    python benchmarks/fingerprints.py --store            store what the code computes now

Every registered method runs with its default options and with every other value of every option,
in every engine, on the problem of the contract and on digits. A fingerprint has three parts: what
clients get to predict with (`models`), the server's state (`state`) and what clients remember
(`memory`). The comparison lists each change by name. If the layout of the state changes and the
models stay the same, only `state` is listed.

Hashes are of exact bits and hold for one kind of processor and one version of torch. Store them
before a change, compare after it.
"""

import argparse
import hashlib
import json
import platform
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from coterie import algorithms  # noqa: F401 - lists the methods
from coterie.checks.problem import Problem, tiny
from coterie.core.algorithm import REGISTRY, Algorithm, grow
from coterie.core.errors import CoterieError
from coterie.core.model import Model
from coterie.core.training import LocalSGD
from coterie.core.tree import named_leaves
from coterie.data import digits
from coterie.engines import Simulation
from coterie.models import MLP

STORE = Path(__file__).parent / "figures" / "fingerprints.json"
ENGINES = {
    "loop": {"stack": False},
    "stacked": {"stack": True},
    "wire": {"stack": False, "wire": True},
}
ROUNDS = 4
# Values to try of options that are numbers; options with named values try them all.
TRIED: dict[str, Any] = {
    "stable_after": 2,
    "stable_fraction": 0.5,
    "interval": 1,
    "n_components": 2,
    "local_steps": 2,
    "eta": 0.5,
    "rounds": 2,
    "refine": 1,
    "strength": 1.0,
    "networks": 4,
    "per_centre": 2,
    "fuzziness": 1.5,
}


def digits_problem() -> Problem:
    """Turned digits: twelve clients in three groups, a small network."""
    data = digits(n_clients=12, n_groups=3)
    local = LocalSGD(0.01, batch_size=20, optimizer="adam")
    return Problem(data, Model(lambda: MLP(64, 10, hidden=(16,))), local, 3)


PROBLEMS = {"tiny": tiny, "digits": digits_problem}


def vary(cls: type[Algorithm]) -> Iterator[dict[str, Any]]:
    """Sets of options: the defaults, then every other value of each option in turn."""
    yield {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        kinds = [hints[field.name], *get_args(hints[field.name])]
        named = [v for kind in kinds if get_origin(kind) is Literal for v in get_args(kind)]
        if hints[field.name] is bool:
            named = [True, False]
        elif field.name in TRIED:
            named.append(TRIED[field.name])
        for value in named:
            if field.default is MISSING or value != field.default:
                yield {field.name: value}


def run(method: Algorithm, problem: Problem, engine: str) -> dict[str, str]:
    """The fingerprint after some rounds."""
    fed = Simulation(problem.data, seed=1, **ENGINES[engine])
    fed.begin(-1)
    state = method.init(fed)
    fed.commit()
    for number in range(ROUNDS):
        if method.done(state):
            break
        fed.begin(number)
        state, _ = method.step(fed, grow(state, fed.n_clients))
        fed.commit()
    handed = method.deploy(state, fed.everyone())
    own = {fed.names[i]: tree for i, tree in sorted(fed.memory.committed.items()) if tree}
    return {
        "models": digest(_plain(handed)),
        "state": digest(state),
        "memory": digest(own),
    }


def _plain(given: Any) -> Any:
    """What clients get, as a tree of tensors."""
    if isinstance(given, dict):
        return {name: _plain(part) for name, part in given.items()}
    if hasattr(given, "bank"):  # a row of a bank for each client
        return [given.bank, given.index]
    return getattr(given, "tree", given)  # a part of a tree for each client


def digest(tree: Any) -> str:
    """A short hash of all leaves of a tree, their types and their shapes."""
    found = hashlib.sha256()
    for _, leaf in named_leaves({"tree": tree}):
        found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        found.update(leaf.detach().contiguous().cpu().numpy().tobytes())
    return found.hexdigest()[:10]


def measure(only: list[str] | None, quick: bool) -> dict[str, dict[str, str]]:
    """Fingerprints by name: method, options, problem, engine."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, str]] = {}
    for name, cls in sorted(REGISTRY.items()):
        if only and name not in only:
            continue
        for options in [{}] if quick else vary(cls):
            words = " ".join(f"{key}={value}" for key, value in options.items())
            for where, make in PROBLEMS.items():
                problem = make()
                try:
                    method = replace(cls.example(problem), **options)
                except CoterieError:
                    continue  # the options do not go together
                for engine in ENGINES:
                    key = " ".join(part for part in (name, words, where, engine) if part)
                    try:
                        found[key] = run(method, problem, engine)
                    except (CoterieError, RuntimeError, ValueError) as error:
                        found[key] = {"error": str(error).splitlines()[0][:100]}
        print(f"{name}: {sum(key.split()[0] == name for key in found)} runs", flush=True)
    return found


def compare(old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]) -> list[str]:
    """A line for every fingerprint that changed, appeared or disappeared."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            lines.append(f"gone     {key}")
        elif key not in old:
            lines.append(f"new      {key}")
        else:
            parts = sorted(old[key].keys() | new[key].keys())
            changed = [part for part in parts if old[key].get(part) != new[key].get(part)]
            if changed:
                lines.append(f"changed  {key}: {', '.join(changed)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="methods to run; default: all")
    parser.add_argument("--quick", action="store_true", help="default options alone")
    parser.add_argument("--store", action="store_true", help="store, instead of comparing")
    parser.add_argument("--file", type=Path, default=STORE, help="where fingerprints are stored")
    options = parser.parse_args()
    found = measure(options.only, options.quick)
    machine = {"torch": torch.__version__, "processor": platform.machine()}
    if options.store:
        text = json.dumps({"machine": machine, "runs": found}, indent=0, sort_keys=True)
        options.file.write_text(text + "\n")
        print(f"{len(found)} fingerprints stored in {options.file}.")
        return
    stored = json.loads(options.file.read_text())
    if stored["machine"] != machine:
        print(f"Stored on {stored['machine']}, compared on {machine}: last bits may differ.")
    old = {key: value for key, value in stored["runs"].items() if key in found or not options.quick}
    if options.only:
        old = {key: value for key, value in old.items() if key.split()[0] in options.only}
    lines = compare(old, found)
    print("\n".join(lines))
    same = len(found) - sum(not line.startswith("gone") for line in lines)
    print(f"{same} of {len(found)} fingerprints are unchanged.")


if __name__ == "__main__":
    main()
