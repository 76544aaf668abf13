import pytest
import torch

from coterie.core.client import Reply, TaskInfo, as_reply, task, task_info
from coterie.core.errors import TaskError
from tiny import batch


def test_means_leave_padding_out():
    some = batch([[1.0], [3.0], [99.0]], mask=[True, True, False])
    assert some.mean(torch.tensor([1.0, 3.0, 99.0])).item() == 2.0
    assert some.mean(torch.tensor([1.0, 3.0, torch.nan])).item() == 2.0
    assert some.size.item() == 2


def test_means_honour_sample_weights():
    # (1 * 1 + 3 * 3) / 4 = 2.5
    some = batch([[1.0], [3.0]])._replace(weight=torch.tensor([1.0, 3.0]))
    assert some.mean(torch.tensor([1.0, 3.0])).item() == 2.5


def test_a_mean_over_nothing_is_zero():
    nothing = batch([[1.0]], mask=[False])
    assert nothing.mean(torch.tensor([5.0])).item() == 0.0
    assert nothing.share().tolist() == [0.0]


def test_the_mean_of_an_empty_batch_has_no_gradient():
    nothing = batch([[1.0]], mask=[False])
    slope = torch.func.grad(lambda w: nothing.mean(w * torch.ones(1)))(torch.tensor(1.0))
    assert slope.item() == 0.0


@pytest.mark.parametrize("values", [torch.tensor(1.0), torch.ones(2, 2), torch.ones(3)])
def test_a_mean_of_anything_but_one_value_per_sample_is_refused(values):
    # A loss that averages by itself would count padding.
    with pytest.raises(TaskError, match=r"one value per sample, shape \[2\]"):
        batch([[1.0], [2.0]]).mean(values)


def test_where_narrows_the_mask():
    some = batch([[1.0], [2.0], [3.0]], mask=[True, True, False])
    assert some.where(torch.tensor([False, True, True])).mask.tolist() == [False, True, False]


def test_proportions_sum_to_one_over_real_rows():
    some = batch([[0.0]] * 4, mask=[True, True, True, False])
    share = some.proportions(torch.tensor([0, 2, 2, 1]), 3)
    assert torch.allclose(share, torch.tensor([1 / 3, 0.0, 2 / 3]))


def test_rows_pick_and_mask():
    some = batch([[0.0], [1.0], [2.0]], mask=[True, False, True])
    picked = some.rows(torch.tensor([2, 1, 2]), torch.tensor([True, True, False]))
    assert picked.x.flatten().tolist() == [2.0, 1.0, 2.0]
    assert picked.mask.tolist() == [True, False, False]


def test_a_task_carries_how_it_wants_to_be_run():
    @task
    def plain(client):
        return {}

    @task(stackable=False, phase="cluster")
    def other(client):
        return {}

    assert task_info(plain) == TaskInfo("plain", True, "train", None)
    assert task_info(other) == TaskInfo("other", False, "cluster", None)


def test_a_function_that_is_no_task_is_refused_by_name():
    def update(client):
        return {}

    with pytest.raises(TaskError, match=r"fed.map: .*update is not a task. Put @task above"):
        task_info(update)


def test_a_reply_may_be_empty():
    assert as_reply({}, "M.update").sent == {}
    assert as_reply(Reply({}, keep={"a": torch.ones(1)}), "M.update").keep["a"].item() == 1.0


def test_a_reply_must_be_a_dict_of_tensors():
    with pytest.raises(TaskError, match=r"M.update: a task must return a dict .* Got Tensor"):
        as_reply(torch.ones(1), "M.update")
    with pytest.raises(TaskError, match=r"M.update: .* 'params/n' is int; use torch.tensor"):
        as_reply({"params": {"n": 3}}, "M.update")
    with pytest.raises(TaskError, match=r"'prior' is float"):
        as_reply(Reply({}, keep={"prior": 0.5}), "M.update")
