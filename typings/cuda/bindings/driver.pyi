"""The part of cuda.bindings.driver that warpring uses; the package itself is compiled and carries no types."""

from enum import IntEnum

class CUresult(IntEnum):
    CUDA_SUCCESS = 0

class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

class CUkernel:
    def __init__(self, init_value: int) -> None: ...

def cuKernelSetAttribute(attrib: CUfunction_attribute, val: int, kernel: CUkernel, dev: int) -> tuple[CUresult]: ...
