"""A worker process that answers one JSON line for each JSON line."""

import json
import os
import subprocess
import threading

# Peers return fresh tensors: with these, glibc keeps freed pages, so that a run does not pay for
# page faults that an output buffer of its own would have spared it.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
          "MALLOC_TOP_PAD_": str(1 << 26)}

THREAD_VARIABLES = ("RAYON_NUM_THREADS", "RTEN_NUM_THREADS", "CANDLE_NUM_THREADS",
                    "OMP_NUM_THREADS", "MKL_NUM_THREADS")

# These pin or slow numeric libraries on some machines; the peers shall choose for themselves.
DROPPED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


class Failed(Exception):
    """The worker answered with an error, or did not answer."""

    def __init__(self, text):
        super().__init__(text)
        self.unsupported = text.startswith("unsupported")


class Worker:
    """Started at the first request, and again after it has died or was stopped for taking too long."""

    def __init__(self, command, threads, timeout):
        self.command, self.timeout, self.process = command, timeout, None
        self.env = {k: v for k, v in os.environ.items() if k not in DROPPED}
        self.env |= MALLOC | {name: str(threads) for name in THREAD_VARIABLES}

    def start(self):
        try:
            self.process = subprocess.Popen(self.command, env=self.env, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise Failed(f"cannot start {' '.join(self.command)}: {error}") from error

    def ask(self, request):
        if self.process is None:
            self.start()
        timer = threading.Timer(self.timeout, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timed_out = not timer.is_alive()
            timer.cancel()
        if not line:
            code = self.process.wait()
            self.process = None
            reason = f"no answer in {self.timeout} s" if timed_out else f"ended with code {code}"
            raise Failed(f"{' '.join(self.command)}: {reason}")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise Failed(f"no JSON: {line.strip()[:200]}") from error
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
