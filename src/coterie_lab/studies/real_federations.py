"""Three federations nobody made the groups of, and one somebody did, as files for the commands.

    python -m coterie_lab.studies.real_federations OUT

writes a folder of client files for each, from the data folder (`COTERIE_DATA`) and scikit-learn:

heart       four hospitals, 920 patients (UCI 45); heart disease or not. "heart-wards": five files
            a hospital
beijing     twelve stations (UCI 501), four hours of each day; is PM2.5 above 75 micrograms per m3?
office      four cameras (Office-Caltech-10), 800 counts of visual words; ten kinds of objects.
            Counts are divided by their sum. "office-cut": 19 clients, columns standardised for each
            camera
breast      nine sites in three groups (scikit-learn's breast cancer): as it is, labels flipped,
            columns reversed; columns standardised before that

What the commands say of them: docs/real-federations.md.
"""

import argparse
import csv
import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.errors import DataError
from coterie_lab.sources import files
from coterie_lab.studies.evidence_cases import nine_sites

HEART = (
    "age", "sex", "chest_pain", "pressure", "cholesterol", "sugar", "ecg", "max_rate",
    "exercise_angina", "st_depression", "st_slope", "vessels", "thal",
)  # fmt: skip
HOSPITALS = {
    "cleveland": "cleveland",
    "hungarian": "hungary",
    "switzerland": "switzerland",
    "va": "long-beach",
}
WEATHER = ("TEMP", "PRES", "DEWP", "RAIN", "wd", "WSPM")
HOURS = (2, 8, 14, 20)
LIMIT = 75.0  # micrograms of PM2.5 per cubic metre
CAMERAS = {"amazon": 6, "caltech10": 7, "dslr": 2, "webcam": 4}  # parts of each


def write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(header)
        table.writerows(rows)


def heart(data: Path, out: Path) -> None:
    """Values as published; 0 cholesterol stays 0, as a hospital would send it."""
    for name, hospital in HOSPITALS.items():
        text = (data / "heart-disease" / f"processed.{name}.data").read_text()
        cells = [line.split(",") for line in text.split()]
        rows = [
            [
                *("" if cell == "?" else cell for cell in line[:13]),
                "yes" if float(line[13]) else "no",
            ]
            for line in cells
        ]
        write(out / "heart" / f"{hospital}.csv", [*HEART, "disease"], rows)
        order = np.random.default_rng(0).permutation(len(rows))
        for ward in range(5):
            part = [rows[i] for i in order[ward::5]]
            write(out / "heart-wards" / f"{hospital}-{ward}.csv", [*HEART, "disease"], part)


def beijing(data: Path, out: Path) -> None:
    for path in sorted((data / "beijing-air").glob("PRSA*.csv.gz")):
        with gzip.open(path, "rt") as file:
            lines = [line for line in csv.DictReader(file) if int(line["hour"]) in HOURS]
        rows = [
            [
                f"{int(line['year'])}-{int(line['month']):02d}-{int(line['day']):02d}",
                line["month"],
                line["hour"],
                *("" if line[name] == "NA" else line[name] for name in WEATHER),
                "polluted" if float(line["PM2.5"]) > LIMIT else "clean",
            ]
            for line in lines
            if line["PM2.5"] != "NA"
        ]
        station = path.name.split("_")[2]
        write(out / "beijing" / f"{station}.csv", ["day", "month", "hour", *WEATHER, "air"], rows)


def office(data: Path, out: Path) -> None:
    from scipy.io import loadmat

    for name, parts in CAMERAS.items():
        content = loadmat(data / "office-caltech" / f"{name}.mat")
        x, y = content["fts"].astype(float), content["labels"].ravel().astype(int) - 1
        x = x / x.sum(1, keepdims=True).clip(min=1)
        (out / "office").mkdir(parents=True, exist_ok=True)
        (out / "office-cut").mkdir(parents=True, exist_ok=True)
        # In units of a thousandth, so that columns have a size to compare.
        np.savez(out / "office" / f"{name}.npz", x=(1000 * x).astype(np.float32), y=y)
        spread = x.std(0)
        z = ((x - x.mean(0)) / np.where(spread > 0, spread, 1)).astype(np.float32)
        order = np.random.default_rng(0).permutation(len(y))
        for part in range(parts):
            rows = order[part::parts]
            np.savez(out / "office-cut" / f"{name}-{part}.npz", x=z[rows], y=y[rows])


def breast(out: Path) -> None:
    from sklearn.datasets import load_breast_cancer

    names = [str(name) for name in load_breast_cancer().feature_names]
    case = nine_sites(np.random.default_rng(1000))
    for site in range(9):
        own = case.client == site
        labels = np.where(case.y[own] == 1, "benign", "malignant")
        rows = [
            [*(f"{value:.6g}" for value in line), label]
            for line, label in zip(case.x[own], labels, strict=True)
        ]
        write(out / "breast" / f"site-{site}.csv", [*names, "tumour"], rows)


def find_data() -> Path:
    """The data folder that has these federations."""
    data = next((folder for folder in files.folders() if (folder / "heart-disease").exists()), None)
    if data is None:
        raise DataError(
            "real_federations: the folders heart-disease, beijing-air and office-caltech must lie "
            "in the data folder. Set COTERIE_DATA to it."
        )
    return data


def main(out: Path) -> None:
    data = find_data()
    heart(data, out)
    beijing(data, out)
    office(data, out)
    breast(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write client files of four federations.")
    parser.add_argument("out", type=Path, help="folder to write to")
    main(parser.parse_args().out)
