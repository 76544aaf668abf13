"""Results in plain words."""

from coterie.report.words import describe_result


def said(*groups, odd=()):
    """The first sentence about a run with these groups."""
    cards = [{"clients": list(group)} for group in groups]
    cards += [{"clients": [name], "odd": True} for name in odd]
    clients = [name for card in cards for name in card["clients"]]
    summary = {"odd": list(odd)} if odd else {}
    return describe_result(summary, cards, [{"client": c, "fits": c not in odd} for c in clients])


def test_a_group_of_one_each_is_no_group():
    alone = "No groups: each of the 4 clients differs from all others and has a model of its own."
    assert said("a", "b", odd=("c", "d")) == alone
    assert said("a", "b", "c", "d") == alone
    assert said("ab", "c", "d").startswith("3 groups among 4 clients (2, 1 and 1 clients).")


def test_one_client_has_no_groups():
    assert said("a") == "No groups: there is one client."
    assert said("ab") == "No groups: one model for all 2 clients."
