"""FedAvg in pfl-research: a cohort of all clients, no evaluation."""

import json
import os
import sys
import time

os.environ["COTERIE_PEER_PROBLEM"], ROUNDS, THREADS = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
)

import torch  # noqa: E402
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics, StringMetricName, Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402
from problem import BATCH, RATE, apart, arrays, network  # noqa: E402

torch.set_num_threads(THREADS)
held = arrays()
m = len(held["x"])


class Wrapped(torch.nn.Module):
    """The network with the loss and metrics the package asks for."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def loss(self, x, y):
        """Mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x, y):
        """None are needed, one is required."""
        return {StringMetricName("loss"): Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when a round has ended."""

    def __init__(self):
        self.times, self.apart = [], None

    def on_train_begin(self, *, model):
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if self.apart is None:
            weights = model.pytorch_model.network.state_dict()
            self.apart = apart({name: leaf.cpu() for name, leaf in weights.items()})
        self.times.append(time.perf_counter())
        return False, Metrics()


def client(i):
    """A client's rows in the order of this workload."""
    order = held["order"][i]
    return PyTorchTensorDataset((held["x"][i][order], held["y"][i][order]), user_id=str(i))


turn = iter(range(10**9))
data = FederatedDataset(client, lambda: next(turn) % m)
wrapped = Wrapped()
model = PyTorchModel(
    wrapped,
    local_optimizer_create=torch.optim.SGD,
    central_optimizer=torch.optim.SGD(wrapped.parameters(), lr=1.0),
)
clock = Clock()
FederatedAveraging().run(
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=10**9,
        train_cohort_size=m,
        val_cohort_size=0,
    ),
    backend=SimulatedBackend(training_data=data, val_data=data),
    model=model,
    model_train_params=NNTrainHyperParams(
        local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE
    ),
    callbacks=[clock],
    send_metrics_to_platform=False,
)
seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
print(json.dumps({"seconds": seconds, "apart": clock.apart}))
