"""Kill a run with SIGKILL at random moments, resume it, and compare all its files.

    python -m coterie_lab.studies.kill_resume --kills 20 --json kills.json

Each trial starts the same run in a new folder, kills the process at a random moment, and resumes
it. Half of the trials kill the process once or twice more. A trial is equal if `final/`,
`summary.json` and `rounds.jsonl` have the same bytes as in a run without interruption.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = """
[algorithm]
name = "{method}"
{groups}
[model]
name = "mlp"
hidden = [32]
[local]
learning_rate = 0.1
batch_size = 20
[data]
name = "digits"
[run]
rounds = {rounds}
participation = 0.5
threads = 1
"""
START = "import sys; from coterie.cli import main; sys.argv[0] = 'coterie'; main()"


def coterie(*words: str) -> list[str]:
    return [sys.executable, "-c", START, *words]


def begin(file: Path, out: Path) -> list[str]:
    if (out / "run.json").exists():
        return coterie("resume", str(out))
    return coterie("run", str(file), "--out", str(out), "--no-compare")


def content(out: Path) -> dict[str, bytes]:
    files = [*sorted((out / "final").iterdir()), out / "summary.json", out / "rounds.jsonl"]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp())
    methods = {
        "clove": "n_groups = 4",
        "census": "n_groups = 4",
        "ifca": "n_groups = 4",
        "local_only": "",
    }
    whole: dict[str, tuple[dict[str, bytes], float]] = {}
    rows = []
    for trial in range(options.kills):
        method = list(methods)[trial % len(methods)]
        file = folder / f"{method}.toml"
        file.write_text(RUN.format(method=method, groups=methods[method], rounds=options.rounds))
        if method not in whole:
            out = folder / f"{method}-whole"
            began = time.monotonic()
            subprocess.run(begin(file, out), check=True, capture_output=True)
            whole[method] = content(out), time.monotonic() - began
        expected, seconds = whole[method]
        out, moments = folder / f"trial-{trial}", []
        while not moments or (len(moments) < 3 and draw.random() < 0.5):
            moment = draw.uniform(0.0, seconds)
            process = subprocess.Popen(
                begin(file, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                process.wait(moment)
                if not moments:  # the run finished before the kill: start the trial again
                    shutil.rmtree(out)
                continue
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
            lines = out / "rounds.jsonl"
            done = len(lines.read_text().splitlines()) if lines.exists() else 0
            moments.append({"seconds": round(moment, 2), "rounds logged": done})
        subprocess.run(begin(file, out), check=True, capture_output=True)
        found = content(out)
        different = [name for name in expected if found.get(name) != expected[name]]
        rows.append({"method": method, "kills": moments, "different": different})
        print(
            f"trial {trial + 1}: {method}, killed at {moments}: different {different}", flush=True
        )
        shutil.rmtree(out)
    equal = sum(not row["different"] for row in rows)
    print(f"{equal} of {len(rows)} equal to the run without interruption")
    shutil.rmtree(folder)
    if options.json:
        options.json.write_text(json.dumps({"equal": equal, "trials": rows}, indent=1))


if __name__ == "__main__":
    main()
