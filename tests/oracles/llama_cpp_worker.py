"""Drafts of llama.cpp's own MTP graph, in an environment with llama-cpp-python 0.3.36.

    python llama_cpp_worker.py MODEL.gguf SIZE FIRST < texts.json

Prints for each text, whose last token the target has not read, the SIZE tokens that are drafted.
FIRST 1: as llama.cpp's driver does, a pair of zeros and the text's first token comes first.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile

import llama_cpp as lib
import numpy as np

LIBRARY = lib.llama_cpp._lib
SET, GET, GET_ITH = (
    getattr(LIBRARY, name)
    for name in (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    )
)
SET.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool]
for get in (GET, GET_ITH):
    get.restype = ctypes.POINTER(ctypes.c_float)
GET.argtypes, GET_ITH.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int32]


def open_context(model, kind):
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 256, 256, 256, 1
    params.n_threads_batch, params.ctx_type = 1, kind
    params.type_k = params.type_v = 0  # float32
    params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    assert context, "llama.cpp made no context"
    return context


def run(context, tokens, first, states=None):
    """Run tokens from a position on, each with a state [n, D] where the graph reads one."""
    batch = lib.llama_batch_ext_init(context)
    for at, token in enumerate(tokens):
        place = lib.llama_batch_ext_add_token(batch, 0, token)
        assert place == at
        position = (lib.llama_pos * 4)(first + at, first + at, first + at, 0)
        assert lib.llama_batch_ext_set_pos(batch, at, position)
        lib.llama_batch_ext_set_output_logits(batch, at, states is None or at == len(tokens) - 1)
        if states is not None:
            row = states[at].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            state = lib.llama_cpp.llama_embd(row, 1, states.shape[1])
            assert lib.llama_batch_ext_set_embd_token(batch, at, state)
    assert lib.llama_process(context, lib.LLAMA_PROCESS_TYPE_DECODE, batch) == 0
    lib.llama_batch_ext_free(batch)


def widen(path, output):
    """Write a model with all weights in float32: products of other types round what they read."""
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = lib.LLAMA_FTYPE_ALL_F32, 1
    assert lib.llama_model_quantize(path.encode(), output.encode(), ctypes.byref(params)) == 0


def main(path, size, first):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as wide:
        widen(path, wide.name)
        draft_all(wide.name, size, first)


def draft_all(path, size, first):
    params = lib.llama_model_default_params()
    params.load_mtp, params.n_gpu_layers = True, 0
    model = lib.llama_model_load_from_file(path.encode(), params)
    width = lib.llama_model_n_embd(model)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    drafts = []
    for text in json.load(sys.stdin):
        target, draft = open_context(model, 0), open_context(model, lib.LLAMA_CONTEXT_TYPE_MTP)
        SET(target, True, False)
        SET(draft, True, True)
        run(target, text[:-1], 0)
        states = np.ctypeslib.as_array(GET(target), (len(text) - 1, width)).copy()
        if first:
            run(draft, text[:1], 0, np.zeros((1, width), np.float32))
        found = []
        if len(text) > 2:
            run(draft, text[1:-1], 1, states[:-1])
        tokens, states = text[-1:], states[-1:]  # alone: the graph tells the first state of a pass
        for place in range(len(text) - 1, len(text) - 1 + size):
            run(draft, tokens, place, states)
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(draft, -1), (vocab,))
            token = int(logits.argmax())
            found.append(token)
            states = np.ctypeslib.as_array(GET_ITH(draft, 0), (1, width)).copy()
            tokens = [token]
        drafts.append(found)
        lib.llama_free(target)
        lib.llama_free(draft)
    print(json.dumps(drafts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
