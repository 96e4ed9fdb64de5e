"""Quantized matrices of Hugging Face folders: numbers, scales and zeros as formats pack them.

Every matrix [out, in] is read in blocks of rows, whatever way the format lays it out, so memory
does not depend on its size. Its weights are what the format's own library computes, bit for bit:
number * scale in float32, which is exact for a few bits and a 16-bit scale, rounded once to the
type of the scales. DeepSeek's blocks of float8 and ModelOpt's formats stay in float32.

Sources: AutoAWQ 0.2.9 `awq/utils/packing_utils.py`; GPTQModel 7.7.0 `nn_modules/qlinear`;
compressed-tensors 0.20.0 `compressors`; ModelOpt 0.47.0 `quantization/qtensor` and
`export/quant_utils.py`; DeepSeek-V3 `inference/kernel.py` (blocks of float8).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.errors import SpecDecError
from specdec.files.casts import cast
from specdec.files.reading import Array
from specdec.files.tensor_file import DTYPES, TensorInfo
from specdec.model import int4
from specdec.model.quantization import ALGORITHMS, FLOAT8, INPUT_SCALE, WEIGHT_SCALE

from ..hf import HfFolder
from .float8 import E8M0, decode, to_float32

FLOATS = int4.SCALE_DTYPES
BLOCK_ITEMS = 1 << 17  # weights that are computed at a time, in a core's cache
# AutoAWQ packs outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight from the lowest nibble up; this is where
# each of them lies.
AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


def split_nibbles(data: Array) -> Array:
    """Split bytes uint8 [rows, n] into numbers uint8 [rows, 2n], 0 to 15, the low one first."""
    numbers = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    numbers[..., 0::2] = data & np.uint8(15)
    numbers[..., 1::2] = data >> np.uint8(4)
    return numbers


def unpack_words(words: Array, bits: int) -> Array:
    """Split int32 words [rows, n] into numbers uint8 [rows, n * 32 / bits], the lowest first."""
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return data if bits == 8 else split_nibbles(data)


class Matrix:
    """A quantized matrix of a folder.

    stem: its module's name; shape: [out, in]; dtype: the type of its weights in the format's own
    library, which is that of the scales where a checkpoint keeps these; weight_dtype: the weights'
    where it is another one. used_names: the stored tensors that it is made of.
    """

    shape: tuple[int, int]
    dtype: str
    weight_dtype: str = ""

    def __init__(self, folder: HfFolder, stem: str) -> None:
        self.folder = folder
        self.stem = stem
        self.used_names: list[str] = []

    def compute(self, start: int, stop: int) -> Array:
        """Return the weights of rows [start, stop), in the storage of `info.dtype`: [rows, in]."""
        numbers = self.read_numbers(start, stop)
        dtype = self.info.dtype
        result = np.empty(numbers.shape, DTYPES[dtype][1])
        height = max(1, BLOCK_ITEMS // self.shape[1])
        for top in range(start, stop, height):
            bottom = min(top + height, stop)
            rows = slice(top - start, bottom - start)
            weights = self.multiply(numbers[rows], top, bottom)
            result[rows] = cast(weights, "float32", dtype)
        return result

    @property
    def info(self) -> TensorInfo:
        """Type and shape of the weights."""
        return TensorInfo(self.weight_dtype or self.dtype, self.shape)

    def read_numbers(self, start: int, stop: int) -> Array:
        """Return the stored numbers of rows [start, stop): uint8 [rows, in]."""
        raise NotImplementedError

    def multiply(self, numbers: Array, start: int, stop: int) -> Array:
        """Return the weights that numbers of rows [start, stop) stand for: float32 [rows, in]."""
        raise NotImplementedError

    def list_stored(self) -> dict[str, TensorInfo]:
        """List types and shapes of what a checkpoint holds of the matrix, by kind."""
        raise NotImplementedError

    def read_stored(self, kind: str, start: int, stop: int) -> Array:
        """Return rows [start, stop) of one of those."""
        raise NotImplementedError

    def get(self, kind: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> str:
        """Return the name of one of the matrix' tensors, which must have a type and a shape."""
        name = f"{self.stem}.{kind}"
        info = self.folder.tensors.get(name)
        if info is None:
            raise SpecDecError(
                f"{self.folder.path} lacks {name}", "copy or download the folder again"
            )
        if info.dtype not in dtypes or (shapes and info.shape not in shapes):
            wanted_shapes = " or ".join(str(list(shape)) for shape in shapes)
            raise SpecDecError(
                f"{self.folder.path}: {name} is {info.dtype} {list(info.shape)}, not"
                f" {' or '.join(dtypes)} {wanted_shapes}".rstrip(),
                "its config.json and tensors disagree, or a file is damaged: copy the folder again",
            )
        self.used_names.append(name)
        return name

    def has(self, kind: str) -> bool:
        """Return whether the folder has one of the matrix' tensors."""
        return f"{self.stem}.{kind}" in self.folder.tensors

    def get_sizes(self, kind: str, dtypes: Sequence[str]) -> tuple[int, int]:
        """Return the sizes of one of the matrix' tensors, which must have two dimensions."""
        name = self.get(kind, dtypes)
        shape = self.folder.tensors[name].shape
        if len(shape) != 2 or 0 in shape:
            raise SpecDecError(
                f"{self.folder.path}: {name} has shape {list(shape)}, not that of a matrix",
                "a file is damaged: copy or download the folder again",
            )
        return shape

    def refuse(self, fact: str, remedy: str) -> SpecDecError:
        """Return an error about this matrix."""
        return SpecDecError(f"{self.folder.path}: {self.stem}: {fact}", remedy)


class IntMatrix(Matrix):
    """Whole numbers in groups of columns: weight = (number - zero) * scale.

    group_size: columns of a group; -1: all of a row's. input_scale: what the input is multiplied
    with first, by name, where there is such a vector.
    """

    SYMMETRY_REMEDY = "correct that key, or get the model from its origin"
    bits: int = 4
    num_groups: int
    input_scale: str | None = None
    input_dtype: str = "float32"

    def __init__(self, folder: HfFolder, stem: str, group_size: int) -> None:
        super().__init__(folder, stem)
        self.group_size = group_size
        # The input of each column when columns are sorted by group; None: they are already.
        self.order: Array | None = None

    def read_scales(self, start: int, stop: int) -> Array:
        """Return the scales of rows [start, stop), in the storage of `dtype`: [rows, groups].

        They are stored as [groups, out] under the name that AutoAWQ and GPTQ have.
        """
        name, columns = f"{self.stem}.scales", (start, stop)
        return np.ascontiguousarray(self.folder.read_block(name, 0, self.num_groups, columns).T)

    def read_zeros(self, start: int, stop: int) -> Array:
        """Return the zeros of rows [start, stop), the middle of the numbers where none are stored.

        uint8 [rows, groups].
        """
        return np.full((stop - start, self.num_groups), self.symmetric_zero, np.uint8)

    def list_stored(self) -> dict[str, TensorInfo]:
        groups, inputs = (self.shape[0], self.num_groups), self.shape[1:]
        return {
            "weight": TensorInfo("uint8", self.shape),
            WEIGHT_SCALE: TensorInfo(self.dtype, groups),
            int4.ZERO_POINT: TensorInfo("uint8", groups),
            INPUT_SCALE: TensorInfo(self.input_dtype, inputs),
            int4.PERMUTATION: TensorInfo("int32", inputs),
        }

    def read_stored(self, kind: str, start: int, stop: int) -> Array:
        if kind == WEIGHT_SCALE:
            return self.read_scales(start, stop)
        if kind == int4.ZERO_POINT:
            return self.read_zeros(start, stop)
        if kind == INPUT_SCALE:
            if self.input_scale is None:  # where others have one, TensorRT-LLM asks all for it
                return cast(np.ones(stop - start, np.float32), "float32", self.input_dtype)
            return self.folder.read(self.input_scale)[start:stop]
        if kind == int4.PERMUTATION:
            assert self.order is not None
            return self.order[start:stop]
        codes = self.read_numbers(start, stop)
        return codes if self.order is None else codes[:, self.order]

    @property
    def symmetric_zero(self) -> int:
        return 1 << (self.bits - 1)

    def has_zeros(self) -> bool:
        """Return whether any zero differs from the middle of the numbers."""
        return bool((self.read_zeros(0, self.shape[0]) != self.symmetric_zero).any())

    def check_symmetry(self, section_key: str) -> None:
        """Refuse zeros other than the middle, of a section that says that there are none."""
        zeros = self.read_zeros(0, self.shape[0])
        is_other = zeros != self.symmetric_zero
        if is_other.any():
            raise self.refuse(
                f"{section_key} in its section says that every zero is {self.symmetric_zero}, and"
                f" {int(is_other.sum())} of its {zeros.size} are others, such as"
                f" {int(zeros[is_other][0])}; some libraries read them, others do not",
                self.SYMMETRY_REMEDY,
            )

    def multiply(self, numbers: Array, start: int, stop: int) -> Array:
        scales = cast(self.read_scales(start, stop), self.dtype, "float32")
        zeros = self.read_zeros(start, stop)
        if self.order is None:
            return self._fold_input(int4.dequantize(numbers, scales, zeros))
        weights = np.empty(numbers.shape, np.float32)
        weights[:, self.order] = int4.dequantize(numbers[:, self.order], scales, zeros)
        return weights

    def read_input_scale(self) -> Array | None:
        """Return what the input is multiplied with, as it is stored: [in]."""
        return None if self.input_scale is None else self.folder.read(self.input_scale)

    def count_groups(self) -> int:
        """Return the groups of a row, by the section's group size."""
        num_inputs = self.shape[1]
        size = num_inputs if self.group_size == -1 else self.group_size
        if size < 1 or num_inputs % size:
            raise self.refuse(
                f"{num_inputs} columns are no multiple of group_size {self.group_size}",
                "correct group_size of its config.json, or convert the unquantized model",
            )
        return num_inputs // size

    def set_groups(self, kind: str, *, is_stored: bool) -> None:
        """Read which group each column belongs to, where the folder says so.

        is_stored: whether columns are in another order by its section, so that it must say so.
        """
        if not self.has(kind):
            if is_stored and self.num_groups > 1:
                raise self.refuse(
                    f"its {self.shape[1]} columns are in {self.num_groups} groups by the order of"
                    f" activations, and {kind}, which tells the group of each, is missing",
                    "copy or download the folder again; a tool that wrote it without that tensor"
                    " has lost the order: get the model from its origin",
                )
            return
        groups = self.folder.read(self.get(kind, ("int32",), (self.shape[1],)))
        size = self.shape[1] // self.num_groups
        expected = np.repeat(np.arange(self.num_groups), size)
        if np.array_equal(groups, expected):
            return
        order = np.argsort(groups, kind="stable")
        if not np.array_equal(groups[order], expected):
            raise self.refuse(
                f"{kind} does not have each of {self.num_groups} groups {size} times",
                "the file is damaged: copy or download the folder again",
            )
        self.order = order.astype(np.int32)

    def _fold_input(self, weights: Array) -> Array:
        """Multiply columns with what the input would be multiplied with."""
        if self.input_scale is None:
            return weights
        vector = cast(self.folder.read(self.input_scale), self.input_dtype, "float32")
        return np.multiply(weights, vector, out=weights)


class AwqMatrix(IntMatrix):
    """AutoAWQ's gemm layout: everything is [in, out], eight outputs a word."""

    def __init__(
        self, folder: HfFolder, stem: str, group_size: int, *, is_symmetric: bool = False
    ) -> None:
        super().__init__(folder, stem, group_size)
        num_inputs, words = self.get_sizes("qweight", ("int32",))
        self.shape = (8 * words, num_inputs)
        self.num_groups = self.count_groups()
        scales = self.get("scales", FLOATS, (self.num_groups, 8 * words))
        self.get("qzeros", ("int32",), (self.num_groups, words))
        self.dtype = folder.tensors[scales].dtype
        if is_symmetric:
            self.check_symmetry("zero_point false")

    def read_numbers(self, start: int, stop: int) -> Array:
        return self._read("qweight", self.shape[1], start, stop)

    def read_zeros(self, start: int, stop: int) -> Array:
        return self._read("qzeros", self.num_groups, start, stop)

    def _read(self, kind: str, height: int, start: int, stop: int) -> Array:
        first_word, last_word = start // 8, -(-stop // 8)
        words = self.folder.read_block(f"{self.stem}.{kind}", 0, height, (first_word, last_word))
        numbers = unpack_words(words, 4).reshape(height, last_word - first_word, 8)[
            :, :, AWQ_PLACES
        ]
        rows = numbers.reshape(height, -1)[:, start - 8 * first_word : stop - 8 * first_word]
        return np.ascontiguousarray(rows.T)


class GptqMatrix(IntMatrix):
    """GPTQ's layout: [in, out], several inputs a word; zeros several outputs a word.

    zero_offset: 1 where zeros are stored less one (checkpoint_format gptq), else 0. carries:
    whether the one was taken from whole words, as GPTQModel does, so that it is given back to them.
    is_ordered: whether inputs were quantized by the order of activations, in groups of that order.
    is_symmetric: whether every zero is the middle, by the section.
    """

    SYMMETRY_REMEDY = (
        "correct checkpoint_format, where the zeros are all one more or one less; or sym, where the"
        " model was quantized with zeros of its own"
    )

    def __init__(
        self, folder: HfFolder, stem: str, group_size: int, bits: int, zero_offset: int, *,
        carries: bool, is_ordered: bool = False, is_symmetric: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(folder, stem, group_size)
        self.bits, self.zero_offset, self.carries = bits, zero_offset, carries
        per_word = 32 // bits
        words, num_outputs = self.get_sizes("qweight", ("int32",))
        self.shape = (num_outputs, words * per_word)
        self.num_groups = self.count_groups()
        scales = self.get("scales", FLOATS, (self.num_groups, num_outputs))
        self.get("qzeros", ("int32",), (self.num_groups, -(-num_outputs // per_word)))
        self.dtype = folder.tensors[scales].dtype
        self.set_groups("g_idx", is_stored=is_ordered)
        self._check_zeros()
        if is_symmetric:
            self.check_symmetry("sym true")

    def read_numbers(self, start: int, stop: int) -> Array:
        words = self.folder.read_block(
            f"{self.stem}.qweight", 0, self.shape[1] * self.bits // 32, (start, stop)
        )
        return unpack_words(words.T, self.bits)

    def read_zeros(self, start: int, stop: int) -> Array:
        per_word = 32 // self.bits
        first_word, last_word = start // per_word, -(-stop // per_word)
        words = self.folder.read_block(
            f"{self.stem}.qzeros", 0, self.num_groups, (first_word, last_word)
        )
        if self.carries:
            ones_word = sum(self.zero_offset << shift for shift in range(0, 32, self.bits))
            words = (words.view(np.uint32) + np.uint32(ones_word)).view(np.int32)
        zeros = unpack_words(words, self.bits)[
            :, start - per_word * first_word : stop - per_word * first_word
        ]
        if not self.carries:
            zeros = zeros + np.uint8(self.zero_offset)
        return np.ascontiguousarray(zeros.T)

    def _check_zeros(self) -> None:
        """Refuse stored zeros to which no one can be added: libraries differ in what they are."""
        if not self.zero_offset or self.carries:
            return
        words = self.folder.read(f"{self.stem}.qzeros")
        largest_zero = (1 << self.bits) - 1
        number = int((unpack_words(words, self.bits)[:, : self.shape[0]] == largest_zero).sum())
        if number:
            raise self.refuse(
                f"{number} zeros are stored as {largest_zero} in checkpoint_format gptq, which"
                f" AutoGPTQ reads as 0 or {largest_zero + 1} by its release, and GPTQModel carries"
                " into the next",
                "get the model in checkpoint_format gptq_v2, or convert the unquantized model",
            )


class PackedMatrix(IntMatrix):
    """compressed-tensors' pack-quantized: [out, in], several inputs a word.

    is_ordered: whether groups are those of inputs in the order of activations. is_symmetric:
    whether groups have no zeros of their own, by the section.
    """

    def __init__(
        self, folder: HfFolder, stem: str, group_size: int, bits: int, *, is_ordered: bool = False,
        is_symmetric: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(folder, stem, group_size)
        self.bits = bits
        per_word = 32 // bits
        name = self.get("weight_shape", ("int64", "int32"), (2,))
        num_outputs, num_inputs = (int(size) for size in folder.read(name))
        if num_outputs < 1 or num_inputs < 1:
            raise self.refuse(
                f"weight_shape is [{num_outputs}, {num_inputs}]",
                "a file is damaged: copy or download the folder again",
            )
        self.get("weight_packed", ("int32",), (num_outputs, -(-num_inputs // per_word)))
        self.shape = (num_outputs, num_inputs)
        self.num_groups = self.count_groups()
        shapes = [(num_outputs, self.num_groups)] + [(num_outputs,)] * (self.num_groups == 1)
        self.dtype = folder.tensors[self.get("weight_scale", FLOATS, *shapes)].dtype
        self.zeros: str | None = None
        if not is_symmetric or self.has("weight_zero_point"):
            shape = (-(-num_outputs // per_word), self.num_groups)
            self.zeros = self.get("weight_zero_point", ("int32",), shape)
            if is_symmetric:
                self.check_symmetry("symmetric true")
        self.set_groups("weight_g_idx", is_stored=is_ordered)

    def read_numbers(self, start: int, stop: int) -> Array:
        words = self.folder.read_block(f"{self.stem}.weight_packed", start, stop)
        return unpack_words(words, self.bits)[:, : self.shape[1]]

    def read_scales(self, start: int, stop: int) -> Array:
        scales = self.folder.read_block(f"{self.stem}.weight_scale", start, stop)
        return scales.reshape(stop - start, self.num_groups)

    def read_zeros(self, start: int, stop: int) -> Array:
        if self.zeros is None:
            return super().read_zeros(start, stop)
        per_word = 32 // self.bits
        first_word, last_word = start // per_word, -(-stop // per_word)
        words = self.folder.read_block(self.zeros, first_word, last_word)
        zeros = unpack_words(words.T, self.bits)
        return np.ascontiguousarray(
            zeros[:, start - per_word * first_word : stop - per_word * first_word].T
        )


class ModeloptInt4Matrix(IntMatrix):
    """ModelOpt's INT4 AWQ: pairs of outputs in a byte, no zeros, the input scaled first."""

    weight_dtype = "float32"

    def __init__(self, folder: HfFolder, stem: str, group_size: int) -> None:
        super().__init__(folder, stem, group_size)
        half, num_inputs = self.get_sizes("weight", int4.INT4_STORAGE)
        self.shape = (2 * half, num_inputs)
        self.num_groups = self.count_groups()
        shape = (2 * half, self.num_groups)
        self.dtype = folder.tensors[self.get("weight_scale", FLOATS, shape)].dtype
        if self.has("pre_quant_scale"):
            self.input_scale = self.get("pre_quant_scale", FLOATS, (num_inputs,))
            self.input_dtype = folder.tensors[self.input_scale].dtype

    def read_numbers(self, start: int, stop: int) -> Array:
        return int4.read_codes(self.folder, f"{self.stem}.weight", start, stop)

    def read_scales(self, start: int, stop: int) -> Array:
        return self.folder.read_block(f"{self.stem}.weight_scale", start, stop)


class Float8Matrix(Matrix):
    """float8 with one scale, one a row, or one a block of rows and columns.

    block: rows and columns of a block; None: no blocks. in_scale_dtype: whether the library rounds
    the weights to the type of the scales.
    """

    def __init__(
        self, folder: HfFolder, stem: str, block: tuple[int, int] | None, *, in_scale_dtype: bool
    ) -> None:
        super().__init__(folder, stem)
        self.shape = num_outputs, num_inputs = self.get_sizes("weight", (FLOAT8,))
        self.block = block or self.shape
        # DeepSeek's name for what the weight is multiplied with.
        kind = "weight_scale_inv" if self.has("weight_scale_inv") else "weight_scale"
        if block is None:
            shapes = [(), (1,), (1, 1), (num_outputs,), (num_outputs, 1)]
        else:
            shapes = [(-(-num_outputs // block[0]), -(-num_inputs // block[1]))]
        # uint8: e8m0 as writers store it whose safetensors has no such type.
        dtypes = (*FLOATS, E8M0) if block is None else (*FLOATS, E8M0, "uint8")
        self.scale = self.get(kind, dtypes, *shapes)
        stored = folder.tensors[self.scale].dtype
        self.scale_dtype = E8M0 if stored == "uint8" else stored
        self.dtype = stored if in_scale_dtype and stored in FLOATS else "float32"
        if num_broken := int((~np.isfinite(self.read_scales())).sum()):
            raise self.refuse(
                f"{kind} has {num_broken} scales that are NaN or infinite",
                "a file is damaged: copy or download the folder again",
            )
        if self.has("input_scale"):
            self.get("input_scale", FLOATS, (), (1,))

    def list_stored(self) -> dict[str, TensorInfo]:
        if self.has("input_scale"):
            raise self.refuse(
                "it has an input_scale, and its config.json says that inputs are scaled as they"
                " come",
                "correct quantization_config, or add --dequantize",
            )
        return ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"].describe(self.shape, "float32", 0)

    def read_stored(self, kind: str, start: int, stop: int) -> Array:
        if kind == "weight":
            return self.read_numbers(start, stop)
        return np.broadcast_to(self.read_scales().reshape(-1), self.shape[:1])[start:stop]

    def read_scales(self) -> Array:
        """Return all scales in float32."""
        return to_float32(self.folder.read(self.scale), self.scale_dtype)

    def read_numbers(self, start: int, stop: int) -> Array:
        return self.folder.read_block(f"{self.stem}.weight", start, stop)

    def multiply(self, numbers: Array, start: int, stop: int) -> Array:
        scales = self.read_scales()
        if self.block == self.shape:
            column = np.broadcast_to(scales.reshape(-1, 1), (self.shape[0], 1))[start:stop]
            scaled_rows: Array = np.multiply(decode(numbers), column)
            return scaled_rows
        rows = np.arange(start, stop) // self.block[0]
        columns = np.arange(self.shape[1]) // self.block[1]
        weights: Array = np.multiply(decode(numbers), scales[rows][:, columns])
        return weights
