"""GGUF files that llama.cpp's own converter writes, of folders with made tokenizers."""

from __future__ import annotations

import sys
from pathlib import Path

from .processes import run_logged

# The converter knows no byte-level tokenizer but published ones, and imports SentencePiece before
# it finds that a folder has none.
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
def lack_model(self):
    raise FileNotFoundError("tokenizer.model")
TextModel._create_vocab_sentencepiece = lack_model
sys.argv = sys.argv[1:]
runpy.run_path(f"{sys.argv[0]}/convert_hf_to_gguf.py", run_name="__main__")
"""
# Instead of a large tensor, which is then never read, the file has a hole.
LEAVE_HOLES = """
import gguf, os
def leave_holes(writer, progress=False):
    writer.write_ti_data_to_file()
    for file, tensors in zip(writer.fout, writer.tensors):
        writer.write_padding(file, file.tell())
        for tensor in tensors.values():
            if tensor.nbytes > 1 << 16:
                file.seek(tensor.nbytes, os.SEEK_CUR)
            else:  # such as factors of frequencies, which follow from config.json
                tensor.tensor.tofile(file)
            writer.write_padding(file, tensor.nbytes)
        file.truncate(file.tell())
gguf.GGUFWriter.write_tensors_to_file = leave_holes
"""


def convert_folder(
    source: Path, folder: Path, file: Path, log: Path, kind: str = "bf16", *flags: str,
    has_zeros: bool = False,
) -> None:  # fmt: skip
    """Convert a Hugging Face folder by the converter in llama.cpp's checkout; raise PeerError.

    has_zeros: matrices are not read, and the file has zeros in their place, in no time.
    """
    program = CONVERT
    if has_zeros:
        program = program.replace("sys.argv = ", LEAVE_HOLES + "sys.argv = ", 1)
    words: list[str | Path] = [sys.executable, "-c", program, source, folder, "--outfile", file]
    run_logged([*words, "--outtype", kind, *flags], log, f"converting {folder.name}")
