"""PyTorch. With `--functional` a second system: layers by hand instead of nn.MultiheadAttention, and for decoding
queries folded by hand instead of `enable_gqa`.
"""

import sys

import torch

import cases
import torch_backward
import torch_decode
import torch_forward
from cases import Unsupported
from worker import Server


def main():
    by_hand = "--functional" in sys.argv[1:]

    def forwards(case):
        if case["op"] == "layer":
            return (torch_forward.functional if by_hand else torch_forward.module)(case)
        if by_hand:
            raise Unsupported("this worker is for layers and decoding")
        return torch_forward.attention(case)

    def prepare(case):
        torch.set_num_threads(case["threads"])
        if cases.pass_of(case) == "decode":
            return torch_decode.calls(case, by_hand)
        if cases.pass_of(case) == "forward_backward":
            return torch_backward.calls(case, forwards(case))
        return [forward.call() for forward in forwards(case)]

    def mode(case):
        return torch.inference_mode(cases.pass_of(case) != "forward_backward")

    torch.set_num_interop_threads(1)
    about = {"version": f"PyTorch {torch.__version__}",
             "detail": f"{torch.backends.cpu.get_cpu_capability()}, "
                       f"MKL {'on' if torch.backends.mkl.is_available() else 'off'}"}
    Server("torch-fn" if by_hand else "torch", about, prepare, mode).serve()


if __name__ == "__main__":
    main()
