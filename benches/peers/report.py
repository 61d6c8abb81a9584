"""Verdicts and the Markdown table, from the samples of a run."""

import datetime
import platform
import statistics
import subprocess

from table import FAMILIES

LABELS = {"fraction": "of peak", "roofline": "of roofline", "torch": "PyTorch", "ort": "ONNX Runtime",
          "candle": "candle", "rust": "Rust crates", "ms": "ms", "mib": "MiB"}
# The figures that must not be exceeded; the others must be reached.
AT_MOST = ("of_versus", "ms", "mib")

# What a table shows of ours besides the time: the work or the bytes of K and V over it.
COLUMNS = {"gflops": "GFLOP/s", "gbs": "GB/s", "fraction": "of peak", "roofline": "of roofline"}


def median_ms(row, system):
    samples = row["systems"].get(system, {}).get("samples")
    return statistics.median(samples) if samples else None


def ratio(row, system):
    """Peer time over our time; None if either is missing or the peer's result differs from ours."""
    ours, theirs = median_ms(row, "ours"), median_ms(row, system)
    if ours is None or theirs is None or row["systems"][system].get("mismatch"):
        return None
    return theirs / ours


def reached(row):
    """The figure reached for each required one; None where it was not measured."""
    figures = {}
    for kind in row["need"]:
        if kind in ("fraction", "roofline", "mib"):
            figures[kind] = row.get(kind)
        elif kind == "ms":
            figures[kind] = median_ms(row, "ours")
        elif kind == "of_versus":
            ours, other = median_ms(row, "ours"), median_ms(row, "ours-versus")
            figures[kind] = ours / other if ours and other else None
        else:
            ratios = [r for r in (ratio(row, s) for s in FAMILIES[kind]) if r is not None]
            figures[kind] = min(ratios) if ratios else None
    return figures


def label(row, kind):
    return f"of {row['versus'][0]}" if kind == "of_versus" else LABELS[kind]


def verdict(row):
    """(met, missed): texts for the figures that were measured."""
    met, missed = [], []
    for kind, figure in reached(row).items():
        need = row["need"][kind]
        if figure is None:
            missed.append(f"{label(row, kind)} not measured")
            continue
        good = figure <= need if kind in AT_MOST else figure >= need
        digits = 5 if kind == "ms" else 2
        text = f"{label(row, kind)} {figure:.{digits}f} of {'at most ' if kind in AT_MOST else ''}{need:g}"
        (met if good else missed).append(text)
    return met, missed


def cell(row, system):
    entry = row["systems"].get(system)
    if entry is None:
        return "-"
    if entry.get("mismatch"):
        return "**WRONG**"
    if "error" in entry:
        return "-" if entry["unsupported"] else "failed"
    value = ratio(row, system)
    return "-" if value is None else f"{value:.2f}"


def number(value, digits):
    return "-" if value is None else f"{value:.{digits}f}"


def need_text(row):
    parts = []
    for kind, need in row["need"].items():
        parts.append(f"{label(row, kind)} {'<= ' if kind in AT_MOST else ''}{need:g}")
    return ", ".join(parts) or "-"


def rate(row, column):
    """Our work, or the bytes of keys and values, over our time."""
    ours, amount = median_ms(row, "ours"), row.get("flop" if column == "gflops" else "bytes")
    return amount / ours / 1e6 if ours and amount else None


def milliseconds(value):
    return "-" if value is None else f"{value:.{3 if value >= 0.1 else 5}f}"


def table(rows, systems, columns):
    """`columns` are the two of `COLUMNS` that are shown of ours."""
    head = ["work", "ms", *(COLUMNS[column] for column in columns), *systems, "required", "met"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        of_rate, of_best = columns
        _, missed = verdict(row)
        cells = [row["name"], milliseconds(median_ms(row, "ours")),
                 number(rate(row, of_rate), 0 if of_rate == "gflops" else 1), number(row.get(of_best), 2),
                 *(cell(row, s) for s in systems), need_text(row),
                 "yes" if not missed else "no: " + ", ".join(missed)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def calls(rows):
    """Which call each peer was measured with, and why there is none."""
    lines = []
    for row in rows:
        parts = []
        for system, entry in row["systems"].items():
            if "error" in entry:
                parts.append(f"{system}: {entry['error']}")
            elif "call" in entry:
                parts.append(f"{system}: {entry['call']}, {len(entry['samples'])} samples")
        if parts:
            lines.append(f"- {row['name']}: " + "; ".join(parts))
    return "\n".join(lines)


def run(command, cwd=None):
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def machine():
    """Processor, cores and system in one line."""
    fields = dict(line.split(":", 1) for line in run(["lscpu"]).splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    model = fields.get("Model name", platform.processor() or "unknown processor")
    family = f"family {fields.get('CPU family', '?')} model {fields.get('Model', '?')}"
    return f"{model} ({family}), {fields.get('CPU(s)', '?')} CPUs, {platform.system()} {platform.machine()}"


def header(versions, command, threads, root):
    commit = run(["git", "rev-parse", "--short", "HEAD"], root)
    dirty = "+" if run(["git", "status", "--porcelain", "--untracked-files=no"], root) else ""
    lines = [f"Machine: {machine()}; {threads} threads.",
             f"Date: {datetime.date.today().isoformat()}; multihead at {commit or 'unknown'}{dirty}.",
             "Versions: " + ("; ".join(versions) or "none") + ".",
             f"Command: `{command}`",
             "Times are medians over the interleaved rounds; a peer's column is its time over ours."]
    return "\n".join(f"- {line}" for line in lines)
