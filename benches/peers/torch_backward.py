"""PyTorch, forward and backward: autograd through each way forward, from the fixed gradient of the output.

Every leaf has its gradient computed and written, to a fresh array, as an optimiser's `zero_grad` leaves it.
"""

import torch

import cases
from worker import Call, sums_of

# The checksums are over d_q, d_k and d_v, or over d_x.
SUMMED = {"attention": 3, "layer": 1}


def calls(case, forwards):
    return [call(case, forward) for forward in forwards]


def call(case, forward):
    for leaf in forward.leaves:
        leaf.requires_grad_()
    with torch.no_grad():
        shape = forward.run().shape
    d_out = torch.from_numpy(cases.array("d_out", tuple(shape), cases.dtype_of(case)))

    def run():
        return torch.autograd.grad(forward.run(), forward.leaves, d_out)

    def sums(gradients):
        return sums_of([g.numpy() for g in gradients[:SUMMED[case["op"]]]])
    return Call(f"{forward.label}, autograd", run, sums)
