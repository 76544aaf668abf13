"""The page about a run: complete, self-contained, safe with any name, for every kind of run."""

import json
import re
import shutil
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.cli import main
from coterie.core.errors import ConfigError
from coterie.report import html
from coterie.report.html import contents_of, read_contents, render
from coterie.report.html.figures import ClientGains, journey_figure
from coterie.report.record import Record

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "a&b;</title>",
    "\u202eevil",
]
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page; it fails on a tag that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.said))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def sites(names: list[str], n: int = 24) -> coterie.FederatedData:
    xs, ys = [], []
    for i in range(len(names)):
        x = np.random.default_rng(i).normal(size=(n, 2))
        xs.append(x)
        ys.append((x[:, i % 2] > 0).astype(int))
    return coterie.from_arrays(xs, ys, names=names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run on clients with hostile names, compared with the other ways."""
    out = tmp_path_factory.mktemp("runs") / "a"
    first = {name: i % 2 for i, name in enumerate(HOSTILE)}
    data = sites(HOSTILE)
    coterie.fit(data, "survey", model="linear", n_groups=2, start=first, rounds=2, out=out)
    return out


def test_a_report_has_every_section_and_nothing_from_outside(folder):
    text = render(read_contents(folder))
    page = Page(text)
    headings = [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings.count("h1") == 1
    assert all(int(b[1]) <= int(a[1]) + 1 for a, b in pairwise(headings))
    for words in (
        "Recommendation",
        "Groups, and why they differ",
        "What each client gains",
        "How the groups formed",
        "Training, round by round",
        "Data",
        "What left the clients",
        "Run it again",
    ):
        assert words in page.text
    anchors = {a["id"] for _, a in page.tags if "id" in a}
    links = [a["href"] for a in page.all("a")]
    assert links
    assert all(link.startswith("#") and link[1:] in anchors for link in links)
    assert not page.all("script") + page.all("link") + page.all("img")
    assert not [a for _, a in page.tags if {"src", "srcset", "xlink:href", "style"} & set(a)]
    assert not [tag for tag, a in page.tags if "href" in a and tag != "a"]
    assert not re.search(r"url\(|@import|https?:", text)
    assert "default-src 'none'" in text
    assert len(text.encode()) < 3_000_000
    assert all(a.get("aria-label") or a.get("aria-hidden") for a in page.all("svg"))


def test_hostile_names_are_text(folder):
    text = render(read_contents(folder))
    page = Page(text)
    assert "<script>alert(1)</script>" in page.text  # as text
    assert not page.all("script") + page.all("img")
    assert not [key for _, a in page.tags for key in a if key.startswith("on")]
    assert "\u202e" not in text
    assert page.text.count("a&b;</title>") >= 3


def test_each_client_has_its_gain_with_an_interval(folder):
    verdict = json.loads((folder / "final" / "verdict.json").read_text())
    page = Page(render(read_contents(folder)))
    for row in verdict["clients"]:
        mean, low, high = row["gains"]["groups"]
        assert mean == pytest.approx(row["one"] - row["groups"])
        assert low <= mean <= high
        assert f"{mean:+.3f}" in page.text
        assert f"{low:+.3f} to {high:+.3f}" in page.text


def test_a_fit_without_a_folder_writes_the_same_page(folder, tmp_path):
    fit = coterie.load(folder)
    fit.report(tmp_path / "report.html")
    ours = Page((tmp_path / "report.html").read_text())
    theirs = Page(render(read_contents(folder)))
    assert len(ours.all("svg")) == len(theirs.all("svg"))
    assert ours.all("path") == theirs.all("path")  # curves of the other ways, too


def test_a_report_is_named_after_the_files_that_were_read(folder, tmp_path):
    fit = coterie.load(folder)
    fit = replace(
        fit, description={**fit.description, "data": {"name": "folder", "path": "a/wards"}}
    )
    assert "<h1>wards</h1>" in fit.report(tmp_path / "report.html").read_text()


def test_the_command_writes_a_report_into_the_run_folder(folder, tmp_path, monkeypatch, capsys):
    shutil.copytree(folder, tmp_path / "a")
    monkeypatch.setattr(sys, "argv", ["coterie", "report", str(tmp_path / "a")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "a" / "report.html").stat().st_size > 10_000


def test_an_unfinished_run_says_what_is_missing(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "a" / "final")
    page = Page(render(read_contents(tmp_path / "a")))
    assert "2 of 2 rounds are done. Missing are the recommendation" in page.text
    assert "How the groups formed" in page.text
    assert "<script>alert(1)</script>" in page.text  # the names of an unfinished run are known
    assert "What each client gains" not in page.text
    for name in ("rounds.jsonl", "timings.jsonl"):
        (tmp_path / "a" / name).unlink()
    shutil.rmtree(tmp_path / "a" / "baselines")
    assert "0 of 2 rounds are done" in Page(render(read_contents(tmp_path / "a"))).text


def test_a_run_that_is_still_being_compared_says_so(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "a")
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    summary.pop("verdict")
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    contents = read_contents(tmp_path / "a")
    final = {name: part for name, part in contents.final.items() if name != "verdict"}
    alone = {"alone": contents.others["alone"][:1]}
    page = Page(render(replace(contents, final=final, others=alone)))
    assert "No recommendation yet" in page.text
    assert "still to be trained (1 of 4 rounds are done)" in page.text
    assert "only methods that train a network" not in page.text


def test_every_picture_has_a_text_and_every_part_a_name(folder):
    page = Page(render(read_contents(folder)))
    pictures = page.all("svg")
    assert len(pictures) > 5
    for picture in pictures:
        told = picture.get("role") == "img" and len(picture.get("aria-label") or "") > 15
        assert told or picture.get("aria-hidden") == "true", picture
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        if tag == "section":
            assert attributes["aria-labelledby"] in ids


def palettes() -> dict[str, dict[str, str]]:
    """The colours of the page by name: light, dark, and printed."""
    style = (Path(html.__file__).parent / "style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 3
    return {
        mode: dict(re.findall(r"--([\w]+): (#[0-9a-f]{3,6})", block))
        for mode, block in zip(("light", "dark", "print"), blocks, strict=True)
    }


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it: 1 to 21."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_contrast_by_hand():
    assert contrast("#000000", "#fff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # WCAG's own example


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
def test_text_and_drawings_stand_out_from_the_paper(mode):
    of = palettes()["light"] | palettes()[mode]
    for ground in ("paper", "card", "warm"):
        for text in ("ink", "soft"):
            assert contrast(of[text], of[ground]) >= 4.5, (text, ground)
    for text in ("accent", "good", "bad", "open"):
        assert contrast(of[text], of["paper"]) >= 4.5, text
    for colour in [f"c{i}" for i in range(8)]:  # lines and areas, WCAG 1.4.11
        assert contrast(of[colour], of["paper"]) >= 3.0, colour


@pytest.mark.parametrize("method", ["fedavg", "local_only", "ditto", "mosaic", "fedsoft", "blend"])
def test_every_kind_of_method_has_a_report(method):
    data = sites(["a", "b", "c", "d"], n=12)
    options = {"n_groups": 2} if method == "fedsoft" else {}
    fit = coterie.fit(data, method, rounds=2, compare=method == "blend", **options)
    page = Page(render(contents_of("x", fit.description, fit.rounds, fit.summary, fit.files)))
    assert "Recommendation" in page.text
    if method == "fedsoft":
        assert "Components in the clients' data" in page.text
    if method in ("fedavg", "mosaic"):
        assert "There is no recommendation" in page.text


def test_the_page_of_ten_thousand_clients_stays_small(folder):
    contents = read_contents(folder)
    verdict = dict(contents.final["verdict"])
    names = [f"site {i}" for i in range(10_000)]
    gains = {"groups": [0.1, None, 0.3], "alone": [0.1, 0.0, 0.3]}
    verdict["clients"] = [
        {**verdict["clients"][0], "client": name, "gains": gains} for name in names
    ]
    rows = [{**contents.clients[0], "client": name} for name in names]
    card = {**contents.groups[0], "clients": names}
    final = {**contents.final, "verdict": verdict, "clients": {"clients": rows}}
    final["groups"] = {"groups": [card, {**card, "group": 1}]}
    text = render(replace(contents, final=final))
    assert len(text.encode()) < 1_000_000
    assert "9700 clients between these are left out" in Page(text).text
    assert "9960 more" in Page(text).text


def test_a_report_must_be_an_html_file(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        coterie.load(folder).report(tmp_path / "report.pdf")


def test_a_report_that_cannot_be_written_says_why(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"folder .*file.nothing could not be made .*Give the"):
        coterie.load(folder).report(tmp_path / "file" / "nothing" / "report.html")


def test_a_run_where_all_clients_differ_names_no_groups_and_each_odd_client_once(folder):
    contents = read_contents(folder)
    names = contents.names
    cards = [{**contents.groups[0], "group": i, "clients": [names[i]]} for i in range(2)]
    cards += [{**contents.groups[0], "odd": 1.0, "clients": [name]} for name in names[2:]]
    rows = [{**row, "fits": row["client"] == names[0]} for row in contents.clients]
    final = contents.final | {"groups": {"groups": cards}, "clients": {"clients": rows}}
    summary = contents.summary | {"odd": names[2:]}
    shown = html.page.describe(replace(contents, final=final, summary=summary))
    assert ("groups", "0") in shown["facts"]
    assert "odd clients" not in dict(shown["facts"])
    assert shown["odd"] == names[2:]
    assert shown["strange"] == [names[1]]


def test_labels_keep_their_order_and_a_provisional_verdict_says_so_once(folder):
    contents = read_contents(folder)
    cards = [{**card, "labels": {"a": 0.2, "b": 0.8}} for card in contents.groups]
    verdict = {**contents.final["verdict"], "falls": {"one": 0.1}}
    final = contents.final | {"groups": {"groups": cards}, "verdict": verdict}
    contents = replace(contents, final=final)
    shown = html.page.describe(contents)
    assert [label[0] for label in shown["groups"][0]["labels"]] == ["a", "b"]
    assert Page(render(contents)).text.count("Provisional: the loss still falls") == 1


def test_a_card_leaves_out_what_all_names_share(folder):
    contents = read_contents(folder)
    names = [f"PRSA_Data_{place}_20130301-20170228" for place in ("Dongsi", "Gucheng")]
    cards = [{**contents.groups[0], "clients": names}]
    final = contents.final | {"groups": {"groups": cards}}
    page = Page(render(replace(contents, final=final, names=names)))
    assert "2 clients: …Dongsi…, …Gucheng…" in page.text


def test_the_journey_names_groups_that_are_left_empty():
    rounds = [{"round": i + 1, "assignment": a} for i, a in enumerate([[0, 1], [2, 2]])]
    drawn = journey_figure(Record(Path("x"), "x", rounds), ["a", "b"], {2: "group 0"})
    assert drawn.count(">group 0<") == 1
    assert drawn.count(">former group<") == 2


def test_the_journey_follows_clients_between_groups():
    rounds = [
        {"round": i + 1, "assignment": groups}
        for i, groups in enumerate([[0, 0, 1, -1], [0, 1, 1, 1], [0, 1, 1, 1]])
    ]
    drawn = journey_figure(Record(Path("x"), "x", rounds), ["a", "b", "c", "d"], {})
    assert "group 0: 1, group 1: 3. 2 of them changed groups" in drawn
    assert len(re.findall('class="flow', drawn)) == 4
    assert "no group" in drawn


def test_a_wide_interval_ends_in_an_arrow():
    gains = [[0.1, 0.0, 0.2]] * 60 + [[5.0, -100.0, 100.0]]
    pictures = ClientGains(gains)
    assert "arrow" not in pictures.draw(gains[0])
    assert pictures.draw(gains[-1]).count("arrow") == 2
    assert pictures.draw([None, None, None]) == ""


def test_the_page_says_why_groups_differ_and_who_was_late(folder):
    contents = read_contents(folder)
    late = {**contents.rounds[-1], "missing": ["<b>late</b>"]}
    late["faults"] = [{"client": "liar", "task": "update", "why": "sent <i>nan</i>"}]
    page = Page(render(replace(contents, rounds=[*contents.rounds[:-1], late])))
    assert "<b>late</b> : 1 round, last in round 2: did not answer in time" in page.text
    assert "liar : 1 round, last in round 2: sent <i>nan</i>" in page.text
    if "why" in contents.final:
        assert "All intervals hold together" in page.text
        assert "To say in what groups differ, each client sent" in page.text
