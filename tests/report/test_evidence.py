import pytest

from coterie.core.errors import ConfigError
from coterie.report import evidence

CLEAR = {
    "name": "conditional", "criterion": "noise ratio", "ks": [1, 2, 3, 4],
    "values": [40.0, 9.0, 1.1, 1.0], "chosen": 3, "runner_up": 4, "close": [],
    "threshold": [1.3] * 4, "note": "",
}  # fmt: skip
NONE = {
    **CLEAR, "name": "joint", "values": [9.0, 8.0, 7.5, None], "chosen": None,
    "runner_up": 4, "note": "nothing fits",
}  # fmt: skip


def test_words():
    assert evidence.words([CLEAR, NONE]) == (
        "Number of groups: 3. The noise ratio (conditional) is 1.1 with 3 and 9 with 2. "
        "The next best is 4."
    )
    assert evidence.words([NONE]) == (
        "Number of groups: no number up to 4 fits. The noise ratio (joint) is 7.5 at best; chance "
        "alone reaches 1.3. Nothing fits."
    )
    one = {**NONE, "ks": [1], "values": [9.0], "threshold": [1.3]}
    assert evidence.words([one]) == (
        "Number of groups: one group does not fit. The noise ratio (joint) is 9; chance alone "
        "reaches 1.3."
    )
    bare = {**NONE, "threshold": [], "criterion": "unexplained share"}
    assert "unexplained share (joint) is 7.5 at best. Nothing fits." in evidence.words([bare])
    close = evidence.words([{**CLEAR, "close": [2, 4]}])
    assert "With this number of samples, 3 cannot be told from 2 or 4." in close


def test_table():
    rows = list(evidence.table([CLEAR, NONE]))
    assert rows[2]["conditional noise ratio"] == 1.1
    assert rows[2]["conditional choice"] == "chosen"
    assert rows[3]["conditional choice"] == "runner-up"
    assert rows[3]["joint noise ratio"] is None


def test_picture(tmp_path):
    out = evidence.picture([CLEAR, NONE], tmp_path / "two.png")
    assert out.stat().st_size > 10_000
    one = {**CLEAR, "threshold": [], "criterion": "icl", "values": [50.0, 20.0, 10.0, 11.0]}
    assert evidence.picture([one], tmp_path / "one.png").exists()
    with pytest.raises(ConfigError, match="was given"):
        evidence.picture([], tmp_path / "none.png")
