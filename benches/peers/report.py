"""Verdicts and the Markdown table, from the samples of a run."""

import datetime
import platform
import statistics
import subprocess

from table import FAMILIES

LABELS = {"fraction": "of peak", "torch": "PyTorch", "ort": "ONNX Runtime", "rust": "Rust crates",
          "of_unmasked": "of unmasked"}
# The figures that must not be exceeded; the others must be reached.
AT_MOST = ("of_unmasked",)


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
        if kind == "fraction":
            figures[kind] = row.get("fraction")
        elif kind == "of_unmasked":
            ours, plain = median_ms(row, "ours"), median_ms(row, "ours-unmasked")
            figures[kind] = ours / plain if ours and plain else None
        else:
            ratios = [r for r in (ratio(row, s) for s in FAMILIES[kind]) if r is not None]
            figures[kind] = min(ratios) if ratios else None
    return figures


def verdict(row):
    """(met, missed): texts for the figures that were measured."""
    met, missed = [], []
    for kind, figure in reached(row).items():
        need = row["need"][kind]
        if figure is None:
            missed.append(f"{LABELS[kind]} not measured")
            continue
        good = figure <= need if kind in AT_MOST else figure >= need
        text = f"{LABELS[kind]} {figure:.2f} of {'at most ' if kind in AT_MOST else ''}{need:g}"
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
        parts.append(f"{LABELS[kind]} {'<= ' if kind in AT_MOST else ''}{need:g}")
    return ", ".join(parts) or "-"


def table(rows, systems):
    peers = [s for s in systems if s != "ours"]
    head = ["work", "ms", "GFLOP/s", "of peak", *peers, "required", "met"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        ours = median_ms(row, "ours")
        rate = row["flop"] / ours / 1e6 if ours else None
        _, missed = verdict(row)
        cells = [row["name"], number(ours, 3), number(rate, 0), number(row.get("fraction"), 2),
                 *(cell(row, s) for s in peers), need_text(row),
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
