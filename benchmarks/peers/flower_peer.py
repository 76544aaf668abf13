"""FedAvg in Flower's simulation: one message to every node, then the mean."""

import json
import os
import sys
import time

os.environ["COTERIE_PEER_PROBLEM"], ROUNDS, WORKERS = (
    sys.argv[1],
    int(sys.argv[2]),
    int(sys.argv[3]),
)

from flower_app import app as client_app  # noqa: E402
from flwr.app import ArrayRecord, Message, RecordDict  # noqa: E402
from flwr.serverapp import ServerApp  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402
from problem import apart, arrays, network  # noqa: E402

server_app = ServerApp()
FOUND = {"seconds": []}


@server_app.main()
def main(grid, context):
    """Rounds of federated averaging, timed from the first message to the mean."""
    m = len(arrays()["x"])
    while len(list(grid.get_node_ids())) < m:
        time.sleep(0.1)
    nodes = sorted(grid.get_node_ids())
    weights = network().state_dict()
    for number in range(ROUNDS):
        start = time.perf_counter()
        record = RecordDict({"weights": ArrayRecord(weights)})
        messages = [Message(content=record, dst_node_id=n, message_type="train") for n in nodes]
        replies = list(grid.send_and_receive(messages))
        broken = [reply.error for reply in replies if reply.has_error()]
        if broken:
            raise RuntimeError(f"{len(broken)} clients failed, the first with {broken[0]}")
        total = {name: leaf.double() * 0 for name, leaf in weights.items()}
        for reply in replies:
            for name, leaf in reply.content["weights"].to_torch_state_dict().items():
                total[name] += leaf / len(replies)
        weights = {name: leaf.float() for name, leaf in total.items()}
        FOUND["seconds"].append(time.perf_counter() - start)
        if number == 0:
            FOUND["apart"] = apart(weights)


if __name__ == "__main__":
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(arrays()["x"]),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": WORKERS},
        },
    )
    print(json.dumps(FOUND))
