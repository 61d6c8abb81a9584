"""ONNX Runtime: the contrib operators MultiHeadAttention, GroupQueryAttention and Attention, and the
standard operator Attention, each as a graph of its own; projections are MatMul nodes.

Inputs are bound once and outputs are written to buffers that are kept, so a run copies nothing.
The operators take [batch, len, heads * head_dim]; the inputs are laid out so before the clock starts.
"""

import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

import cases
from cases import Unsupported
from worker import Call, Server, sums_of

CONTRIB = "com.microsoft"
OPSET = 23
IR_VERSION = 11
MASKED = -1e30


class Graph:
    """A model under construction: nodes, constant tensors, and inputs with their values."""

    def __init__(self):
        self.nodes, self.constants, self.inputs = [], [], {}

    def feed(self, name, value):
        self.inputs[name] = np.ascontiguousarray(value)
        return name

    def constant(self, name, value):
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(self, kind, inputs, output, domain="", **attributes):
        self.nodes.append(helper.make_node(kind, inputs, [output], domain=domain, **attributes))
        return output

    def session(self, output, shape, threads):
        def info(name, value):
            return helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

        out = np.zeros(shape, np.float32)
        graph = helper.make_graph(self.nodes, "case", [info(n, v) for n, v in self.inputs.items()],
                                  [info(output, out)], self.constants)
        model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[
            helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)])
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4
        session = ort.InferenceSession(model.SerializeToString(), options,
                                       providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        for name, value in self.inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
        result = ort.OrtValue.ortvalue_from_numpy(out)
        binding.bind_ortvalue_output(output, result)

        def run():
            session.run_with_iobinding(binding)
            return result
        return run


def merged_heads(a):
    """[batch, heads, len, size] -> [batch, len, heads * size]."""
    batch, heads, count, size = a.shape
    return a.transpose(0, 2, 1, 3).reshape(batch, count, heads * size)


def sums(result):
    return sums_of([result.numpy()])


def added_mask(case):
    """Bias and mask as one additive array [1, 1, q_len, kv_len]; None if there is nothing to add."""
    keep, added = cases.keep_mask(case), cases.bias_array(case)
    if keep is not None:
        added = np.where(keep, np.float32(0) if added is None else added, np.float32(MASKED))
    return None if added is None else added[None, None].astype(np.float32)


def attend_mha(graph, case, q, k, v):
    """Contrib MultiHeadAttention; the causal rule is its attribute, top-left and bottom-right alike for square cases."""
    if case["heads"] != case["kv_heads"]:
        raise Unsupported("MultiHeadAttention has no grouped heads")
    causal = bool(case.get("causal"))
    inputs = [q, k, v, "", "", ""]
    length = cases.key_length(case)
    if length is not None and not case.get("bias"):
        kept = np.arange(cases.lengths(case)[1]) < length
        mask = np.broadcast_to(kept, (case["batch"], kept.size)).astype(np.int32)
        inputs[4] = graph.feed("key_padding_mask", mask)
    else:
        added = added_mask(case)
        if added is not None:
            inputs[5] = graph.feed("attention_bias", added)
    while inputs[-1] == "":
        inputs.pop()
    return graph.node("MultiHeadAttention", inputs, "context", CONTRIB, num_heads=case["heads"],
                      unidirectional=int(causal), mask_filter_value=MASKED)


def attend_gqa(graph, case, q, k, v):
    """Contrib GroupQueryAttention without a past."""
    q_len, kv_len = cases.lengths(case)
    if q_len != kv_len:
        raise Unsupported("GroupQueryAttention without a past wants as many keys as queries")
    inputs = [q, k, v, "", "",
              graph.feed("seqlens_k", np.full(case["batch"], kv_len - 1, np.int32)),
              graph.constant("total", np.array(kv_len, np.int32)), "", "", ""]
    added = added_mask(case)
    if added is not None:
        inputs.append(graph.feed("attention_bias", added))
    while inputs[-1] == "":
        inputs.pop()
    return graph.node("GroupQueryAttention", inputs, "context", CONTRIB, num_heads=case["heads"],
                      kv_num_heads=case["kv_heads"], causal=int(bool(case.get("causal"))))


def attend_standard(graph, case, q, k, v):
    """Attention of the standard operator set."""
    inputs = [q, k, v]
    added = added_mask(case)
    if added is not None:
        inputs.append(graph.feed("attn_mask", added[0, 0]))
    return graph.node("Attention", inputs, "context", q_num_heads=case["heads"],
                      kv_num_heads=case["kv_heads"], is_causal=int(bool(case.get("causal"))))


ATTEND = {"MultiHeadAttention": attend_mha, "GroupQueryAttention": attend_gqa,
          "Attention (standard)": attend_standard}


def attention_call(label, case, inputs):
    graph = Graph()
    names = [graph.feed(n, a) for n, a in zip("qkv", inputs)]
    out = ATTEND[label](graph, case, *names)
    q_len, _ = cases.lengths(case)
    _, value_dim = cases.head_dims(case)
    shape = (case["batch"], q_len, case["heads"] * value_dim)
    return Call(label, graph.session(out, shape, case["threads"]), sums)


def layer_call(label, case, x, weights):
    graph = Graph()
    names = [graph.node("MatMul", [graph.feed("x", x) if n == "q" else "x",
                                   graph.constant("w_" + n, weights["w_" + n])], n) for n in "qkv"]
    context = ATTEND[label](graph, case, *names)
    out = graph.node("MatMul", [context, graph.constant("w_o", weights["w_o"])], "out")
    return Call(f"MatMul and {label}", graph.session(out, x.shape, case["threads"]), sums)


def packed_layer_call(case, x, weights):
    """Contrib Attention, which owns the packed input projections; W_O is a MatMul."""
    if case["heads"] != case["kv_heads"] or case.get("mask") or case.get("bias"):
        raise Unsupported("contrib Attention for this case")
    graph = Graph()
    packed = np.concatenate([weights["w_q"], weights["w_k"], weights["w_v"]], 1)
    inputs = [graph.feed("x", x), graph.constant("w_in", packed),
              graph.constant("b_in", np.zeros(packed.shape[1], np.float32))]
    context = graph.node("Attention", inputs, "context", CONTRIB, num_heads=case["heads"],
                         unidirectional=int(bool(case.get("causal"))))
    out = graph.node("MatMul", [context, graph.constant("w_o", weights["w_o"])], "out")
    return Call("contrib Attention and MatMul", graph.session(out, x.shape, case["threads"]), sums)


def prepare(case):
    if cases.dtype_of(case) is not np.float32:
        raise Unsupported("the attention operators are for f32 on CPUs")
    q_len, kv_len = cases.lengths(case)
    if case.get("causal") and q_len != kv_len:
        raise Unsupported("causal with different numbers of queries and keys")
    calls, failure = [], None
    if case["op"] == "attention":
        arrays = [merged_heads(a) for a in cases.attention_inputs(case)]
        makers = [lambda label=label: attention_call(label, case, arrays) for label in ATTEND]
    else:
        x, weights = cases.layer_inputs(case)
        makers = [lambda label=label: layer_call(label, case, x, weights) for label in ATTEND]
        makers.append(lambda: packed_layer_call(case, x, weights))
    for make in makers:
        try:
            calls.append(make())
        except Exception as error:  # the operator refuses the case: its neighbours may take it
            failure = failure or error
    if not calls:
        raise Unsupported(str(failure).splitlines()[0])
    return calls


if __name__ == "__main__":
    Server("ort", {"version": f"ONNX Runtime {ort.__version__}", "detail": "CPU provider"}, prepare).serve()
