import torch

from coterie.algorithms.survey.seeded import _sum_up
from coterie.core.random import fold, seed_key
from coterie.evidence.screening import screen
from coterie.evidence.summaries import share_rows


def test_a_rare_class_does_not_make_a_client_a_liar():
    # Clients with four rows of one class and 92 of the other. In one of eleven the four fall on
    # four folds, and the shares of the folds are then almost equal, as a repeated number is.
    y = torch.cat([torch.zeros(4), torch.ones(92)]).long()
    rows = share_rows(y, torch.arange(96), torch.ones(96, dtype=torch.bool), 2)
    answers = [_sum_up(rows, fold(seed_key(7), i), 1) for i in range(60)]
    count, mean, scatter = (torch.stack(part) for part in zip(*answers, strict=True))
    even = (mean.std(1) < 0.02).all(2).all(1)
    assert int(even.sum()) >= 2
    variance = scatter.diagonal(dim1=2, dim2=3)
    assert screen(count, mean, variance).why == {}
