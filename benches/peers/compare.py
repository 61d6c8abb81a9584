#!/usr/bin/env python3
"""Runs tables side by side with other systems, interleaved round by round, and prints them in Markdown.

Every system is a process that answers JSON lines (see worker.py), kept alive for the whole run. For each row
every system is asked once to warm up, and its checksum is compared with ours. Then, in every round, each
system in turn is asked for a few runs, and the median of these is one sample; the order rotates, and a pause
between turns lets the last system's threads go to sleep. The peak is probed by our instrument around each of
our runs.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shlex
import statistics
import subprocess
import sys
import time

import report
from process import Failed, Worker
from table import OUR_KEYS, SYSTEMS, TABLES, TOLERANCE

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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
        """`ours-versus` is a second process of ours, so that neither loses its inputs to the other."""
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

    def __init__(self, worker, case, is_ours=False, tolerance=TOLERANCE):
        self.worker, self.is_ours, self.tolerance = worker, is_ours, tolerance
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
        self.drifted |= self.tolerance is not None and differs(answer, self.first, self.tolerance)
        if "fraction_of_roofline" in answer:
            self.fractions.append(answer["fraction_of_roofline"])
        elif answer.get("peak_gflops"):
            self.fractions.append(answer["gflops"] / answer["peak_gflops"])
        return True

    def summary(self):
        result = {"samples": self.samples, "runs_per_sample": self.runs}
        if self.first is not None:
            result |= {key: self.first[key] for key in ("call", "sum", "sum_abs") if key in self.first}
        if self.failure is not None:
            result |= {"error": str(self.failure), "unsupported": self.failure.unsupported}
        return result


def differs(theirs, ours, tolerance):
    """Whether the checksums are too far apart."""
    scale = tolerance * abs(ours["sum_abs"])
    gaps = [abs(theirs[key] - ours[key]) for key in ("sum", "sum_abs")]
    return not all(gap <= scale for gap in gaps)


def entries_of(row, fleet, systems):
    case, tolerance = row["case"], row["tolerance"]
    threads = case["threads"]
    entries = {"ours": Entry(fleet.worker("ours", threads), case, is_ours=True)}
    if row["versus"]:
        versus = {**row["versus"][1], "threads": threads}
        entries["ours-versus"] = Entry(fleet.worker("ours-versus", threads), versus, is_ours=True)
    # What PyTorch lets a caller do by hand concerns layers and groups of heads over a cache.
    by_hand = case["op"] == "layer" or case.get("pass") == "decode"
    for system in systems:
        if system == "ours" or row["ours_only"] or (system == "torch-fn" and not by_hand):
            continue
        entries[system] = Entry(fleet.worker(system, threads), case, tolerance=tolerance)
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
    record = {"name": row["name"], "case": row["case"], "need": row["need"], "versus": row["versus"],
              "systems": {name: entry.summary() for name, entry in entries.items()}}
    ours = entries["ours"]
    if ours.first is not None:
        over_a_cache = "fraction_of_roofline" in ours.first
        if ours.fractions:
            record["roofline" if over_a_cache else "fraction"] = statistics.median(ours.fractions)
        record |= {key: ours.first[key] for key in ("flop", "bytes") if key in ours.first}
        check(record, entries)
    return record


def run_example(row, args):
    """Runs an example of ours that prints its peak memory; it lies beside the instrument."""
    name, *rest = row["command"]
    command = [str(pathlib.Path(shlex.split(args.ours)[0]).with_name(name)), *rest]
    record = {"name": row["name"], "case": {"command": row["command"]}, "need": row["need"], "versus": None}
    ours = {"call": " ".join(row["command"]), "samples": []}
    start = time.perf_counter()
    try:
        env = {**os.environ, "RAYON_NUM_THREADS": str(args.threads or 2)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=env)
        found = re.search(r"peak memory beyond .*: ([0-9.]+) MiB", done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        found, done = None, error
    if found:
        record["mib"] = float(found[1])
        ours["call"] += f", {found[1]} MiB"
        ours["samples"].append((time.perf_counter() - start) * 1e3)
    else:
        ours |= {"error": f"{name}: {getattr(done, 'stderr', '') or done}", "unsupported": False}
        say(f"!! {row['name']}: {ours['error']}; build it with: cargo build --release --example {name}")
    return {**record, "systems": {"ours": ours}}


def check(record, entries):
    """Marks every peer whose checksum or FLOP count is not ours, and says so loudly."""
    ours = entries["ours"].first
    for name, entry in entries.items():
        if entry.drifted:
            record["systems"][name]["mismatch"] = True
            say(f"!! {record['name']}: {name} gave another result in a later round")
        if name.startswith("ours") or entry.first is None:
            continue
        if entry.tolerance is not None and differs(entry.first, ours, entry.tolerance):
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
                        help="our instrument (default: the release build of examples/speed)")
    parser.add_argument("--python", default=sys.executable, help="the Python of the Python workers")
    parser.add_argument("--table", choices=(*TABLES, "all"), default="all", help="which table (default all)")
    parser.add_argument("--only", metavar="ROWFILTER", default="", help="rows whose name matches this regex")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--threads", type=int, help="threads instead of the table's 2")
    parser.add_argument("--systems", default=",".join(SYSTEMS),
                        help="peers, separated by commas; a table has those of them that it names")
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
        parser.error(f"{program} is missing; build it with: cargo build --release --features half --example speed")
    return args, systems


def shown_command():
    """The command line without this machine's folders."""
    words = ["python", "benches/peers/compare.py", *sys.argv[1:]]
    return " ".join(shlex.quote(word.replace(f"{ROOT}/", "")) for word in words)


def chosen(args, systems):
    """(table, its rows, its systems), without the tables that have no row left."""
    tables = TABLES.values() if args.table == "all" else [TABLES[args.table]]
    for table in tables:
        rows = [row for row in table.rows if re.search(args.only, row["name"])]
        for row in rows:
            if args.threads and row["case"]:
                row["case"]["threads"] = args.threads
        if rows:
            yield table, rows, [system for system in systems if system in table.systems]


def main():
    args, systems = arguments()
    tables = list(chosen(args, systems))
    if not tables:
        sys.exit(f"no row matches {args.only!r}")
    threads = args.threads or 2
    fleet, records = Fleet(args), {table.title: [] for table, _, _ in tables}
    try:
        used = [system for system in systems if any(system in peers for _, _, peers in tables)]
        versions = fleet.versions(used, threads)
        for table, rows, peers in tables:
            for row in rows:
                record = run_example(row, args) if "command" in row else measure(row, fleet, peers, args)
                records[table.title].append(record)
                progress(record)
    except KeyboardInterrupt:
        say("interrupted; the rows so far:")
    finally:
        fleet.close()
    print(report.header(versions, shown_command(), threads, ROOT))
    for table, _, peers in tables:
        print(f"\n{table.title}:\n")
        print(report.table(records[table.title], peers, table.columns))
    rows = [record for of_table in records.values() for record in of_table]
    print("\nCalls:\n")
    print(report.calls(rows))
    if args.json:
        content = {"machine": report.machine(), "versions": versions, "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(content, indent=1) + "\n")
    wrong = any(e.get("mismatch") for r in rows for e in r["systems"].values())
    failed = any("error" in r["systems"]["ours"] for r in rows)
    sys.exit(1 if wrong or failed else 0)


if __name__ == "__main__":
    main()
