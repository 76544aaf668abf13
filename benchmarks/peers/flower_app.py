"""The client: keeps the data of all clients in the worker, trains the one it stands for."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from problem import BATCH, RATE, arrays, network

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch from the weights in the message."""
    torch.set_num_threads(1)  # as many workers as processors
    held, i = arrays(), int(context.node_config["partition-id"])
    x, y = held["x"][i], held["y"][i]
    model = network()
    model.load_state_dict(message.content["weights"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for rows in held["order"][i].split(BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = RecordDict(
        {
            "weights": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
    )
    return Message(content=content, reply_to=message)
