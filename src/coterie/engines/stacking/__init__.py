"""Stacks of clients: which clients run together, and the kernels that train and probe them.

A kernel plugs into `core` at two points: `core.ops.using` passes it the expensive operations of all
clients at once, and `Mode.network` in `core.layers` lets it run its own form of a network. Every
kernel gives the same results as the reference `core.ops.Loop`, up to rounding.

    kernels       chooses how a training runs
    steps         the training steps of a stack, and the ways to compute them
    twins         layers with the weights of many clients
    first         a first linear layer, computed in the space of the samples
    probes        losses of a bank of models
    side_by_side  small convolutional networks of a bank as one wide network
    chunks        the number of clients in a stack, and their padded data
    mode          what these layers must know about the present pass
"""
