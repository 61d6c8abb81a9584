"""The loop that every Python worker runs: one JSON object a line in, one out.

A worker keeps the inputs of the last case, so that a repeated request times runs and nothing else.
A round repeats a short run until it lasts a millisecond, and is divided by the repeats.
The first request of a case prepares the inputs, tries each call the system offers for it and keeps
the fastest; the answer names it under "call". Answers:

    {"system", "call", "min_ms", "median_ms", "flop", "gflops", "sum", "sum_abs"}
    {"system", "error"}          the text starts with "unsupported" where the system has no such call

`{"op":"about"}` answers with the versions.
"""

import contextlib
import json
import math
import statistics
import sys
import time

import numpy as np

from cases import Unsupported, check_keys, flop

TRIALS = 6
SLOW_SECONDS = 0.5
ROUND_SECONDS = 1e-3


class Call:
    """One way to compute the case: `run()` gives its result, `sums(result)` its checksums."""

    def __init__(self, label, run, sums):
        self.label, self.run, self.sums = label, run, sums


def sums_of(arrays):
    """Sum and sum of magnitudes over the arrays, in f64."""
    total = sum(float(np.sum(a, dtype=np.float64)) for a in arrays)
    total_abs = sum(float(np.sum(np.abs(a), dtype=np.float64)) for a in arrays)
    return total, total_abs


def timed(run):
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def choose(calls):
    """The call with the fastest run over a few alternating trials; if none works, the first one's error."""
    best, failure = {}, None
    for call in calls:
        try:
            best[call] = timed(call.run)[0]
        except Exception as error:  # a call may refuse a case that its neighbour takes
            failure = failure or Unsupported(f"{call.label}: {first_line(error)}")
    if not best:
        raise failure or Unsupported("no call for this case")
    for _ in range(TRIALS if len(best) > 1 else 0):
        for call, seconds in best.items():
            if seconds < SLOW_SECONDS:
                best[call] = min(seconds, timed(call.run)[0])
    return min(best, key=best.get)


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


class Server:
    """`prepare(case)` gives the calls for a case, and `mode(case)` a context in which all its work is done."""

    def __init__(self, system, about, prepare, mode=lambda case: contextlib.nullcontext()):
        self.system, self.about, self.prepare, self.mode = system, about, prepare, mode
        self.key, self.call, self.repeats = None, None, 1

    def answer(self, request):
        if request.get("op") == "about":
            return {"system": self.system, **self.about}
        check_keys(request)
        case = {k: v for k, v in request.items() if k != "rounds"}
        with self.mode(case):
            return self.measured(case, max(1, request.get("rounds", 1)))

    def measured(self, case, rounds):
        key = json.dumps(case, sort_keys=True)
        if key != self.key:
            self.key, self.call = None, None
            self.call = choose(self.prepare(case))
            seconds, _ = timed(self.call.run)
            self.repeats = min(max(1, math.ceil(ROUND_SECONDS / seconds)), 10000)
            self.key = key
        run, times = self.call.run, []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(self.repeats):
                result = run()
            times.append((time.perf_counter() - start) * 1e3 / self.repeats)
        total, total_abs = self.call.sums(result)
        median = statistics.median(times)
        work = flop(case)
        return {"system": self.system, "call": self.call.label, "min_ms": min(times),
                "median_ms": median, "flop": work, "gflops": work / median / 1e6,
                "sum": total, "sum_abs": total_abs}

    def serve(self):
        for line in sys.stdin:
            if not line.strip():
                continue
            try:
                reply = self.answer(json.loads(line))
            except Unsupported as error:
                reply = {"system": self.system, "error": f"unsupported: {error}"}
            except Exception as error:
                reply = {"system": self.system, "error": first_line(error)}
            print(json.dumps(reply), flush=True)
