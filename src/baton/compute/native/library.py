"""The C interface of api.cpp through ctypes: the same structures, and functions that raise on errors."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

from baton.compute.models.dtype import WeightKind
from baton.core.errors import ModelError
from baton.decide.kv.layout import KVDtype
from baton.move.compiling import NativeUnavailableError

DTYPE_CODES: dict[KVDtype, int] = {"float32": 0, "bfloat16": 1}
"""Codes of `enum class DType` for the types of activations in a GEMM."""
KV_DTYPE_CODES: dict[KVDtype, int] = {**DTYPE_CODES, "int8": 6, "fp8": 7, "fp4": 8, "mxfp4": 9}
"""Codes of `enum class DType` for the types of stored KV."""
WEIGHT_DTYPE_CODES: dict[WeightKind, int] = {"dense": 1, "int8": 2, "q8": 3, "q4": 4, "q4m": 5}
"""Codes of `enum class DType` for weights. Dense weights have the type of products."""


class NativeLatentSizes(Structure):
    """Mirror of the C struct `BatonLatentSizes`. All 0: no latent attention. q_rank 0: queries have no bottleneck."""

    _fields_ = (
        ("q_rank", c_int32),
        ("kv_rank", c_int32),
        ("rope_dim", c_int32),
        ("nope_dim", c_int32),
        ("value_dim", c_int32),
        ("score_scale", c_float),
    )


class NativeModel(Structure):
    """Mirror of the C struct `BatonModel`: sizes, types and threads of a new engine."""

    _fields_ = (
        ("layers", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("rms_eps", c_float),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("block_tokens", c_int32),
        ("threads", c_int32),
        ("kernels", c_char_p),
        ("cores", POINTER(c_int32)),
        ("latent", NativeLatentSizes),
    )


class NativeMatrix(Structure):
    """Mirror of the C struct `BatonMatrix`: a matrix [rows, inputs] and its bias, or null.

    The matrix has the type of products, or is quantized with scales.
    """

    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("rows", c_int32),
        ("inputs", c_int32),
        ("dtype", c_int32),
        ("scales", c_void_p),
        ("minimums", c_void_p),
    )


class NativeLayer(Structure):
    """Mirror of the C struct `BatonLayer`. q_norm and k_norm may be null. window 0: no attention window."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", NativeMatrix),
        ("o", NativeMatrix),
        ("window", c_int32),
    )


class NativeLatent(Structure):
    """Mirror of the C struct `BatonLatent`. If q_norm is null, `queries` has no data.

    keys and values are dense, with one head after the other.
    """

    _fields_ = (
        ("q_norm", c_void_p),
        ("kv_norm", c_void_p),
        ("queries", NativeMatrix),
        ("keys", NativeMatrix),
        ("values", NativeMatrix),
    )


class NativeMlp(Structure):
    """Mirror of the C struct `BatonMlp`: gate and up projections in one matrix, and the down projection."""

    _fields_ = (("gate_up", NativeMatrix), ("down", NativeMatrix))


class NativeRouter(Structure):
    """Mirror of the C struct `BatonRouter`: scores [experts, hidden] in float32, and the choice of experts.

    If a shared MLP has a gate, the gate is one more row of scores. choice_bias: [experts] in float32, or null.
    """

    _fields_ = (
        ("scores", NativeMatrix),
        ("experts", c_int32),
        ("used", c_int32),
        ("normalized", c_int32),
        ("sigmoid", c_int32),
        ("groups", c_int32),
        ("groups_used", c_int32),
        ("group_best", c_int32),
        ("scale", c_float),
        ("choice_bias", c_void_p),
    )


class NativeStep(Structure):
    """Mirror of the C struct `BatonStep`: the inputs of one step. read null: all tokens."""

    _fields_ = (
        ("slices", c_int32),
        ("rows", c_int32),
        ("entries", c_int32),
        ("positions", c_int32),
        ("tokens", c_void_p),
        ("counts", c_void_p),
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("block_counts", c_void_p),
        ("angles", c_void_p),
        ("layers_done", c_void_p),
        ("read", c_void_p),
    )


class NativeLibrary:
    """The loaded library. Calls release the GIL, as ctypes does."""

    def __init__(self, path: Path, kernels: str = "") -> None:
        """kernels: the instruction set to use. Empty: the best one of this machine.

        Raises NativeUnavailableError if the best one is plain C++, because torch is faster, or the file is invalid.
        """
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailableError(f"{error}; remove {path} to have it built again") from error
        dll = self._dll
        returning_errors = (
            dll.baton_new, dll.baton_set_layer, dll.baton_set_latent, dll.baton_set_router, dll.baton_add_mlp,
            dll.baton_share_weights, dll.baton_attach_weights, dll.baton_finish_weights, dll.baton_forward,
            dll.baton_project, dll.baton_read,
        )  # fmt: skip
        for function in (*returning_errors, dll.baton_usable_kernels):
            function.restype = c_char_p
        self._dll.baton_recalls.restype = c_int64
        self._dll.baton_add_guest.restype = c_bool
        self.path = path
        self.kernels = kernels or self._best()

    def _best(self) -> str:
        best = self.usable_kernels()[0]
        if best == "PLAIN":
            raise NativeUnavailableError("this CPU has neither AVX2 nor NEON: PyTorch is faster")
        return best

    def usable_kernels(self) -> list[str]:
        """Return the names of this machine's instruction sets, the best first. The last one is always PLAIN."""
        names: list[str] = []
        while (name := self._dll.baton_usable_kernels(c_int32(len(names)))) is not None:
            names.append(name.decode())
        return names

    def new(self, model: NativeModel) -> int:
        """Create an engine without weights, to be freed by `free`. Raises ModelError if memory or threads run out."""
        handle = c_void_p()
        _raise(self._dll.baton_new(ctypes.byref(model), ctypes.byref(handle)))
        assert handle.value is not None, "the library returned neither an engine nor an error"
        return handle.value

    def free(self, handle: int) -> None:
        self._dll.baton_free(c_void_p(handle))

    def set_arena(self, handle: int, address: int, blocks: int) -> None:
        self._dll.baton_set_arena(c_void_p(handle), c_void_p(address), c_int64(blocks))

    def set_spill(self, handle: int, address: int, slots: int) -> None:
        self._dll.baton_set_spill(c_void_p(handle), c_void_p(address), c_int64(slots))

    def weights(self, handle: int) -> NativeWeights:
        """Return the interface that sets an engine's weights. Use it before the first step."""
        return NativeWeights(self._dll, handle)

    def forward(self, handle: int, step: NativeStep) -> None:
        """Compute a step. Its hidden states stay valid until the next step.

        Raises ModelError for an invalid step, and then nothing is written.
        """
        _raise(self._dll.baton_forward(c_void_p(handle), ctypes.byref(step)))

    def project(self, handle: int, rows: int, count: int, logits: int) -> None:
        """Write the logits [count, vocab] of `count` rows of the last step to the address `logits`.

        rows: address of the int32 indices of these rows.
        """
        _raise(self._dll.baton_project(c_void_p(handle), c_void_p(rows), c_int32(count), c_void_p(logits)))

    def read(self, handle: int, rows: int, count: int, hidden: int) -> None:
        """Write `count` rows of the last step after the final norm to the address `hidden`: [count, hidden], float32.

        rows: address of the int32 indices of these rows.
        """
        _raise(self._dll.baton_read(c_void_p(handle), c_void_p(rows), c_int32(count), c_void_p(hidden)))

    def guests(self, handle: int) -> NativeGuests:
        """Return the interface that lets an engine's steps use cores of other workers."""
        return NativeGuests(self._dll, handle)


class NativeWeights:
    """Sets an engine's weights, layer by layer. The library copies them. All functions raise ModelError."""

    def __init__(self, dll: ctypes.CDLL, handle: int) -> None:
        self._dll = dll
        self._handle = c_void_p(handle)

    def set_layer(self, index: int, layer: NativeLayer) -> None:
        """Set the norms and the attention of a layer."""
        _raise(self._dll.baton_set_layer(self._handle, c_int32(index), ctypes.byref(layer)))

    def set_latent(self, index: int, latent: NativeLatent) -> None:
        """Set all weights of latent attention but the qkv matrix, which `set_layer` sets."""
        _raise(self._dll.baton_set_latent(self._handle, c_int32(index), ctypes.byref(latent)))

    def set_router(self, index: int, router: NativeRouter) -> None:
        """Set the router of a layer with experts."""
        _raise(self._dll.baton_set_router(self._handle, c_int32(index), ctypes.byref(router)))

    def add_mlp(self, index: int, mlp: NativeMlp) -> None:
        """Add the MLP of a layer; or one expert after the other, and then the shared MLP."""
        _raise(self._dll.baton_add_mlp(self._handle, c_int32(index), ctypes.byref(mlp)))

    def share(self, file: int, key: str) -> None:
        """Write the weights that are set from now on into an empty memory file, which `finish_weights` seals."""
        _raise(self._dll.baton_share_weights(self._handle, c_int32(file), c_char_p(key.encode())))

    def attach(self, file: int, key: str) -> None:
        """Map all weights read-only from a file that `share` filled with the same key. Reads and copies no bytes."""
        _raise(self._dll.baton_attach_weights(self._handle, c_int32(file), c_char_p(key.encode())))

    def finish_weights(self, final_norm: int, head: NativeMatrix, embedding: NativeMatrix | None) -> None:
        """Set the final norm, the output projection, and the embedding if it is another matrix. Call this last."""
        pointer = None if embedding is None else ctypes.byref(embedding)
        _raise(self._dll.baton_finish_weights(self._handle, c_void_p(final_norm), ctypes.byref(head), pointer))


class NativeGuests:
    """The cores of other workers that an engine's steps may use (guest cores)."""

    def __init__(self, dll: ctypes.CDLL, handle: int) -> None:
        self._dll = dll
        self._handle = handle

    def add_guest(self, core: int) -> bool:
        """Use one more core while its owner is idle. Return whether the system allows it.

        The core gets a thread of the scheduling class SCHED_IDLE. The engine must have been created with `cores`, and
        no step may run.
        """
        allowed: bool = self._dll.baton_add_guest(c_void_p(self._handle), c_int32(core))
        return allowed

    def recalls(self) -> int:
        """Return the number of steps that continued without guest cores, because their owners became active."""
        found: int = self._dll.baton_recalls(c_void_p(self._handle))
        return found


def _raise(message: bytes | None) -> None:
    if message is not None:
        raise ModelError(f"the native engine refused a call: {message.decode(errors='replace')}")
