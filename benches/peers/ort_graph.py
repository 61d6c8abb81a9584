"""A model of one operator or a few, made node by node, and a run of it that copies nothing: inputs are bound once and
outputs are written to buffers that are kept.
"""

import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

from worker import sums_of

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

    def node(self, kind, inputs, output, domain="", more=(), **attributes):
        """Adds a node; `more` are outputs beyond the one whose name it returns."""
        self.nodes.append(helper.make_node(kind, inputs, [output, *more], domain=domain, **attributes))
        return output

    def session(self, output, shape, threads, shared=None, dropped=None):
        """A run into a buffer that is kept. `shared` names further outputs that are written over an input,
        `dropped` further ones with their shapes."""
        def info(name, value):
            return helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

        shared, out = shared or {}, np.zeros(shape, np.float32)
        spare = {name: np.zeros(size, np.float32) for name, size in (dropped or {}).items()}
        outputs = [info(output, out), *(info(n, self.inputs[of]) for n, of in shared.items()),
                   *(info(n, v) for n, v in spare.items())]
        graph = helper.make_graph(self.nodes, "case", [info(n, v) for n, v in self.inputs.items()],
                                  outputs, self.constants)
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
        bound = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in (self.inputs | spare).items()}
        for name in self.inputs:
            binding.bind_ortvalue_input(name, bound[name])
        result = ort.OrtValue.ortvalue_from_numpy(out)
        binding.bind_ortvalue_output(output, result)
        for name in spare:
            binding.bind_ortvalue_output(name, bound[name])
        for name, of in shared.items():
            binding.bind_ortvalue_output(name, bound[of])

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
