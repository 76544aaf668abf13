"""Mosaic as a scikit-learn estimator: fits one mixture to the data of all clients."""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClusterMixin, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, check_is_fitted, validate_data

from coterie.algorithms.mosaic import Mosaic, State, merging, pooling
from coterie.algorithms.mosaic import mixture as mixtures
from coterie.algorithms.mosaic.client import OUTSIDE
from coterie.algorithms.mosaic.mixture import Mixture
from coterie.clustering.ward import Path, cut
from coterie.core.algorithm import play
from coterie.core.client import Client
from coterie.core.errors import CoterieError
from coterie.core.question import Question, question
from coterie.core.tree import Tree
from coterie.data.federated import FederatedData, RowIndex
from coterie.engines.simulation import Simulation

Array = NDArray[Any]


class Step(NamedTuple):
    """One point of the merge path."""

    n_components: int
    criterion: float  # lower is better
    cost: float  # Ward cost of the merge that led here
    joined: tuple[int, int] | None  # components whose groups were merged


class Newcomer(NamedTuple):
    """The components of a new client."""

    components: Array  # [held]  indices of its components
    weights: Array  # [held]
    outside: float  # share of its samples that is far from all components; 0.001 is expected
    fits: bool  # False if `outside` is above OUTSIDE: some of its data are unlike all components


class FederatedGaussianMixture(ClusterMixin, DensityMixin, BaseEstimator):
    """Gaussian mixture of many clients' samples, with an unknown number of components.

    Every client fits a few components to its own samples and shares only their centres, radii,
    counts and variances. Components that belong together are merged and refined. See
    `coterie.algorithms.Mosaic`.

    Parameters
    ----------
    n_components
        Number of components *of each client*: one number for all clients, a sequence or dict with a
        number per client (dict: by client id), or "auto" or "bic": every client chooses its number.
    n_clusters
        Number of components of the whole mixture, if it is known. None: found by `criterion`.
    covariance
        Structure of the components: "tied_full", "tied", "spherical", "diagonal" or "full".
    criterion
        Where to stop merging: "icl", or "bic" for Gaussian groups that lie close together.
    rounds
        Number of rounds in which overlapping components move towards each other. 0: one shot.
    exclusivity
        A component of the mixture may consist of two components of one client for at most this
        share of its clients. None: 0.05, and 1 if clients choose their own number of components.
    feedback
        Number of rounds in which clients receive the components found so far.
    refine
        Number of rounds of EM on the sums of all clients.
    min_count
        Components with fewer expected samples never leave a client; ignored with a single client.
    noise
        Multiplier of the Gaussian noise on the sums of refinement. None: no noise.
    clip
        Bound on the distance of a sample from the mean of all samples. Needed with `noise`.
    random_state
        Seed, or a NumPy random state.

    Attributes
    ----------
    `n_components_`
        Number of components found.
    `means_`, `covariances_`, `weights_`
        The mixture: [k, d]; [k], [k, d] or [k, d, d]; [k] (shares of all samples).
    `labels_`
        Component of each sample, by the weights of its client.
    `clients_`, `client_weights_`
        Ids of the clients; their weights [clients, k], zero for components that a client lacks.
    `path_`, `gap_`, `plausible_`
        List of `Step`, from single components upwards; criterion of the runner-up minus that of the
        chosen number; all numbers that are almost as good.
    `radii_`
        [c] radius of each client's component: half the distance at which an equal component of
        another client is merged with it (with `covariance="tied_full"`, in the units in which
        components are round).
    `component_means_`, `component_counts_`, `component_clients_`, `component_groups_`
        The components that clients sent: centres, counts, clients, and component of the mixture.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> a, b, c = (rng.normal(size=(50, 2)) + 9 * i for i in range(3))
    >>> mixture = FederatedGaussianMixture(n_components=2, random_state=0)
    >>> mixture.fit([np.vstack([a, b]), np.vstack([b, c]), np.vstack([a, c])]).n_components_
    3
    """

    def __init__(
        self,
        n_components: Any = "auto",
        *,
        n_clusters: int | None = None,
        covariance: str = "tied_full",
        criterion: str = "icl",
        rounds: int = 10,
        exclusivity: float | None = None,
        feedback: int = 2,
        refine: int = 10,
        min_count: float = 5.0,
        noise: float | None = None,
        clip: float | None = None,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.n_clusters = n_clusters
        self.covariance = covariance
        self.criterion = criterion
        self.rounds = rounds
        self.exclusivity = exclusivity
        self.feedback = feedback
        self.refine = refine
        self.min_count = min_count
        self.noise = noise
        self.clip = clip
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> "FederatedGaussianMixture":
        """Fit the mixture.

        Parameters
        ----------
        X
            Samples of all clients [n, d] with `groups`, or a list with one array per client. An
            array without `groups` is the data of one client.
        y
            Ignored.
        groups
            Client of each sample; with a list of arrays, the id of each client.
        """
        X, owner = self._pool(X, groups)
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        self.clients_, index = np.unique(owner, return_inverse=True)
        order = np.argsort(index, kind="stable")
        sizes = np.bincount(index)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        try:
            method = self._method()
            data = self._federation(X[order], sizes)
            fed = Simulation(data, seed)
            for state, _ in play(method, fed):  # noqa: B007 - the last one counts
                pass
        except CoterieError as error:
            raise ValueError(str(error)) from error
        self._take(method, fed, state)
        labels = np.empty(len(X), dtype=np.int64)
        labels[order] = self.predict(X[order], groups=self.clients_[index[order]])
        self.labels_ = labels
        return self

    def predict(self, X: Any, groups: Any = None) -> Array:
        """Component of each sample; with `groups`, by the weights of the sample's client."""
        labels: Array = self._joint(X, groups).argmax(1).numpy()
        return labels

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """Posterior probability of each component: [n, k]."""
        shares: Array = self._joint(X, groups).softmax(1).numpy()
        return shares

    def score_samples(self, X: Any, groups: Any = None) -> Array:
        """Log-density of each sample."""
        values: Array = self._joint(X, groups).logsumexp(1).numpy()
        return values

    def score(self, X: Any, y: Any = None, groups: Any = None) -> float:
        """Mean log-density."""
        return float(self.score_samples(X, groups).mean())

    def place(self, X: Any) -> Newcomer:
        """The components of a new client, and the share of its samples far from all components."""
        check_is_fitted(self)
        x = torch.from_numpy(validate_data(self, X, dtype=np.float64, reset=False))
        centres, variance = torch.from_numpy(self.means_), torch.from_numpy(self.covariances_)
        weights = mixtures.fitting_weights(x, centres, variance)
        outside = float(mixtures.outside(x, centres, variance, weights).double().mean())
        held = (weights > 0).nonzero().flatten()
        return Newcomer(held.numpy(), weights[held].numpy(), outside, outside <= OUTSIDE)

    def at(self, n_clusters: int) -> Array:
        """Group of each client's component for another number of components."""
        check_is_fitted(self)
        path = self._ward_path()
        merges = len(self.component_counts_) - n_clusters
        if not 0 <= merges <= len(path.joins):
            low = len(self.component_counts_) - len(path.joins)
            raise ValueError(
                f"n_clusters must be between {low} and {len(self.component_counts_)}, the ends of "
                f"the merge path. Got {n_clusters}."
            )
        return cut(path, len(self.component_counts_), merges)

    # private

    def _pool(self, X: Any, groups: Any) -> tuple[Any, Array]:
        """Return one array and the client of each row."""
        if isinstance(X, list | tuple) and len(X) and np.ndim(X[0]) == 2:
            parts = [check_array(part, dtype=np.float64) for part in X]
            if len({part.shape[1] for part in parts}) > 1:
                raise ValueError(
                    "X: all clients must have the same features. Got "
                    f"{[part.shape[1] for part in parts]} columns."
                )
            if groups is not None and len(groups) != len(parts):
                raise ValueError(
                    f"groups must have one entry per array of X, {len(parts)}. Got {len(groups)}."
                )
            names = np.arange(len(parts)) if groups is None else np.asarray(groups)
            return np.concatenate(parts), np.repeat(names, [len(part) for part in parts])
        n = len(X) if hasattr(X, "__len__") else X.shape[0]
        owner = np.zeros(n, dtype=np.int64) if groups is None else np.asarray(groups)
        if owner.shape != (n,):
            raise ValueError(f"groups must have one entry per sample, {n}. Got {owner.shape}.")
        return X, owner

    def _method(self) -> Mosaic:
        names = {field.name for field in fields(Mosaic)} & set(self.get_params())
        options = {name: getattr(self, name) for name in names}
        if not isinstance(self.n_components, str | int | np.integer):
            options["n_components"] = "facts"
        elif isinstance(self.n_components, np.integer):
            options["n_components"] = int(self.n_components)
        if len(self.clients_) == 1:
            options["min_count"] = 0.0
        return Mosaic(**options)

    def _federation(self, x: Array, sizes: Array) -> FederatedData:
        names = tuple(str(client) for client in self.clients_)
        if len(set(names)) < len(names):
            names = tuple(f"client-{i}" for i in range(len(names)))
        facts = {}
        if not isinstance(self.n_components, str | int | np.integer):
            given = self.n_components
            counts = (
                [given[client] for client in self.clients_]
                if isinstance(given, dict)
                else list(given)
            )
            if len(counts) != len(names):
                raise ValueError(
                    f"n_components must have a number for each of {len(names)} clients. Got "
                    f"{len(counts)} numbers."
                )
            facts = {"n_components": torch.tensor(counts)}
        pool = torch.from_numpy(np.ascontiguousarray(x))
        rows = {"train": RowIndex.blocks(sizes.tolist())}
        y = torch.zeros(len(x))
        return FederatedData(pool, y, rows, names, "reconstruction", 1, client_facts=facts)

    def _take(self, method: Mosaic, fed: Simulation, state: State) -> None:
        self._mosaic = method
        groups, units = state.groups, state.units
        self.n_components_ = len(groups.n)
        self.means_ = pooling.in_data_units(groups.centres, units).numpy()
        self.covariances_ = pooling.covariances(groups.variance, units).numpy()
        self.weights_ = (groups.n / groups.n.sum()).numpy()
        everyone = fed.everyone()
        with fed.aside():
            _, own = fed.map(
                Question(own_weights, method), method.deploy(state, everyone), to=everyone
            )
        self.client_weights_ = own["weights"].numpy()
        real = state.sizes > mixtures.EMPTY
        self.component_clients_ = self.clients_[real.nonzero()[:, 0].numpy()]
        self._component_centres = state.means[real].numpy()
        self.component_means_ = pooling.in_data_units(state.means[real], units).numpy()
        self.component_counts_ = state.sizes[real].numpy()
        self.component_groups_ = state.members[real].numpy()
        self._component_variances = state.variances[real].numpy()
        self._owner = real.nonzero()[:, 0].numpy()
        curve = state.curve.numpy()
        self.gap_ = float(state.gap)
        self.plausible_ = merging.near_best(curve) if len(curve) else [self.n_components_]
        self.path_ = []
        if len(curve):
            joins = [None, *self._ward_path().joins]
            self.path_ = [
                Step(int(k), float(value), float(cost), pair)
                for (k, value, cost), pair in zip(curve, joins, strict=True)
            ]
        self.radii_ = effective_radii(
            self.component_counts_,
            pooling.mean_variance(self.component_counts_, self._component_variances),
            self.means_.shape[1],
            entropy=method.criterion != "bic",
        )

    def _ward_path(self) -> Path:
        """Compute the merge path again, from what clients sent."""
        counts, tolerance = self.component_counts_, self._mosaic.tolerance
        units = merging.whiten(counts, self._component_centres, self._component_variances)
        least = merging.fewest(self._owner, tolerance) if self.n_clusters is None else 1
        rule = self._mosaic.criterion
        return merging.merge_path(counts, *units, self._owner, rule, tolerance, least)[0]

    def _joint(self, X: Any, groups: Any) -> torch.Tensor:
        check_is_fitted(self)
        x = torch.from_numpy(
            np.ascontiguousarray(validate_data(self, X, dtype=np.float64, reset=False))
        )
        density = mixtures.log_joint(
            x,
            Mixture(
                torch.from_numpy(self.means_),
                torch.ones(self.n_components_, dtype=torch.float64),
                torch.from_numpy(self.covariances_),
            ),
        )
        if groups is None:
            return density + torch.from_numpy(self.weights_).log()
        place = find_clients(self.clients_, groups, len(x), "use place")
        return density + torch.from_numpy(self.client_weights_[place]).log()


def find_clients(clients: Array, groups: Any, n: int, otherwise: str) -> Array:
    """Position in `clients`, which are sorted, of the client of each of n rows.

    `otherwise` says what to do with a client that is not there.
    """
    owner = np.asarray(groups)
    owner = np.full(n, owner) if owner.ndim == 0 else owner
    place = np.searchsorted(clients, owner).clip(max=len(clients) - 1)
    if len(owner) != n or not (clients[place] == owner).all():
        raise ValueError(
            "groups must have the client of each row, one of clients_. Got an unknown client or "
            f"another number of entries. For a new client leave groups out, or {otherwise}."
        )
    return place


@question(stackable=False, phase="evaluation", key="weights")
def own_weights(method: Mosaic, client: Client, given: Tree) -> dict[str, torch.Tensor]:
    """A client's weights over the components."""
    return {"weights": method.personalise(client, given)["weights"]}


def effective_radii(n: Array, variance: float, d: int, entropy: bool = True) -> Array:
    """Effective radii: half the distance at which the criterion merges two equal components.

    With one variance, ICL merges A and B if and only if their squared distance is at most
    s2 (1/n_A + 1/n_B) [(d + 1) log N + 2 h]; for equal counts h = 2 n log 2.
    """
    price = (d + 1) * np.log(max(n.sum(), 1.0))
    real = np.maximum(n, 1e-12)
    twice = 4 * real * np.log(2.0) if entropy else 0.0
    return np.where(n > 0, np.sqrt(variance / (2 * real) * (price + twice)), -1.0)
