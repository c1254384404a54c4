"""Several distillations side by side, and their results in one table.

    python scripts/sweep.py SWEEP.yaml --out FOLDER [--jobs 4] [--set teacher=DIR --set data=DIR]

SWEEP.yaml names runs by their arguments to `sorbet distill`; {teacher}, {data} and {out} are filled in:

    common: --teacher {teacher} --data {data} --bf16 --compile --quiet
    runs:
      sst2: --task sst2
      sst2-one-group: --task sst2 --from {out}/sst2 --set student.norm_groups=1     # waits for the run that it names

Each run's log is FOLDER/NAME.log; results.csv has a row for each run, step, split and figure. A run that fails is
reported and leaves the others alone.
"""

import argparse
import csv
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

COLUMNS = ("run", "task", "seed", "step", "split", "metric", "value", "teacher", "versions", "command")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--only", help="a regular expression on the names of runs")
    args = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in args.set) | {"out": str(args.out)}
    sweep = yaml.safe_load(args.sweep.read_text(encoding="utf-8"))
    commands = {
        name: f"{sweep.get('common', '')} {arguments or ''} --out {{out}}/{name}".format(**names)
        for name, arguments in sweep["runs"].items()
        if not args.only or re.search(args.only, name)
    }
    args.out.mkdir(parents=True, exist_ok=True)
    status = run_all(commands, args.out, args.jobs)
    rows = [row for name in commands for row in results(name, args.out, commands[name])]
    with (args.out / "results.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    show(status, rows)
    sys.exit(any(status.values()))


def run_all(commands: dict[str, str], out: Path, jobs: int) -> dict[str, int]:
    """Exit status by run; a run starts when a place is free and the run that it builds on has ended."""
    waiting, running, status = dict(commands), {}, {}
    while waiting or running:
        for name in list(waiting):
            base = re.search(r"--from \S*?([^/\s]+)(?:\s|$)", waiting[name])
            ready = base is None or base[1] not in commands or base[1] in status
            if ready and base is not None and status.get(base[1], 0) != 0:
                print(f"{name}: left out, {base[1]} failed", flush=True)
                status[name] = 1
                del waiting[name]
                continue
            if ready and len(running) < jobs:
                log = (out / f"{name}.log").open("w")
                command = [sys.executable, "-m", "sorbet", "distill", *shlex.split(waiting.pop(name))]
                command += ["--resume"] * (out / name / "run.json").is_file()
                running[name] = (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), time.monotonic())
        for name, (process, began) in list(running.items()):
            if process.poll() is not None:
                status[name] = process.returncode
                print(f"{name}: {'done' if process.returncode == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s",
                      flush=True)  # fmt: skip
                del running[name]
        time.sleep(0.2)
    return status


def results(name: str, out: Path, command: str) -> list[dict]:
    """The rows of one run, as far as it came."""
    folder = out / name
    if not (folder / "run.json").is_file():
        return []
    plan = json.loads((folder / "run.json").read_text())
    finished = folder / "results.json"
    if finished.is_file():
        steps = json.loads(finished.read_text())
    else:
        steps = [json.loads(path.read_text()) for path in sorted(folder.glob("*/result.json"))]
    common = {
        "run": name, "task": plan["task"], "seed": plan["recipe"]["seed"], "teacher": Path(plan["teacher"]).name,
        "versions": " ".join(f"{key}={value}" for key, value in plan["versions"].items()),
        "command": "sorbet distill " + re.sub(r"(--\S+) /\S*/(\S+)", r"\1 \2", command.strip()),  # no local paths
    }  # fmt: skip
    rows = []
    for step in steps:
        for split, scores in step["scores"].items():
            rows += [
                common | {"step": step["step"], "split": split, "metric": k, "value": v} for k, v in scores.items()
            ]
        for key in ("spike_rate", "millijoules", "bert_millijoules", "bytes"):
            if key in step:
                rows.append(common | {"step": step["step"], "split": "", "metric": key, "value": step[key]})
    return rows


def show(status: dict[str, int], rows: list[dict]) -> None:
    for name, code in status.items():
        mine = [row for row in rows if row["run"] == name]
        figures = {(row["step"], row["metric"]): row["value"] for row in reversed(mine)}
        steps = dict.fromkeys(row["step"] for row in mine)
        scores = [f"{step} {_first(figures, step):.4f}" for step in steps if _first(figures, step) is not None]
        rate = figures.get(("sorbet", "spike_rate"))
        print(
            f"{name:32s} " + "  ".join(scores) + (f"  rate {rate:.4f}" if rate else "") + ("  FAILED" if code else "")
        )


def _first(figures: dict, step: str) -> float | None:
    names = ("accuracy", "matthews", "spearman")
    return next((figures[step, name] for name in ("matthews", *names) if (step, name) in figures), None)


if __name__ == "__main__":
    main()
