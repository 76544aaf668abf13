"""Scikit-learn estimators: rows of all clients in one array, the client of each row in `groups`."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie.data import from_function
from coterie.estimator import find_clients
from coterie.fitted import Fitted
from coterie.fitting import fit

Array = NDArray[Any]


class _Federated(BaseEstimator):
    """What both estimators share: fit by `coterie.fit`, one model per group of clients."""

    _task: ClassVar[str]

    def __init__(
        self,
        method: str = "census",
        *,
        n_groups: Any = "auto",
        model: Any = None,
        rounds: int = 30,
        random_state: Any = None,
    ) -> None:
        self.method = method
        self.n_groups = n_groups
        self.model = model
        self.rounds = rounds
        self.random_state = random_state

    def _fit(self, X: Array, y: Array, groups: Any) -> None:
        owner = np.zeros(len(X), dtype=np.int64) if groups is None else np.asarray(groups)
        if owner.shape != (len(X),):
            raise ValueError(f"groups must have one entry per row, {len(X)}. Got {owner.shape}.")
        self.clients_, index = np.unique(owner, return_inverse=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        names = [str(i) for i in range(len(self.clients_))]

        def load(name: str) -> tuple[Array, Array]:
            own = index == int(name)
            return X[own], y[own]

        data = from_function(load, names, test_fraction=0.0, task=self._task)
        # A single client has nobody to be grouped with.
        alone = len(names) == 1
        self.federation_: Fitted = fit(
            data,
            "fedavg" if alone else self.method,
            model=self.model,
            n_groups="auto" if alone else self.n_groups,
            rounds=self.rounds,
            seed=seed,
            compare=False,
            quiet=True,
        )
        self.assignment_ = np.array([row["group"] for row in self.federation_.rows])
        self.n_iter_ = len(self.federation_.rounds)
        self._rows = np.bincount(index)

    def _by_client(self, X: Any, groups: Any, predict: Any) -> Array:
        """Predictions with the models of the clients in `groups`, or the mean over all clients.

        `predict(x, client)` gives an array with a row per row of x.
        """
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64)
        if groups is None:
            share = np.bincount(self.assignment_.clip(min=0), self._rows) / self._rows.sum()
            first = [int((self.assignment_.clip(min=0) == g).argmax()) for g in range(len(share))]
            out: Array = sum(
                part * predict(x, str(client))
                for part, client in zip(share, first, strict=True)
                if part
            )
            return out
        otherwise = "place it: federation_.place(x, y)"
        place = find_clients(self.clients_, groups, len(x), otherwise)
        found = [(place == i, str(i)) for i in np.unique(place)]
        parts = [(mask, predict(x[mask], name)) for mask, name in found]
        out = np.zeros((len(x), *parts[0][1].shape[1:]))
        for mask, values in parts:
            out[mask] = values
        return out


class FederatedClassifier(ClassifierMixin, _Federated):
    """Classifier for rows of several clients: finds groups of clients, one network per group.

    Parameters
    ----------
    method
        Name of a method, see `coterie list`.
    n_groups
        Number of groups, or "auto": found from the data.
    model
        Network as in `coterie.fit`: "linear", "mlp", ... None: chosen from the kind of data.
    rounds
        Number of communication rounds.
    random_state
        Seed, or a NumPy random state.

    Attributes
    ----------
    `classes_`
        The labels.
    `clients_`, `assignment_`
        The clients of `groups`, and the group that each was assigned to.
    `federation_`
        The `Fitted` with everything else: groups, newcomers (`place`), models, `save`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(240, 2)), np.repeat(["a", "b", "c", "d"], 60)
    >>> y = (X[:, 0] > 0) ^ np.isin(site, ["b", "d"])  # two sites code the outcome the other way
    >>> model = FederatedClassifier(rounds=10, random_state=0).fit(X, y, groups=site)
    >>> bool(model.assignment_[0] == model.assignment_[2] != model.assignment_[1])
    True
    >>> bool(model.score(X, y, groups=site) > 0.9)
    True
    """

    _task = "classification"

    def fit(self, X: Any, y: Any, groups: Any = None) -> "FederatedClassifier":
        """Find the groups and train their models.

        Parameters
        ----------
        X, y
            Rows of all clients [n, features] and their labels.
        groups
            Client of each row. None: all rows are of one client.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"There must be at least two classes. Got one class: {self.classes_[0]!r}."
            )
        self._fit(X, codes, groups)
        return self

    def predict_proba(self, X: Any, groups: Any = None) -> Array:
        """Probability of each class; by the client's model if `groups` has the client of each row.

        Without `groups`: the mean over groups, weighted by their rows.
        """
        return self._by_client(X, groups, self._proba)

    def _proba(self, x: Array, client: str) -> Array:
        fitted = self.federation_
        order = [int(name) for name in fitted.card.classes or range(len(self.classes_))]
        out = np.zeros((len(x), len(self.classes_)))
        out[:, order] = fitted.predict_proba(x, client=client)[:, : len(order)]
        return out

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The most probable class of each row."""
        found = self.predict_proba(X, groups)
        return np.asarray(self.classes_[found.argmax(1)])

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Share of rows that are predicted right."""
        right = self.predict(X, groups) == np.asarray(y)
        return float(np.average(right, weights=sample_weight))


class FederatedRegressor(RegressorMixin, _Federated):
    """Regressor for rows of several clients: finds groups of clients, one network per group.

    Parameters and attributes are those of `FederatedClassifier`, without `classes_`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, site = rng.normal(size=(240, 2)), np.repeat(["a", "b", "c", "d"], 60)
    >>> y = X[:, 0] * np.where(np.isin(site, ["b", "d"]), -1, 1)
    >>> model = FederatedRegressor(rounds=15, random_state=0).fit(X, y, groups=site)
    >>> model.score(X, y, groups=site) > 0.9
    True
    """

    _task = "regression"

    def fit(self, X: Any, y: Any, groups: Any = None) -> "FederatedRegressor":
        """Find the groups and train their models; parameters as in `FederatedClassifier.fit`."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(X, np.asarray(y, dtype=np.float64), groups)
        return self

    def predict(self, X: Any, groups: Any = None) -> Array:
        """The predicted number of each row; `groups` as in `FederatedClassifier.predict_proba`."""
        fitted = lambda x, client: np.asarray(  # noqa: E731
            self.federation_.predict(x, client=client), dtype=np.float64
        )
        return self._by_client(X, groups, fitted)

    def score(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None) -> float:
        """Share of the variance that is explained (R squared)."""
        from sklearn.metrics import r2_score

        return float(r2_score(y, self.predict(X, groups), sample_weight=sample_weight))
