"""ONNX Runtime: every operator that takes the case is tried, and the fastest is kept."""

import onnxruntime as ort

import cases
import ort_decode
import ort_forward
from cases import Unsupported
from worker import Server

MAKERS = {"forward": ort_forward.makers, "decode": ort_decode.makers}


def prepare(case):
    if cases.dtype_of(case) is not cases.np.float32 or case.get("cache", "f32") != "f32":
        raise Unsupported("the attention operators are for f32 on CPUs")
    if cases.pass_of(case) not in MAKERS:
        raise Unsupported("training")
    calls, failure = [], None
    for make in MAKERS[cases.pass_of(case)](case):
        try:
            calls.append(make())
        except Exception as error:  # the operator refuses the case: its neighbours may take it
            failure = failure or error
    if not calls:
        raise Unsupported(str(failure).splitlines()[0])
    return calls


if __name__ == "__main__":
    Server("ort", {"version": f"ONNX Runtime {ort.__version__}", "detail": "CPU provider"}, prepare).serve()
