"""Write the page on performance of the documentation from measured figures."""

from pathlib import Path
from typing import Any

from coterie_lab.bench import report
from coterie_lab.bench.variants import WHAT
from coterie_lab.bench.workloads import NAMES

INTRO = """# Performance

<!-- Written by `coterie bench --from FILE --docs THIS`; edit src/coterie_lab/bench/page.py. -->

This page is for you if your simulations take long, or if you want to know how Coterie compares
with a plain loop over the clients and with other packages. A simulation trains many small models.
Coterie trains many clients in one computation instead of one after the other.

## What is fast, and why

- **Small networks gain most.** In a small network, most of the time goes into starting
  operations, not into arithmetic. Coterie starts each operation once for a whole stack of
  clients. See W9 in the table below.
- **Linear layers with many inputs gain from repeated passes.** If clients have fewer rows than
  inputs and pass over them several times, Coterie computes the products between rows once and
  uses them in every step (the *Gram form* of the first layer). See W2 and W4.
- **Networks and losses of your own gain, too.** See `usernet` and W1-custom. If one of your
  layers cannot be stacked, Coterie uses `torch.vmap`; if that fails as well, it trains one client
  at a time and warns.
- **Convolutions gain little.** Their time is arithmetic in both cases. See W3 and W6.

The results equal those of the plain loop up to rounding.
"""
SUMMARY = """\
*Best* compares the faster plain loop with the faster time of Coterie, because a second thread can
slow down a loop of small steps. The two come from different processes, so this figure is less
certain.

- **Round**: one call of `step` of a method in a simulated federation: the training of all
  clients, averaging, and for clustered methods the losses of all models and the clustering. The
  data are in memory, and evaluation is not included. The time of Coterie includes drawing the
  batches; the plain loop receives them ready made.
- **Plain loop**: for each client, copy the model, create an optimiser of `torch.optim`, call
  `zero_grad`, `backward` and `step` for every batch, and add the result to the mean.
- **Speed-up**: the time of the plain loop divided by that of Coterie, both in the same process;
  *x4* means four times as fast. Absolute times vary by up to a half between days. Speed-ups vary
  less, so compare only these, and ignore differences below 15 %.
- Times are medians of {repeats} samples. The models of both are compared before anything is
  timed.
"""
CHOOSE = """## What to choose

The defaults are right for most runs. To change one, for example the number of threads, use
`settings={"threads": 1}` in Python or `--set run.threads=1` on the command line.

- **`engine`**, by default `"stacked"`. `"ray"` divides the clients among processes and pays for
  large simulations, see [](scaling.md). `"loop"` trains one client after the other, for
  debugging. `"wire"` also turns every message into bytes, as in a deployment. Both are slow.
- **`threads`**, by default all cores. Use 1 if you run several simulations at the same time, one
  per core. Together they usually finish sooner than one after the other on all cores, because a
  second thread usually makes a round less than twice as fast.
- **Float type**, by default `float32`. Use `float64` only if you need the digits:
  `model={"name": "mlp", "dtype": "float64"}`. It needs twice the memory, and large matrix products
  take longer.
- **`chunk`** (clients per stack) and **`kernel`** are chosen from the shapes. A smaller `chunk`
  needs less memory and more time.
- **`device`**, by default `"cpu"`. The figures of this page are all for CPUs. Another PyTorch
  device, such as `"cuda"`, was not measured.
"""
COSTS = """## What costs what

- **Comparison.** `compare=True`, the default of `coterie.fit`, trains one model for all and every
  client alone, besides the groups: up to three times the work. `replicates=3` repeats all of it
  three times. Use `compare=False` while you try things out.
- **Rounds, clients, rows, weights.** The time of a round grows in proportion to each of them
  (table below), so a trial with some of the clients shows how long the whole run will take.
  `coterie plan` does this for you, see [](scaling.md).
- **Number of groups.** In IFCA and similar methods, every client evaluates every model in each
  round. One more model costs less than the training, but many of them add up (third line of the
  table).
- **Optimiser.** Adam reads and writes several arrays as large as the weights in every step, which
  SGD does not.
- **Batch size.** Small batches mean many steps. Larger batches, or full batches, are faster per
  epoch.
- **Evaluation and checkpoints** happen in every round. With large test sets or large models, set
  `evaluate_every` and `save_every` to a larger number; 0 means only after the last round.
- **Memory** is that of the libraries, the data, and one stack of clients with its activations.
"""
HOW = """## How it works

Coterie stacks the weights of many clients along a new first axis, so that a layer of all these
clients is one batched product. Updates of plain SGD happen inside the backward pass. How a
network is trained depends on its layers and on shapes, never on measured times, so the same seed
gives the same numbers on the same machine. Before a stacked network is used, three of its steps
are compared with `torch.vmap` of the plain network; if they differ, `torch.vmap` is used. The
choice and its reason are in `plan` in the file `run.json` of the run folder.
"""
AGAIN = """## Measure it yourself

```bash
coterie bench --only W1,W9                  # two workloads, a few minutes
coterie bench --peers --growth --json results/bench.json
coterie bench --from results/bench.json --docs performance.md
coterie bench --explain cnn                 # which layers of a network are stacked
```

A complete run takes about an hour, and the machine should be idle. `--json` also writes a file
`.md` with all variants, the share of the machine's peak speed, the spread, memory and the goals
of the developers. For the figures of this page, that file is `benchmarks/figures/performance.md`.
For a network of your own, use `coterie bench --explain file.py:Net`: layers that are not stacked
are listed with the reason.
"""


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page and its picture."""
    picture = path.with_suffix(".png")
    drawn = report.picture(results, picture)
    path.write_text(page(results, picture.name if drawn else None))


def page(results: dict[str, Any], picture: str | None = None) -> str:
    """The page as Markdown."""
    machine, settings = results["machine"], results["settings"]
    text = (
        f"Machine: {machine['processor']} with {machine['cores']} cores and "
        f"{machine['memory_gb']:.0f} GB, torch {machine['torch']}. Images: {results['data']}."
    )
    if settings["scale"] != 1:
        share = f"{settings['scale']:g}"
        text += f"\n\n**A trial with {share} of the clients; the figures are not comparable.**"
    parts = [INTRO, "## Coterie beside a plain loop", text, summarise(results["workloads"])]
    missing = [name for name in NAMES if name not in results["workloads"]]
    if missing:
        parts.append(f"Not measured in this run: {', '.join(missing)}.")
    parts.append(SUMMARY.format(repeats=settings["repeats"]))
    if picture is not None:
        parts.append(f"![Speed-up over the plain loop by workload and variant]({picture})")
        words = [[f"`{name}`", what] for name, what in WHAT.items()]
        parts.append(report.table(["bar", "meaning"], words))
    if results.get("peers"):
        parts += [
            "## Other packages",
            "FedAvg with the same network, initial model, data and batches, on two processors. "
            "The first round is listed separately, because it includes the start of the workers. "
            "These figures come from different processes and may be off by up to a half.",
            report.peers(results["peers"]),
        ]
    parts += [CHOOSE, COSTS]
    if results.get("growth"):
        parts += [
            "The time of a round when one size grows and all others stay the same. A straight line "
            "is fitted to the times; its intercept is the fixed cost of a round.",
            report.growth(results["growth"]),
        ]
    if results["extras"]:
        parts.append("### Many clients and the server")
        parts += [report.extra(name, found) for name, found in results["extras"].items()]
    return "\n\n".join(part.strip() for part in [*parts, HOW, AGAIN]) + "\n"


def summarise(workloads: dict[str, Any]) -> str:
    """One line per workload: the plain loop and our engine for each number of threads."""
    counts = sorted({found["threads"] for found in workloads.values() if "threads" in found})
    lines: dict[str, list[str]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for key, found in workloads.items():
        name = key.partition("@")[0]
        line = lines.setdefault(name, [name, found.get("title", ""), *["-"] * 3 * len(counts)])
        timed = {n: v for n, v in found.get("variants", {}).items() if "seconds" in v}
        if "ours" not in timed or "plain" not in timed:
            continue
        plain, ours = timed["plain"]["seconds"], timed["ours"]["seconds"]
        at = 2 + 3 * counts.index(found["threads"])
        ratio = f"x{timed['ours']['ratio']:.1f}"
        line[at : at + 3] = [report.seconds(plain), report.seconds(ours), ratio]
        times.setdefault(name, []).append((plain, ours))
    for name, line in lines.items():
        pairs = times.get(name, [])
        best = min(p for p, _ in pairs) / min(o for _, o in pairs) if len(pairs) > 1 else None
        line.append("-" if best is None else f"x{best:.1f}")
    heads = ["workload", "content"]
    for count in counts:
        heads += [f"loop, {_threads(count)}", "Coterie", "speed-up"]
    return report.table([*heads, "best"], list(lines.values()))


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
