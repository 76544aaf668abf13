"""What a run does about clients that lie: a property of the run, for every method."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from coterie.core.aggregate import Averaging, HeldMean, Mean, RunningMean
from coterie.core.config import check_fields, construct
from coterie.core.errors import ConfigError

Rule = Literal[
    "plain", "clipped", "trimmed", "median", "geometric_median", "krum", "centred_clipping"
]


@dataclass(frozen=True)
class Policy:
    """How replies are averaged and when a client is asked no more.

    Parameters
    ----------
    mean
        How the server averages the replies of each group, for every method.

        "plain"              the weighted mean
        "clipped"            replies farther from the present model than the median are moved closer
        "trimmed"            the mean of each weight, without the largest and the smallest values
        "median"             the median of each weight
        "geometric_median"   a centre of the replies that distant ones hardly move
        "centred_clipping"   the same by clipping, around the result itself
        "krum"               the one reply with the nearest neighbours

        "plain", and "clipped" with a `radius`, keep one sum per group in memory. All others keep
        every reply (the size of a model times the number of clients), and those of one group once
        more while they are combined. All but "trimmed" and "median" also keep a number for each
        pair of members. A group with fewer than three replies gets the plain mean, with a warning.
    liars
        Share of a group's members that may lie: "trimmed" drops this share on each side, and "krum"
        counts that many neighbours less.
    radius
        Length beyond which "clipped" and "centred_clipping" shorten the difference between a reply
        and the model. None: the median length in the group.
    cap
        The largest number of samples that a client counts with. None: no limit in a plain mean,
        twice the median of the group in any other.
    strikes
        After this number of faulty replies a client is asked no more.
    min_group
        A group with fewer clients keeps its model. The result has no model and no figures of such
        groups, nor of single clients.
    tell
        Warn if a group has too few replies for the rule, so that the plain mean is used. Methods
        with a rule of their own do not warn.
    """

    mean: Rule = "plain"
    liars: Annotated[float, Gt(0), Lt(0.5)] = 0.3
    radius: Annotated[float, Gt(0)] | None = None
    cap: Annotated[float, Gt(0)] | None = None
    strikes: Annotated[int, Ge(1)] = 3
    min_group: Annotated[int, Ge(1)] = 1
    tell: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.min_group > 1 and self.mean == "krum":
            raise ConfigError(
                f'policy: min_group={self.min_group} needs a mean. "krum" passes on the model of '
                'one client. Choose "geometric_median", for example.'
            )

    def average(self, mean: Mean, owner: str) -> Averaging:
        """Begin to take a mean; `owner` names the task in messages."""
        if self.mean == "plain":
            return RunningMean(mean, owner, self.cap, None, self.min_group)
        if self.mean == "clipped" and self.radius is not None:
            return RunningMean(mean, owner, self.cap, self.radius, self.min_group)
        held = self.mean, self.liars, self.cap, self.radius, self.min_group, self.tell
        return HeldMean(mean, owner, *held)


def as_policy(given: "Policy | dict[str, Any] | None") -> Policy:
    """A policy as users write it: a mapping of its options.

    >>> as_policy({"mean": "median"}).mean
    'median'
    """
    return given if isinstance(given, Policy) else construct(Policy, dict(given or {}))
