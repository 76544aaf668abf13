"""Stacks of clients: which clients run together, and the kernels that train and probe them.

A kernel plugs into `core` at two points: `core.ops.using` hands it the expensive operations of all
clients at once, and `Mode.network` in `core.layers` lets it run its own form of a network. Every
kernel gives what the reference in `core.ops.Loop` gives, up to rounding.

    kernels       chooses how a training runs
    steps         the steps of a stack, and the ways to take them
    twins         layers that hold the weights of many clients
    first         a first linear layer, held in the space of the samples
    probes        losses of a bank of models
    side_by_side  small convolutional networks of a bank as one wide network
    chunks        how many clients make a stack, and their padded data
    mode          what the layers here must know of the pass they are in
"""
