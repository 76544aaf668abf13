"""Training and probing stacks of clients; every kernel equals the reference up to rounding."""

import functools
import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.core.client import Batch
from coterie.core.model import Model, Network
from coterie.core.ops import Fit, Loop, Losses, convolves, stack_size
from coterie.core.training import LocalSGD
from coterie.core.tree import Params, Tree, leaves, n_rows, named_leaves, row, tree_map
from coterie.engines.stacking.first import Gram, products
from coterie.engines.stacking.probes import Probes
from coterie.engines.stacking.steps import (
    Alone,
    Now,
    Step,
    Twinned,
    Vmapped,
    Work,
    replace_by_nan,
    walk,
)
from coterie.engines.stacking.twins import NoTwin, twin_of

Path = Literal["auto", "gram", "twins", "vmap", "loop"]

GRAM = 64 * 2**20
"""Bytes of products of inputs that may be kept between rounds; if they need more, none is kept."""
REMEMBERED = 100
"""Largest number of choices that a run saves; a loss that is created in every round makes many."""
HEAVY = 50_000
"""With at least this number of weights, the time of convolutions is arithmetic, not calls."""
CROWDED = 1_000_000
"""If the convolutions of a client have more outputs than this in a step, a heavy network trains one
client at a time. Measured by `benchmarks/kernel_rule.py` on one core, with six networks of 50,000
to 1,700,000 weights: below, a stack is as fast or up to 1.6 times faster; above, single clients
are as fast or up to 1.6 times faster."""


@dataclass(frozen=True)
class KernelChoice:
    """How a training runs; a run saves it and resumes with it."""

    path: Path
    stepping: tuple[bool, ...] = ()  # leaves that layers update in the backward pass
    first: tuple[int, ...] = ()  # leaves of a first layer computed in the space of the samples
    blind: bool = False  # only that layer reads the inputs
    why: str = ""


def _choice(**plain: Any) -> KernelChoice:
    """A choice from plain data, where tuples are lists."""
    fixed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
    return KernelChoice(**fixed)


class OneByOne(Exception):
    """A training that is faster, or only possible, one client at a time."""


_REFUSALS = (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError)


class Stacked:
    """All clients of a stack step together.

    Networks whose layers all have a twin run as one network of stacked weights. Before this is used
    for a loss, three steps are compared with `vmap` of the gradient, which works for most losses.
    If neither works, clients are trained one at a time, with a warning.

    Parameters
    ----------
    path
        "auto", or one kernel where it is possible: "gram", "twins", "vmap", "loop".
    choices
        Kernels that an earlier part of the run chose.
    """

    def __init__(self, path: Path = "auto", choices: Mapping[str, Any] | None = None) -> None:
        self.path: Path = path
        self.choices = {name: _choice(**choice) for name, choice in (choices or {}).items()}
        self._loop = Loop()
        self._warned: set[str] = set()
        self._networks: dict[Model, Network] = {}
        self._trusted: dict[Hashable, tuple[KernelChoice, tuple[object, ...]]] = {}
        self._alike: Counter[str] = Counter()
        self._probes = Probes()
        self._products: dict[Hashable, Tensor] = {}
        self._room = GRAM
        self._chunk: tuple[Hashable, Any] = (None, None)

    def keep_share(self, share: float) -> None:
        """Keep a share of the room for values between rounds: for a sample of the clients."""
        self._room = int(share * self._room)

    def serves(self, name: Hashable, x: Any) -> None:
        """Announce the inputs of the next work, so that values that depend on them can be kept."""
        self._chunk = (name, x)
        self._probes.forget()

    def fit(self, fit: Fit, stacked: Tree) -> Tree:
        if stack_size(stacked) == 1 or self.path == "loop":
            return self._loop.fit(fit, stacked)
        try:
            return walk(fit, stacked, self._stepper)
        except OneByOne:
            return self._loop.fit(fit, stacked)
        except (RuntimeError, NotImplementedError) as error:
            trained = self._loop.fit(fit, stacked)  # if this fails, too, its error is clearer
            self._warn(fit.losses, error)
            return trained

    def _stepper(self, fit: Fit, params: Tree, work: Work, first: Now, rate: float) -> Step:
        """The fastest way to compute the steps of this fit."""
        if fit.direction is not None:
            return Vmapped(fit, params)
        signature, holds = _signature(fit, params)
        if signature not in self._trusted:
            name = self._choose_name(fit, params)
            choice = self.choices.get(name) or self._choose(fit, params, work, first, rate)
            self._trusted[signature] = (choice, holds)
            if len(self.choices) < REMEMBERED:
                self.choices[name] = choice
        choice = self._trusted[signature][0]
        if choice.path == "loop":
            raise OneByOne
        if choice.path == "vmap":
            return Vmapped(fit, params)
        if self._pays(choice, work):
            return self._hold_first(fit, params, choice, work, first)
        return Twinned(fit, params, self._network, list(choice.stepping))

    def _choose_name(self, fit: Fit, params: Tree) -> str:
        """A name that is the same in a resumed run; losses with the same name are numbered."""
        name = _name(fit, params)
        self._alike[name] += 1
        return name if self._alike[name] == 1 else f"{name} #{self._alike[name]}"

    def _choose(self, fit: Fit, params: Tree, work: Work, first: Now, rate: float) -> KernelChoice:
        """Compare three steps by twins and by `vmap`; then choose the faster one for the shapes."""
        local = fit.local
        plain = local.optimizer == "sgd" and not local.momentum and not local.weight_decay
        failed = None
        try:
            expected = _take_three_steps(lambda now: Vmapped(fit, params), local, first, rate)
        except _REFUSALS as error:
            failed = error
            expected = _take_three_steps(lambda now: Alone(fit, params), local, first, rate)
        if failed is None and self.path == "vmap":
            return KernelChoice("vmap", why="asked for")
        twinned = Twinned(fit, params, self._network, look=True)
        try:
            twinned(_copy(first), local.start(first.trained), rate)
            twinned.look = False
            if plain and fit.penalty is None:  # the first step showed which layers can do this
                twinned.stepping = twinned.used_once
            end = _take_three_steps(lambda now: twinned, local, first, rate)
            why = "" if _agree(end, expected) else "stacked steps differ from single clients'"
        except (NoTwin, *_REFUSALS) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
        if why and failed is not None:
            self._warn(fit.losses, failed)
            return KernelChoice("loop", why=why)
        if why:
            return KernelChoice("vmap", why=why)
        if self.path == "auto" and _heavy(params) and twinned.convolved > CROWDED:
            return KernelChoice(
                "loop", why="convolutions of large batches: faster one client at a time"
            )
        choice = KernelChoice("twins", tuple(twinned.stepping))
        found = tuple(twinned.first)
        if self.path == "twins" or not found or not all(choice.stepping[i] for i in found):
            return choice
        for blind in (True, False):
            held = replace(choice, first=found, blind=blind)
            make = functools.partial(self._hold_first, fit, params, held, work)
            if _agree(_take_three_steps(make, local, first, rate), expected):
                return held
        return choice

    def _hold_first(
        self, fit: Fit, params: Tree, choice: KernelChoice, work: Work, now: Now
    ) -> Step:
        """Twins with the first layer in the space of the samples."""
        gram, stepping = self._gram(choice, work, now), list(choice.stepping)
        return Twinned(fit, params, self._network, stepping, gram, choice.blind)

    def _pays(self, choice: KernelChoice, work: Work) -> bool:
        """Whether the Gram form is faster: at least two passes, and fewer samples than inputs."""
        if not choice.first:
            return False
        n, d = work.batch.mask.shape[1], work.batch.x[0, 0].numel()
        return self.path == "gram" or (work.passes >= 2 and n < d)

    def _gram(self, choice: KernelChoice, work: Work, now: Now) -> Gram:
        x = work.batch.x.flatten(2)
        trained = [now.trained[i] for i in choice.first]
        weight = next(leaf for leaf in trained if leaf.ndim == 3)
        bias = next((leaf for leaf in trained if leaf.ndim == 2), None)
        return Gram(x, weight, bias, self._kept_products(x), self._probes.start(x, weight, bias))

    def _kept_products(self, x: Tensor) -> Tensor:
        name, served = self._chunk
        known = isinstance(served, Tensor) and served.data_ptr() == x.data_ptr()
        if not known or served.numel() != x.numel():
            return products(x)
        if name not in self._products:
            made = products(x)
            self._room -= made.nbytes
            if self._room < 0:  # a pass over all clients would drop each one before its next use
                self._products.clear()
                return made
            self._products[name] = made
        return self._products[name]

    def _network(self, model: Model) -> Network:
        if model not in self._networks:
            self._networks[model] = twin_of(model)
        return self._networks[model]

    def probe(
        self, losses: Losses, models: Params, batch: Batch, flattens: bool, each: bool = False
    ) -> Tensor:
        if n_rows(models) > 1 or not flattens or self.path == "loop":
            return self._loop.probe(losses, models, batch, flattens, each)
        return self._probes(losses, row(models, 0), batch, each)

    def _warn(self, losses: Losses, error: Exception) -> None:
        owner = getattr(losses, "__self__", None)
        name = str(getattr(owner, "title", getattr(losses, "__qualname__", "the loss")))
        if name in self._warned:
            return
        self._warned.add(name)
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"{name} cannot be stacked, so its clients train one at a time ({reason}).",
            stacklevel=2,
        )

    def describe(self) -> dict[str, Any]:
        """The choices as plain data."""
        return {
            name: {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(choice).items()}
            for name, choice in sorted(self.choices.items())
        }


def _take_three_steps(
    make: Callable[[Now], Step], local: LocalSGD, first: Now, rate: float
) -> list[Tensor]:
    """The parameters after three steps on the first batch."""
    now = _copy(first)
    step, state = make(now), local.start(now.trained)
    if step.blind:
        nan = replace_by_nan(now.batch.x, now.batch.mask.shape)
        now = now._replace(batch=now.batch._replace(x=nan))
    for _ in range(3):
        now = now._replace(fixed=step(now, state, rate))
    step.finish()
    return [*now.trained, *now.fixed]


def _copy(now: Now) -> Now:
    return tree_map(lambda leaf: None if leaf is None else leaf.clone(), now)


def _signature(fit: Fit, params: Tree) -> tuple[Hashable, tuple[object, ...]]:
    """A key for fits that run the same way (code, options, shapes), and the objects in it."""
    codes = [getattr(getattr(f, "__func__", f), "__code__", f) for f in (fit.losses, fit.penalty)]
    cells = getattr(fit.losses, "__closure__", None) or ()
    holds = (getattr(fit.losses, "__self__", None), *(cell.cell_contents for cell in cells))
    return (*codes, tuple(map(id, holds)), fit.local, _shapes(params)), holds


def _shapes(params: Tree) -> tuple[Hashable, ...]:
    return tuple((path, leaf.shape[1:], leaf.dtype) for path, leaf in named_leaves(params))


def _name(fit: Fit, params: Tree) -> str:
    """A name that is the same in another process."""
    owner = getattr(fit.losses, "__self__", None)
    title = getattr(owner, "title", None) or getattr(fit.losses, "__qualname__", "loss")
    options = repr((fit.local, getattr(fit.penalty, "__qualname__", None), _shapes(params)))
    return f"{title} {hashlib.blake2b(options.encode(), digest_size=4).hexdigest()}"


def _heavy(params: Tree) -> bool:
    own = [leaf[0] for leaf in leaves(params)]
    return convolves(own) and sum(leaf.numel() for leaf in own) >= HEAVY


def _agree(ends: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(_close, ends, expected))


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = 1e-9 if a.dtype == torch.float64 else 1e-4
    # Clients that diverge do so in both ways; the choice must not depend on them.
    return a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
