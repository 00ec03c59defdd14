"""The exported INT4 draft under teacher forcing: the graph the edge runs, one token at a time."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.edge_client.drafting.onnx.model import import_onnxruntime
from outrider.edge_client.drafting.onnx.runner import OnnxRunner
from outrider.edge_client.drafting.spec import GRAPH_FILE, read_spec


class OnnxDraft:
    """Runs `draft.onnx` after each token of a given text. One thread, as on the edge."""

    def __init__(self, directory: Path) -> None:
        """Raises `ModelError` naming what is wrong with the directory."""
        onnxruntime = import_onnxruntime()
        self._spec = read_spec(directory)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(directory / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
        )

    def logits(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns [num_tokens, vocab] logits of [num_tokens] ids, row t after token t."""
        runner = OnnxRunner(self._session, self._spec, temperature=0.0)
        rows = [runner.feed([int(id_)], position).logits[0].copy() for position, id_ in enumerate(token_ids)]
        return np.stack(rows)
