"""Twelve hospitals with a table each: are there groups, does grouping pay, where do newcomers go?

Every third hospital codes the outcome the other way round, and nobody has said so.
"""

import tempfile
from pathlib import Path

from sklearn.datasets import load_breast_cancer

import coterie

table = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "benign"})
folder = Path(tempfile.mkdtemp()) / "hospitals"
folder.mkdir()
for number in range(12):
    rows = table.iloc[number::13].copy()
    if number % 3 == 0:
        rows["benign"] = 1 - rows["benign"]
    rows.to_csv(folder / f"hospital-{number}.csv", index=False)

data = coterie.from_folder(folder, label="benign")
print(coterie.advise(data))  # before training

fit = coterie.fit(data, rounds=15, seed=1)
print(fit)  # after training: groups, accuracies, the verdict

new = table.iloc[12::13]
spot = fit.place(new.drop(columns="benign"), new["benign"])
print(f"A new hospital: {spot}")
