"""Means by class, and the head they belong to."""

import pytest
import torch
from torch import nn

from coterie.algorithms.prototypes import class_means, head_shape, row_of_class, with_head
from coterie.core import Model
from coterie.core.errors import ConfigError
from coterie.models import MLP
from tiny import batch


def test_the_last_linear_layer_is_the_head_unless_one_is_named():
    model = Model(MLP(4, 3, hidden=(5,)))
    assert with_head(model, "Mine").head == "output"
    assert head_shape(with_head(model, "Mine")) == (3, 5)
    named = Model(MLP(4, 3, hidden=(5,)), head="body.0")
    assert with_head(named, "Mine") is named


@pytest.mark.parametrize(
    "model",
    [
        Model(nn.Linear(2, 2)),
        Model(MLP(4, 1), "squared_error"),
        Model(MLP(4, 3), head="body"),
        Model(MLP(4, 3), head=("body", "output")),
    ],
    ids=["no body", "regression", "not linear", "two heads"],
)
def test_a_model_without_a_linear_head_is_refused(model):
    with pytest.raises(ConfigError, match="Mine: model must be a classifier"):
        with_head(model, "Mine")


def test_means_by_class_leave_padding_out():
    rows = batch(torch.zeros(4, 1), y=torch.tensor([0, 0, 2, 2]), mask=[True, True, True, False])
    values = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 5.0], [torch.nan, 9.0]])
    means, counts = class_means(values, rows, 3)
    assert means.tolist() == [[2.0, 1.0], [0.0, 0.0], [5.0, 5.0]]
    assert counts.tolist() == [2, 0, 1]


def test_rows_of_classes_for_one_client_and_for_several_at_once():
    table = torch.tensor([[1.0], [2.0]])
    label = torch.tensor([1, 0, 1])
    assert row_of_class(table, label).flatten().tolist() == [2.0, 1.0, 2.0]
    both = torch.stack([table, 10 * table])
    found = row_of_class(both, torch.tensor([1, 0, 0, 1]))
    assert found.flatten().tolist() == [2.0, 1.0, 10.0, 20.0]
