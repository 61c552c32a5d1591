"""csrc/sample.h from Python: tables of rows in, tokens and log-probabilities out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kitfox.outputs import TokenLogprobs

Table = npt.NDArray[np.void]

# The structs SampleRow and LogprobsRow, field by field.
SAMPLE_ROW = np.dtype(
    [
        ("logits", np.int64),
        ("allowed", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("uniform", np.float64),
        ("token", np.int64),
    ]
)
LOGPROBS_ROW = np.dtype(
    [
        ("logits", np.int64),
        ("token", np.int64),
        ("num_top", np.int64),
        ("logprob", np.float64),
        ("rank", np.int64),
        ("top_ids", np.int64),
        ("top_logprobs", np.int64),
    ]
)


def row_addresses(matrix: Tensor | npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Where the rows of a matrix [n, m] start in the host's memory."""
    if isinstance(matrix, Tensor):
        matrix = matrix.numpy()
    return matrix.ctypes.data + matrix.strides[0] * np.arange(matrix.shape[0], dtype=np.int64)


class NativeSampler:
    """The library's two functions. Logits are float32 on the host and contiguous along the vocabulary."""

    def __init__(self, library: ctypes.CDLL, context: int | None):
        """context: what library expects as the first argument of every call; its threads share the rows."""
        sizes = (ctypes.c_int64 * 2)()
        library.kf_sampling_abi(sizes)
        expected = [SAMPLE_ROW.itemsize, LOGPROBS_ROW.itemsize]
        assert list(sizes) == expected, f"csrc and native_sampler.py disagree: {list(sizes)} and {expected} bytes"
        self._context = context
        signature = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._sample = library.kf_sample
        self._logprobs = library.kf_logprobs
        self._sample.argtypes = self._logprobs.argtypes = signature
        self._sample.restype = self._logprobs.restype = None

    def sample(self, table: Table, vocab_size: int) -> list[int | None]:
        """The tokens of a table [n] of SAMPLE_ROW, None for rows that have no distribution."""
        self._sample(self._context, table.ctypes.data, len(table), vocab_size)
        return [token if token >= 0 else None for token in table["token"].tolist()]

    def logprobs(
        self, logits: Tensor, indices: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of one token and of the most likely ones in some rows of logits.

        Args:
            logits: [n, V].
            indices: which m of the rows.
            token_ids, num_top: m, a token and how many of the best to report beside it.
        """
        vocab_size = logits.shape[1]
        addresses = row_addresses(logits)[indices]
        top_ids = np.empty((len(addresses), min(max(num_top), vocab_size)), np.int64)
        top_logprobs = np.empty(top_ids.shape, np.float64)
        table = np.zeros(len(addresses), LOGPROBS_ROW)
        table["logits"] = addresses
        table["token"] = token_ids
        table["num_top"] = np.minimum(num_top, vocab_size)
        table["top_ids"] = row_addresses(top_ids)
        table["top_logprobs"] = row_addresses(top_logprobs)
        self._logprobs(self._context, table.ctypes.data, len(table), vocab_size)
        columns = (table["logprob"].tolist(), table["rank"].tolist(), top_ids.tolist(), top_logprobs.tolist())
        return [
            TokenLogprobs(token_id, logprob, rank, ids[:count], values[:count])
            for count, token_id, logprob, rank, ids, values in zip(num_top, token_ids, *columns, strict=True)
        ]
