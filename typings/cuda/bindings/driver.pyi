"""The part of cuda.bindings.driver that warpring uses; the package itself is compiled and carries no types."""

from collections.abc import Sequence
from enum import IntEnum

class CUresult(IntEnum):
    CUDA_SUCCESS = 0

class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

class CUkernel:
    def __init__(self, init_value: int) -> None: ...

def cuKernelSetAttribute(attrib: CUfunction_attribute, val: int, kernel: CUkernel, dev: int) -> tuple[CUresult]: ...

class CUfunction:
    def __init__(self, init_value: int) -> None: ...

class CUstream:
    def __init__(self, init_value: int) -> None: ...

class CUcontext:
    def __init__(self, init_value: int) -> None: ...
    def __int__(self) -> int: ...

class CUgraph: ...
class CUgraphNode: ...

class CUlaunchAttributeID(IntEnum):
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

class CUlaunchAttributeValue:
    programmaticStreamSerializationAllowed: int

class CUlaunchAttribute:
    id: CUlaunchAttributeID
    value: CUlaunchAttributeValue

class CUlaunchConfig:
    gridDimX: int
    gridDimY: int
    gridDimZ: int
    blockDimX: int
    blockDimY: int
    blockDimZ: int
    sharedMemBytes: int
    hStream: CUstream
    attrs: list[CUlaunchAttribute]
    numAttrs: int

def cuLaunchKernelEx(config: CUlaunchConfig, f: CUfunction, kernelParams: int, extra: int) -> tuple[CUresult]: ...

CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: int

class CUgraphDependencyType(IntEnum):
    CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1

class CUstreamUpdateCaptureDependencies_flags(IntEnum):
    CU_STREAM_SET_CAPTURE_DEPENDENCIES = 1

class CUgraphNodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0

class CUDA_KERNEL_NODE_PARAMS:
    kern: CUkernel
    ctx: CUcontext
    gridDimX: int
    gridDimY: int
    gridDimZ: int
    blockDimX: int
    blockDimY: int
    blockDimZ: int
    sharedMemBytes: int
    kernelParams: int

class CUgraphNodeParams:
    type: CUgraphNodeType
    kernel: CUDA_KERNEL_NODE_PARAMS

class CUgraphEdgeData:
    from_port: int
    type: int

def cuGraphCreate(flags: int) -> tuple[CUresult, CUgraph]: ...
def cuGraphDestroy(hGraph: CUgraph) -> tuple[CUresult]: ...
def cuGraphAddNode(
    hGraph: CUgraph,
    dependencies: Sequence[CUgraphNode],
    dependencyData: Sequence[CUgraphEdgeData],
    numDependencies: int,
    nodeParams: CUgraphNodeParams,
) -> tuple[CUresult, CUgraphNode]: ...
def cuGraphAddChildGraphNode(
    hGraph: CUgraph, dependencies: Sequence[CUgraphNode], numDependencies: int, childGraph: CUgraph
) -> tuple[CUresult, CUgraphNode]: ...
def cuStreamGetCaptureInfo(
    hStream: CUstream,
) -> tuple[CUresult, int, int, CUgraph, Sequence[CUgraphNode], Sequence[CUgraphEdgeData], int]: ...
def cuStreamUpdateCaptureDependencies(
    hStream: CUstream,
    dependencies: Sequence[CUgraphNode],
    dependencyData: Sequence[CUgraphEdgeData],
    numDependencies: int,
    flags: int,
) -> tuple[CUresult]: ...
def cuCtxGetCurrent() -> tuple[CUresult, CUcontext]: ...
