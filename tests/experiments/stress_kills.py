"""40 runs are killed at random moments and gone on with: all must end with the bits of a whole one.

    python tests/experiments/stress_kills.py --kills 40    # minutes; it is no part of the suite

Half of the kills fall into the first moments, when the folder, its lock, config.json and the first
checkpoint are made; the others anywhere in the run, and again in the resumed one. A kill is
SIGKILL: nothing is flushed, closed or removed. Each run is a process forked from one that has
imported torch already, so this needs a POSIX system.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (1, 2)]

import torch
from conftest import SMALL

import train

COMMAND = [*SMALL, "--last-steps", "40", "--save-every", "5"]


def start(argv):
    """A process that trains; its output goes nowhere."""
    process = os.fork()
    if not process:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        code = 1
        try:
            train.main(argv)
            code = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            os._exit(code)
    return process


def end(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports what the first optimiser imports
    rng, counts = random.Random(args.seed), {}
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        begin = time.perf_counter()
        assert end(start([*COMMAND, "--out", str(place / "whole")])) == 0
        seconds = time.perf_counter() - begin
        whole = torch.load(place / "whole" / "model.pt", weights_only=True)
        for trial in range(args.kills):
            folder, early = place / str(trial), trial % 2 == 0
            resume, kills = [], 1 if early else rng.choice([1, 2])
            for _ in range(kills):
                process = start([*COMMAND, "--out", str(folder), *resume])
                time.sleep(rng.uniform(0, 0.25 if early else 1.0) * seconds)
                os.kill(process, signal.SIGKILL)
                end(process)
                resume = ["--resume"]
            left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
            # Where no checkpoint was left, a start must do as well as a resume.
            resume = resume if "model.pt" in left or trial % 4 else []
            code = end(start([*COMMAND, "--out", str(folder), *resume]))
            equal = code == 0 and same(whole, torch.load(folder / "model.pt", weights_only=True))
            steps = [line.split(",")[0] for line in open(folder / "log.jsonl")] if equal else []
            equal &= steps == [line.split(",")[0] for line in open(place / "whole" / "log.jsonl")]
            key = ("early" if early else "late", "checkpoint" if "model.pt" in left else "none yet")
            good, total = counts.get(key, (0, 0))
            counts[key] = good + equal, total + 1
            print(".", end="", flush=True)
            if not equal:
                print(f"trial {trial}: exit code {code}, left {left}")
    print()
    for (when, had), (good, total) in sorted(counts.items()):
        print(f"killed {when}, checkpoint left: {had:<10}  {good} of {total} with the same bits")
    good = sum(good for good, _ in counts.values())
    print(f"{good} of {args.kills} (a whole run takes {seconds:.1f} s)")
    return 0 if good == args.kills else 1


if __name__ == "__main__":
    raise SystemExit(main())
