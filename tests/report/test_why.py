import json

import pytest
import torch

from coterie.core.errors import ConfigError
from coterie.report.why import Why, describe


def line(kind, name, here, elsewhere, low, high, **more):
    effects = {"effect": 2.0, "effect_low": 1.0, "effect_high": 3.0}
    figures = {"here": here, "elsewhere": elsewhere, "low": low, "high": high}
    return {"kind": kind, "name": name, **figures, **effects, **more}


CALLED = {"label": "3", "says": "8", "here": 0.9, "elsewhere": 0.02}
MODEL = {"model": "group 0", "called": [CALLED], "more": 2, "inverted": False, "lead": "wrong"}
FOUND = {
    "groups": [
        {
            "set": 0,
            "name": "group 0",
            "odd": False,
            "clients": ["a", "b"],
            "statements": [line("number", "age <i>", 50, 40, 8, 12)],
        },
        {"set": 1, "name": "group 1", "odd": False, "clients": ["c"], "statements": []},
        {
            "set": 2,
            "name": "d",
            "odd": True,
            "clients": ["d"],
            "statements": [line("prediction", "group 0", 0.9, 0.1, 0.6, 0.9, **MODEL)],
        },
    ],
    "sent": [{"part": "columns", "numbers": 6, "text": "means"}],
    "kept": ["labels", "images"],
    "split": "test",
    "compared": 12,
    "notes": ["Something was not compared."],
    "cross": {"labels": ["no", "yes"], "counts": [[[[5, 1], [0, 6]]] * 3] * 2},
}


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (
            line("number", "age", 50, 40, 8, 12),
            "age is higher than elsewhere: 50 on average, 40 elsewhere, 2.0 standard deviations "
            "apart (8 to 12 more)",
        ),
        (
            line("number", "bias", -3, 4, -8, -6),
            "bias is lower than elsewhere: -3 on average, 4 elsewhere, 2.0 standard deviations "
            "apart (6 to 8 less)",
        ),
        (
            line("category", "ward", 0.1, 0.4, -0.4, -0.2, value="a"),
            "ward is a in 10 % of rows, 40 % elsewhere (20 to 40 points less)",
        ),
        (
            line("missing", "ca", 0.99, 0.02, 0.9, 0.98),
            "ca is missing in 99 % of rows, 2 % elsewhere, 50 times as often (90 to 98 points "
            "more)",
        ),
        (
            line("label", "ill", 0.6, 0.2, 0.3, 0.5),
            "the label is ill in 60 % of rows, 20 % elsewhere, 3 times as often (30 to 50 points "
            "more)",
        ),
        (
            line("prediction", "group 0", 0.9, 0.1, 0.6, 0.9, **MODEL),
            "the model of group 0 is wrong on 90 % of rows here and on 10 % of its own (60 to 90 "
            "points more); it mistakes 3 for 8 here (90 % of such rows, 2 % of its own), and 2 "
            "more",
        ),
        (
            line("prediction", "", 0.9, 0.1, 0.6, 0.9, **MODEL | {"inverted": True}),
            "compared with group 0, the labels are inverted: its model is wrong on 90 % of rows "
            "here and on 10 % of its own (60 to 90 points more)",
        ),
        (
            line("prediction", "", 0.9, 0.02, 0.6, 0.9, **MODEL | {"lead": "confusion", "more": 0}),
            "the model of group 0 mistakes 3 for 8 here (90 % of such rows, 2 % of its own) (60 "
            "to 90 points more)",
        ),
        (
            line("error", "cost", 5, 1, 3, 6, model="group 0", bias=-2.5),
            "the model of group 0 errs by 5 (root mean square) here and by 1 on its own rows (here "
            "3 to 6); it predicts 2.5 too low",
        ),
        (
            line("class", "3", 1, 0, 1, 3),
            "rows with the label 3 are unlike those elsewhere: 2.0 standard deviations of a row's "
            "losses (1.0 to 3.0)",
        ),
    ],
)
def test_statements_in_words(one, words):
    assert describe(one) == words


def test_all_of_it_in_words():
    text = str(Why.of(FOUND))
    assert text.startswith("Group 0 (a and b):\n  - age <i> is higher")
    assert "Group 1 (c):\n  no difference beyond chance in what was compared (12 com" in text
    assert "d (odd client):\n  - the model of group 0 is wrong" in text
    assert "12 comparisons on the clients' test rows. All intervals hold together" in text
    assert "Each client sent:\n  - columns: means" in text
    assert "Not asked for: label counts and mean images." in text
    assert text.endswith("Something was not compared.")


def test_notebooks_json_and_tables():
    why = Why.of(json.dumps(FOUND).encode())
    assert repr(why) == "Why(3 groups and odd clients, 2 statements)"
    html = why._repr_html_()
    assert "age &lt;i&gt; is higher" in html
    assert "no difference beyond chance" in html
    assert 'style="white-space: pre-line">Each client sent:\n' in html  # a line for each
    assert len(why.statements) == 2
    plain = json.loads(json.dumps(why.to_json()))
    assert plain["groups"][0]["statements"][0]["text"].startswith("age <i> is higher")
    assert str(Why.of(plain)) == str(why)
    assert why.table(1, 0).to_csv() == "label,says no,says yes\nno,5,1\nyes,0,6\n"
    with pytest.raises(ConfigError, match="clients must count what models say"):
        Why.of({**FOUND, "cross": None}).table(0, 0)


def test_pictures_are_drawn(tmp_path):
    why = Why.of(FOUND)
    images = {"0": torch.rand(2, 1, 4, 4), "2": torch.full((2, 1, 4, 4), torch.nan)}
    small = why.picture(tmp_path / "a.png")
    large = Why(**{**why.__dict__, "images": images}).picture(tmp_path / "b.png")
    assert large.stat().st_size > small.stat().st_size > 5000
    nothing = [{**one, "statements": []} for one in FOUND["groups"]]
    with pytest.raises(ConfigError, match="there must be a difference to draw"):
        Why.of({**FOUND, "groups": nothing}).picture(tmp_path / "c.png")


def test_nothing_asked_and_nothing_to_compare():
    asked = Why.of({**FOUND, "sent": [], "compared": 0})
    assert str(asked).startswith("Clients were asked nothing about what differs")
    one = Why.of({**FOUND, "sent": [], "compared": 0, "groups": FOUND["groups"][:1]})
    assert str(one) == "There is one group and no odd client, so there is nothing to compare."
    assert str(one) in one._repr_html_()
