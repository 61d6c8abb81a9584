"""Sentence embeddings by PyTorch or ONNX Runtime: token numbers in, vectors of length 1 out.

    python sentence_worker.py torch|ort FOLDER

The model is BERT with the mean of its tokens, `transformers.BertModel` as it comes or its plain ONNX export under the
default optimisations. Requests and answers are those of examples/sentence_embeddings/serve.rs; batches are padded to
their longest sentence before the clock starts, and the mask hides the padding.
"""

import json
import os
import statistics
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Embedder(torch.nn.Module):
    """[batch, len] tokens and mask to [batch, d_model]."""

    def __init__(self, folder):
        super().__init__()
        self.bert = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, ids, mask):
        tokens = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        kept = mask.unsqueeze(-1).to(tokens.dtype)
        return torch.nn.functional.normalize((tokens * kept).sum(1) / kept.sum(1), dim=1)


def padded(batch):
    longest = max(map(len, batch))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in batch])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in batch])
    return ids, mask


def torch_calls(model, threads):
    torch.set_num_threads(threads)

    def run(ids, mask):
        with torch.inference_mode():
            return model(ids, mask)
    return run, lambda out: out.numpy(), f"PyTorch {torch.__version__}, transformers {transformers.__version__}"


def ort_calls(model, threads):
    import onnxruntime
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        batch, length = torch.export.Dim("batch"), torch.export.Dim("len")
        shapes = {name: {0: batch, 1: length} for name in ("ids", "mask")}
        torch.onnx.export(model, padded([[101, 102, 103], [101, 102]]), path, input_names=["ids", "mask"],
                          output_names=["vectors"], dynamic_shapes=shapes, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(ids, mask):
        return session.run(None, {"ids": ids, "mask": mask})[0]
    return run, lambda out: out, f"ONNX Runtime {onnxruntime.__version__}"


class Server:
    def __init__(self, system, folder):
        self.system, self.model = system, Embedder(folder).eval()
        self.calls, self.threads = None, None

    def answer(self, request):
        if self.threads != request["threads"]:
            make = torch_calls if self.system == "torch" else ort_calls
            self.calls, self.threads = make(self.model, request["threads"]), request["threads"]
        run, to_array, version = self.calls
        batches = [padded(batch) for batch in request["batches"]]
        if self.system == "ort":
            batches = [(ids.numpy(), mask.numpy()) for ids, mask in batches]
        times = []
        for _ in range(max(1, request["rounds"])):
            start = time.perf_counter()
            vectors = [run(ids, mask) for ids, mask in batches]
            times.append((time.perf_counter() - start) * 1e3)
        return {"median_ms": statistics.median(times), "min_ms": min(times), "version": version,
                "embeddings": [to_array(out).tolist() for out in vectors]}


def main():
    server = Server(*sys.argv[1:3])
    # The exporter prints; only answers may go to the driver.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        try:
            reply = server.answer(json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main()
