"""FedProx: FedAvg whose clients stay near the model they were sent. A method in one file.

    coterie check examples/own_method.py

References: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated optimization in heterogeneous
networks, MLSys 2020, arXiv 1812.06127, Algorithm 2.
Departures: none; every client trains for the same number of epochs.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from coterie import Algorithm, LocalSGD, Mean, Model, register, task


class State(NamedTuple):
    params: dict  # what the next round needs


@register("own_fedprox")
@dataclass(frozen=True)
class OwnFedProx(Algorithm):
    """Average models that were trained with a proximal term.

    Parameters
    ----------
    strength
        Weight of the squared distance to the model that was sent.
    """

    bar: ClassVar[float] = 0.4  # one model for two groups that contradict each other
    model: Model
    local: LocalSGD
    strength: float = 0.01

    # server

    def init(self, fed) -> State:
        return State(self.model.init(fed.key("model")))

    def step(self, fed, state):
        mean = Mean("params", around=state.params, weight="n")
        _, reply = fed.map(self.pull, state.params, to=fed.cohort(), reduce=mean)
        return State(reply["params"]), {}

    # client

    @task
    def pull(self, client, params):
        def penalty(new, old):
            return self.strength / 2 * sum((new[name] - old[name]).square().sum() for name in old)

        losses = self.model.losses
        trained = self.local(client, params, losses, penalty=penalty, given=(params,))
        return {"params": trained, "n": client.train.size}

    # use

    def deploy(self, state, ids):
        return state.params


if __name__ == "__main__":
    import coterie
    from coterie.data import digits

    print(coterie.check_algorithm(OwnFedProx, only=["engines_agree", "resume_is_exact"]))
    fit = coterie.fit(digits(n_clients=8, n_groups=2), "own_fedprox", rounds=5, compare=False)
    print(f"accuracy {fit.summary['accuracy']['mean']:.1%}")
