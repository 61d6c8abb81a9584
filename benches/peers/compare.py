#!/usr/bin/env python3
"""Runs the table side by side with other systems, interleaved round by round, and prints it in Markdown.

Every system is a process that answers JSON lines (see worker.py), kept alive for the whole run. For each row
every system is asked once to warm up, and its checksum is compared with ours. Then, in every round, each
system in turn is asked for a few runs, and the median of these is one sample; the order rotates, and a pause
between turns lets the last system's threads go to sleep. The peak is probed by our instrument around each of
our runs.
"""

import argparse
import json
import math
import pathlib
import re
import shlex
import statistics
import sys
import time

import report
from process import Failed, Worker
from table import OUR_KEYS, SYSTEMS, TABLES

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOLERANCE = 1e-4
TURN_MS = 40.0
MAX_RUNS = 20
SLOW_MS = 2000.0
SLOW_ROUNDS = 3


def say(text):
    print(text, file=sys.stderr, flush=True)


def commands(args):
    """How each system is started."""
    python = [args.python]
    peers = [str(HERE / "rust/target/release/peers")]
    return {"ours": shlex.split(args.ours),
            "torch": python + [str(HERE / "torch_worker.py")],
            "torch-fn": python + [str(HERE / "torch_worker.py"), "--functional"],
            "ort": python + [str(HERE / "ort_worker.py")],
            **{name: peers + [name] for name in ("candle", "burn", "rten", "tract")}}


class Fleet:
    """The workers, one for each role and number of threads."""

    def __init__(self, args):
        self.commands, self.timeout, self.workers = commands(args), args.timeout, {}

    def worker(self, role, threads):
        """`ours-unmasked` is a second process of ours, so that neither loses its inputs to the other."""
        if (role, threads) not in self.workers:
            command = self.commands["ours" if role.startswith("ours") else role]
            self.workers[role, threads] = Worker(command, threads, self.timeout)
        return self.workers[role, threads]

    def close(self):
        for worker in self.workers.values():
            worker.close()

    def versions(self, systems, threads):
        found = []
        for system in systems:
            try:
                about = self.worker(system, threads).ask({"op": "about"})
                found.append(f"{about['version']} ({about['detail']})")
            except Failed as failure:
                say(f"!! {system}: {failure}")
        return list(dict.fromkeys(found))


class Entry:
    """One system in one row: its request, the answers so far."""

    def __init__(self, worker, case, is_ours):
        self.worker, self.is_ours = worker, is_ours
        self.case = case if is_ours else {k: v for k, v in case.items() if k not in OUR_KEYS}
        self.first, self.failure = None, None
        self.samples, self.fractions, self.runs, self.drifted = [], [], 1, False

    def ask(self, runs):
        """An answer, or None once the system has failed in this row."""
        if self.failure is not None:
            return None
        try:
            return self.worker.ask({**self.case, "rounds": runs})
        except Failed as failure:
            self.failure = failure
            return None

    def warm_up(self):
        self.first = self.ask(1)
        if self.first is not None:
            self.runs = max(1, min(MAX_RUNS, math.ceil(TURN_MS / self.first["median_ms"])))

    def sample(self, round_number):
        if self.first is None or (self.first["median_ms"] > SLOW_MS and round_number >= SLOW_ROUNDS
                                  and not self.is_ours):
            return False
        answer = self.ask(self.runs)
        if answer is None:
            return False
        self.samples.append(answer["median_ms"])
        self.drifted |= differs(answer, self.first)
        if answer.get("peak_gflops"):
            self.fractions.append(answer["gflops"] / answer["peak_gflops"])
        return True

    def summary(self):
        result = {"samples": self.samples, "runs_per_sample": self.runs}
        if self.first is not None:
            result |= {key: self.first[key] for key in ("call", "sum", "sum_abs") if key in self.first}
        if self.failure is not None:
            result |= {"error": str(self.failure), "unsupported": self.failure.unsupported}
        return result


def differs(theirs, ours):
    """Whether the checksums are too far apart."""
    scale = TOLERANCE * abs(ours["sum_abs"])
    gaps = [abs(theirs[key] - ours[key]) for key in ("sum", "sum_abs")]
    return not all(gap <= scale for gap in gaps)


def entries_of(row, fleet, systems):
    case = row["case"]
    threads = case["threads"]
    entries = {"ours": Entry(fleet.worker("ours", threads), case, True)}
    if row["versus"]:
        versus = {**row["versus"], "threads": threads}
        entries["ours-unmasked"] = Entry(fleet.worker("ours-unmasked", threads), versus, True)
    for system in systems:
        if system == "ours" or row["ours_only"] or (system == "torch-fn" and case["op"] != "layer"):
            continue
        entries[system] = Entry(fleet.worker(system, threads), case, False)
    return entries


def measure(row, fleet, systems, args):
    """Runs one row; gives its record for the report."""
    entries = entries_of(row, fleet, systems)
    for name, entry in entries.items():
        entry.warm_up()
        if entry.failure is not None and not entry.failure.unsupported:
            say(f"!! {row['name']}: {name} failed: {entry.failure}")
    order = list(entries.values())
    for number in range(args.rounds):
        turn = number % len(order)
        for entry in order[turn:] + order[:turn]:
            if entry.sample(number):
                time.sleep(args.pause_ms / 1e3)
    record = {"name": row["name"], "case": row["case"], "need": row["need"],
              "systems": {name: entry.summary() for name, entry in entries.items()}}
    ours = entries["ours"]
    if ours.fractions:
        record["fraction"] = statistics.median(ours.fractions)
    record["flop"] = ours.first["flop"] if ours.first else 0
    if ours.first is not None:
        check(record, entries)
    return record


def check(record, entries):
    """Marks every peer whose checksum or FLOP count is not ours, and says so loudly."""
    ours = entries["ours"].first
    for name, entry in entries.items():
        if entry.drifted:
            record["systems"][name]["mismatch"] = True
            say(f"!! {record['name']}: {name} gave another result in a later round")
        if name.startswith("ours") or entry.first is None:
            continue
        if differs(entry.first, ours):
            record["systems"][name]["mismatch"] = True
            say("!" * 78)
            say(f"!! {record['name']}: {name} computes something else; its ratio is void")
            say(f"!!   ours sum {ours['sum']:.9g}, sum_abs {ours['sum_abs']:.9g}")
            say(f"!!   {name} sum {entry.first['sum']:.9g}, sum_abs {entry.first['sum_abs']:.9g}")
            say("!" * 78)
        if abs(entry.first["flop"] - ours["flop"]) > 1e-9 * ours["flop"]:
            say(f"!! {record['name']}: {name} counts {entry.first['flop']:.0f} FLOPs, we {ours['flop']:.0f}")


def progress(record):
    parts = []
    for system, entry in record["systems"].items():
        if entry["samples"]:
            parts.append(f"{system} {statistics.median(entry['samples']):.3f} ms")
    say(f"{record['name']}: " + ", ".join(parts))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", default=str(ROOT / "target/release/examples/speed"), metavar="COMMAND",
                        help="our instrument (default: the release build of examples/speed.rs)")
    parser.add_argument("--python", default=sys.executable, help="the Python of the Python workers")
    parser.add_argument("--table", choices=TABLES, default="forward", help="which rows")
    parser.add_argument("--only", metavar="ROWFILTER", default="", help="rows whose name matches this regex")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--threads", type=int, help="threads instead of the table's 2")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="peers, separated by commas")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="pause after each turn (default 20)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one answer (default 900)")
    parser.add_argument("--json", metavar="FILE", help="write every sample to this file")
    args = parser.parse_args()
    systems = [s for s in args.systems.split(",") if s]
    unknown = sorted(set(systems) - {*SYSTEMS, "ours"})
    if unknown:
        parser.error(f"unknown system {unknown[0]}; known: {', '.join(SYSTEMS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    program = shlex.split(args.ours)[0]
    if "/" in program and not pathlib.Path(program).exists():
        parser.error(f"{program} is missing; build it with: cargo build --release --example speed")
    return args, systems


def shown_command():
    """The command line without this machine's folders."""
    words = ["python", "benches/peers/compare.py", *sys.argv[1:]]
    return " ".join(shlex.quote(word.replace(f"{ROOT}/", "")) for word in words)


def main():
    args, systems = arguments()
    rows = [r for r in TABLES[args.table]() if re.search(args.only, r["name"])]
    if not rows:
        sys.exit(f"no row matches {args.only!r}")
    for row in rows:
        if args.threads:
            row["case"]["threads"] = args.threads
    threads = rows[0]["case"]["threads"]
    fleet, records = Fleet(args), []
    try:
        versions = fleet.versions([s for s in systems if s != "ours"], threads)
        for row in rows:
            records.append(measure(row, fleet, systems, args))
            progress(records[-1])
    except KeyboardInterrupt:
        say("interrupted; the rows so far:")
    finally:
        fleet.close()
    print(report.header(versions, shown_command(), threads, ROOT))
    print()
    print(report.table(records, systems))
    print()
    print("Calls:\n")
    print(report.calls(records))
    if args.json:
        content = {"machine": report.machine(), "versions": versions, "rows": records}
        pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    wrong = any(e.get("mismatch") for r in records for e in r["systems"].values())
    failed = any("error" in r["systems"]["ours"] for r in records)
    sys.exit(1 if wrong or failed else 0)


if __name__ == "__main__":
    main()
