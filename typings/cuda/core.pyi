"""The part of cuda.core that warpring uses; the package itself is compiled and carries no types."""

from collections.abc import Sequence
from io import StringIO

class ProgramOptions:
    def __init__(
        self,
        *,
        name: str | None = None,
        arch: str | None = None,
        std: str | None = None,
        include_path: str | Sequence[str] | None = None,
        define_macro: Sequence[str | tuple[str, str]] | None = None,
        ptxas_options: Sequence[str] | None = None,
    ) -> None: ...

class KernelAttributes:
    @property
    def num_regs(self) -> int: ...

class Kernel:
    @property
    def handle(self) -> object: ...
    @property
    def attributes(self) -> KernelAttributes: ...

class ObjectCode:
    @property
    def code(self) -> bytes: ...
    @staticmethod
    def from_cubin(module: bytes | str, *, name: str = "") -> ObjectCode: ...
    def get_kernel(self, name: str) -> Kernel: ...

class Program:
    def __init__(self, code: str, code_type: str, options: ProgramOptions | None = None) -> None: ...
    def compile(self, target_type: str, *, logs: StringIO | None = None) -> ObjectCode: ...
    def close(self) -> None: ...

class Device:
    def __init__(self, device_id: int | None = None) -> None: ...
    def set_current(self) -> None: ...

class Stream:
    @staticmethod
    def from_handle(handle: int) -> Stream: ...

class LaunchConfig:
    def __init__(
        self,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shmem_size: int = 0,
        programmatic_stream_serialization: bool = False,
    ) -> None: ...

def launch(stream: Stream, config: LaunchConfig, kernel: Kernel, *kernel_args: object) -> None: ...
