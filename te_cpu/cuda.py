"""Answer on a CPU what Transformer Engine's Python asks of `torch.cuda`.

The patches hold for the whole process. Questions about a GPU (is one there, which one) are answered
with an H100 to Transformer Engine's own code alone, and to what `answer_also` names: everyone else
still learns the truth. Two things change for everyone: `device="cuda"` and `.cuda()` mean the CPU,
as do a generator, pinned memory and autocast for it; and what waits for a GPU (`synchronize`,
streams, events) returns at once.

The functions that take a device are replaced one by one. A mode of torch would see all calls of all
functions, which takes longer than the tiny tensors of a test.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from te_cpu import torch_private
from te_cpu.errors import MissingKernelError

CPU = torch.device("cpu")
CUDA_VERSION = "13.0"
PROPERTIES = SimpleNamespace(
    name="CPU in place of an H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    L2_cache_size=50 << 20,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=1 << 16,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    is_integrated=0,
    is_multi_gpu_board=0,
)
"""What the CUDA programming guide says of compute capability 9.0, and the data sheet of an H100."""


class Stream:
    """A CPU has no streams: everything has happened already, and all have one priority."""

    cuda_stream = priority = 0
    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...
    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        return Event() if event is None else event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class Device:
    """Choose the one device that there is."""

    idx = 0

    def __init__(self, device: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


class Event:
    """Record nothing; two events are 0 ms apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Like(type):
    """Let objects of `real` be instances of the class that stands in its place."""

    real: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


class Generator(metaclass=_Like):
    """Give torch's own generator of the CPU, also where one of "cuda" is asked for."""

    real = torch.Generator

    def __new__(cls, device: Any = "cpu") -> Any:
        return cls.real(to_cpu(device))


class CUDAGraph:
    """Refuse to record: the work of a CPU is done when a function returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingKernelError(
            "torch.cuda.CUDAGraph: a CPU has no graphs of kernels. Leave CUDA graphs out, or run "
            "on an NVIDIA GPU"
        )


_IS_CUDA, _TYPE, _STREAM = torch.Tensor.is_cuda, torch.Tensor.type, Stream()
_ASKING = ["transformer_engine", "torch.amp", "torch.cuda.amp"]
"""The packages whose code is answered as if there were a GPU; torch's autocast asks before it
serves "cuda"."""
_NEVER_ASKING = ("torch", "triton")
"""The packages that would then use a GPU, even where everyone's code is answered."""

_RUNTIME = SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
MEMORY_IN_USE = (
    "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
)  # fmt: skip
# Answered so to Transformer Engine's code; the originals answer everyone else.
ANSWERS: dict[str, Callable[..., Any]] = {
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "is_initialized": lambda: True,
    "_lazy_call": lambda call, **kwargs: call(),
    "is_available": lambda: True,
    "is_bf16_supported": lambda *args, **kwargs: True,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device_count": lambda: 1,
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.manual_seed(seed),
    "seed": lambda: torch.seed(),
    "seed_all": lambda: torch.seed(),
    "initial_seed": lambda: torch.initial_seed(),
    "get_arch_list": lambda: ["sm_90"],
    "can_device_access_peer": lambda device, other: False,
    "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
    **dict.fromkeys(MEMORY_IN_USE, lambda device=None: 0),
    "memory_stats": lambda device=None: Counter(),
    "memory_summary": lambda device=None, abbreviated=False: "No memory of a GPU is in use.",
    "memory_snapshot": lambda *args, **kwargs: [],
    "cudart": lambda: _RUNTIME,
}
# What takes a device, by who has it. The windows of `torch.signal` are made of these.
TAKE_A_DEVICE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch, (
        "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty",
        "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "eye", "from_file",
        "full", "full_like", "hamming_window", "hann_window", "kaiser_window", "linspace",
        "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
        "randn", "randn_like", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor",
        "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor",
        "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
    )),
    (torch.fft, ("fftfreq", "rfftfreq")),
    (torch.nested, ("as_nested_tensor", "nested_tensor")),
    (torch.Tensor, (
        "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to",
    )),
)  # fmt: skip

SENT_TOGETHER = (
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast",
    "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip
"""The collectives that others put into one message with torch's coalescing manager."""
_together: list[bool] = []
"""Has an element for each such manager that is open."""

Place = Callable[[Any, FrameType], Any]
"""Returns where to make what is asked for on a device; the frame is that of who asks."""
_places: list[Place] = []


@contextmanager
def _nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


# For everyone: they do nothing on a CPU, and fail without these.
FOR_EVERYONE: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": _nothing,
    "set_stream": lambda stream: None,
    "device": Device,
    "ExternalStream": Stream,
    "synchronize": lambda device=None: None,
    "is_current_stream_capturing": lambda: False,
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
    "reset_peak_memory_stats": lambda device=None: None,
    "reset_max_memory_allocated": lambda device=None: None,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "set_per_process_memory_fraction": lambda fraction, device=None: None,
    "check_error": lambda result: None,
    "default_generators": (torch.default_generator,),
    "CUDAGraph": CUDAGraph,
    "graph_pool_handle": lambda: CUDAGraph(),
}
# Answered so to Transformer Engine's code, beside what has the name of one of `torch.cuda`.
OF_ACCELERATORS: dict[str, Callable[..., Any]] = {
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "current_device_idx": lambda: 0,
    "current_device_index": lambda: 0,
    "device_index": lambda device: Device(device),
    "get_memory_info": ANSWERS["mem_get_info"],
    "set_device_idx": lambda device: None,
    "set_device_index": lambda device: None,
}
WITHOUT_A_PROFILER = (
    (torch.cuda.nvtx, ("mark", "range", "range_end", "range_pop", "range_push", "range_start")),
    (torch.cuda.profiler, ("start", "stop")),
)
"""What marks a program for NVIDIA's profilers, by who has it."""
OLD_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


def install(undo: ExitStack) -> None:
    """Make the patches. They stay until `undo` is closed, or for as long as the process lives."""
    # Torch's tracer must find torch's functions: a graph would break at those it does not know.
    torch_private.load_dynamo()
    torch.compiler.assume_constant_result(_asked_by_transformer_engine)
    for function in (_is_cuda, _type):
        torch_private.compile_within_callers_alone(function)
    undo.callback(torch_private.wrap_traced_is_cuda(_is_told))
    undo.callback(_places.clear)
    _places.append(lambda device, asking: to_cpu(device))
    undo.callback(torch_private.wrap_default_device(to_cpu))  # before functions are replaced
    for owner, names in TAKE_A_DEVICE:
        for name in names:
            _replace(owner, name, _placed(getattr(owner, name), is_to=name == "to"), undo)
    for name, value in (
        ("is_cuda", property(_is_cuda)), ("type", _type), ("cuda", _stay), ("pin_memory", _stay),
        ("record_stream", lambda tensor, stream: None),
    ):  # fmt: skip
        _replace(torch.Tensor, name, value, undo)
    _replace(torch, "Generator", Generator, undo)
    _patch_autocast(undo)
    undo.callback(torch_private.recompute_on("cuda"))
    for name, answer in ANSWERS.items():
        asked = _to_transformer_engine(answer, getattr(torch.cuda, name))
        _replace_in_cuda(name, asked, undo)
    for name, value in FOR_EVERYONE.items():
        _replace_in_cuda(name, value, undo)
    for owner, names in WITHOUT_A_PROFILER:
        for name in names:
            _replace(owner, name, _nothing, undo)
    both = {**FOR_EVERYONE, **ANSWERS}
    answers = {name: both[name] for name in torch.accelerator.__all__ if name in both}
    for name, answer in {**answers, **OF_ACCELERATORS}.items():
        if hasattr(torch.accelerator, name):  # the older torch is, the fewer it has
            asked = _to_transformer_engine(answer, getattr(torch.accelerator, name))
            _replace(torch.accelerator, name, asked, undo)
    for name in (f"{kind}Tensor" for kind in OLD_TYPES):
        _replace(torch.cuda, name, getattr(torch, name), undo)
    _replace(torch.UntypedStorage, "cuda", _stay, undo)
    undo.callback(torch_private.read_from("cuda"))
    _replace(torch.random, "fork_rng", _of_the_cpu(torch.random.fork_rng), undo)
    _patch_cuda_version(undo)
    undo.callback(_patch_wrapper_tensors())
    undo.callback(torch_private.wrap_coalescing_manager(_without_coalescing))
    for name in SENT_TOGETHER:
        _replace(torch.distributed, name, _arrived(getattr(torch.distributed, name)), undo)
    for name in ("init_process_group", "new_group"):
        _replace(torch.distributed, name, _by_gloo(getattr(torch.distributed, name)), undo)
    module: Any = nn.Module
    _replace(module, "to", _with_a_name(module.to), undo)
    wrapped: Any = nn.parallel.DistributedDataParallel
    _replace(wrapped, "__init__", _without_indices(wrapped.__init__), undo)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel  # it takes long to import

    for kind, name in ((DeviceMesh, "device_type"), (FullyShardedDataParallel, "device_id")):
        _replace(kind, "__init__", _on_the_cpu(kind.__init__, name), undo)
    _replace(torch.distributed, "barrier", _without_indices(torch.distributed.barrier), undo)


def _replace(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:  # a class has inherited it
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def answer_everyone() -> None:
    """Answer from now on to all code but torch's own as to Transformer Engine's."""
    if "" not in _ASKING:
        _ASKING.append("")


def _replace_in_cuda(name: str, value: Any, undo: ExitStack) -> None:
    """Replace a name of `torch.cuda`, also where programs find it in the file that defines it."""
    real = getattr(torch.cuda, name)
    parts = (torch.cuda.graphs, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
    for owner in (torch.cuda, *parts):
        if vars(owner).get(name) is real:
            _replace(owner, name, value, undo)


def answer_also(packages: Iterable[str]) -> None:
    """Answer from now on to other packages, such as `megatron`, as to Transformer Engine.

    They may also name a device by its index alone (`torch.device(0)`), which Transformer Engine
    does not.
    """
    _ASKING.extend(packages)
    ExitStack().enter_context(IndexIsTheCpu())  # for as long as the process lives


@contextmanager
def placing(place: Place) -> Iterator[None]:
    """Let `place` say, inside the context, where tensors are made; a dry run has its own answer."""
    _places.append(place)
    try:
        yield
    finally:
        _places.remove(place)


def _placed(function: Callable[..., Any], *, is_to: bool) -> Callable[..., Any]:
    """Return a function that asks `placing` before it makes a tensor; `to` has a position too."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            if torch.compiler.is_compiling():  # torch.compile traces no look at frames
                kwargs["device"] = to_cpu(kwargs["device"])
            else:
                kwargs["device"] = _places[-1](kwargs["device"], sys._getframe(1))
        elif is_to and len(args) > 1:
            args = (args[0], to_cpu(args[1]), *args[2:])
        kwargs.pop("pin_memory", None)  # it is there for copies to a GPU
        if is_to and _is_there(*args, **kwargs):
            return args[0]
        return function(*args, **kwargs)

    return placed


def _is_there(
    tensor: torch.Tensor, *args: Any, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> bool:
    """Whether a call of `to` asks for nothing but the CPU, where the tensor is.

    Torch returns the tensor itself then, but not to the code of a tensor's own class: a tensor in
    MXFP8 would be dequantized there, for which it is brought to "cuda", and so on.
    """
    asked = args[0] if len(args) == 1 else device
    is_alone = not kwargs and len(args) + (device is not None) == 1
    return is_alone and asked is CPU and tensor.device.type == "cpu"


def _is_cuda(tensor: torch.Tensor) -> bool:
    return _asked_by_transformer_engine() or _IS_CUDA.__get__(tensor)  # type: ignore[attr-defined]


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _TYPE(tensor, *args, **kwargs)
    # A tensor of Transformer Engine's asks once more, from a file of Transformer Engine.
    is_named = isinstance(found, str) and not found.startswith("torch.cuda.")
    if is_named and _asked_by_transformer_engine():
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def _stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _asked_by_transformer_engine() -> bool:
    """Whether the caller's caller is in a file of Transformer Engine, or of `answer_also`."""
    return _is_told(torch_private.frame_of_caller(2).f_globals.get("__name__", ""))


def _is_told(name: str) -> bool:
    """Whether the code of a module is answered as if there were a GPU."""
    if "" in _ASKING and name.partition(".")[0] in _NEVER_ASKING:
        return name.startswith(tuple(filter(None, _ASKING)))
    return name.startswith(tuple(_ASKING))


def _to_transformer_engine(answer: Callable[..., Any], real: Callable[..., Any]) -> Any:
    def asked(*args: Any, **kwargs: Any) -> Any:
        function = answer if _asked_by_transformer_engine() else real
        return function(*args, **kwargs)

    return torch_private.compile_within_callers_alone(asked)


def _patch_cuda_version(undo: ExitStack) -> None:
    """Give `torch.version.cuda` a version to Transformer Engine, which reads it as numbers."""
    real = torch.version.cuda

    class Version(ModuleType):
        @property
        def cuda(self) -> str | None:
            return CUDA_VERSION if _asked_by_transformer_engine() else real

    undo.callback(setattr, torch.version, "__class__", torch.version.__class__)
    torch.version.__class__ = Version


def _patch_autocast(undo: ExitStack) -> None:
    """Let autocast for "cuda" switch on the CPU's too, which takes FP16 and BF16 as well.

    What `torch.is_autocast_enabled("cuda")` says stays as it is, since Transformer Engine asks it.
    """
    kind: Any = torch.autocast
    enter, leave = kind.__enter__, kind.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        found = enter(self)
        if self.device == "cuda":
            before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            vars(self).setdefault("before_on_cpu", []).append(before)  # one may be entered twice
            torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cuda"))
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        return found

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        if self.device == "cuda":
            enabled, dtype = self.before_on_cpu.pop()
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return leave(self, *error)

    _replace(kind, "__enter__", entered, undo)
    _replace(kind, "__exit__", left, undo)


def _patch_wrapper_tensors() -> Callable[[], None]:
    """Make tensor subclasses on the CPU.

    In a dry run, where the meta device is the default, they are made there. The result undoes it.
    """

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
            asked = kwargs.get("device")
            if asked is not None and (found := to_cpu(asked)) is not asked:
                is_dry_run = torch.get_default_device().type == "meta"
                kwargs["device"] = torch.device("meta") if is_dry_run else found
            return make(*args, **kwargs)

        return make_on_cpu

    return torch_private.wrap_make_wrapper_subclass(on_cpu)


def _without_coalescing(coalescing: Callable[..., Any]) -> Callable[..., Any]:
    """Return a context manager for messages, in place of torch's `coalescing`.

    Inside it Transformer Engine's messages are sent one by one, since gloo cannot send several
    together. The manager's result is what the caller waits for; here nothing is left to wait for,
    since `_arrived` has waited for each message, also for one that is to be sent in the background.
    """

    @contextmanager
    def one_by_one() -> Iterator[Stream]:
        _together.append(True)
        try:
            yield Stream()
        finally:
            _together.pop()

    def manager(*args: Any, **kwargs: Any) -> Any:
        return one_by_one() if _asked_by_transformer_engine() else coalescing(*args, **kwargs)

    return manager


def _arrived(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that ends with its messages where torch would send several together."""

    @functools.wraps(send)
    def sent(*args: Any, **kwargs: Any) -> Any:
        work = send(*args, **kwargs)
        if _together and work is not None:
            work.wait()
        return work

    return sent


def _by_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a group of processes with gloo where NCCL is asked for.

    It binds the group to no device, and leaves out options that are NCCL's.
    """
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if "nccl" in str(given.get("backend")).lower():
            given["backend"] = "gloo"
            given.pop("pg_options", None)
        if to_cpu(given.get("device_id")) is CPU:
            del given["device_id"]
        return make(*bound.args, **bound.kwargs)

    return made


def _without_indices(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves out the numbers of GPUs, with which torch refuses a CPU."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        for name in ("device_ids", "output_device"):
            bound.arguments.pop(name, None)
        return function(*bound.args, **bound.kwargs)

    return called


def _with_a_name(to: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Module.to`, for which torch asks a GPU where a device is an index alone."""

    @functools.wraps(to)
    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        named = [torch.device("cuda", given) if type(given) is int else given for given in args]
        if type(kwargs.get("device")) is int:
            kwargs["device"] = torch.device("cuda", kwargs["device"])
        return to(module, *named, **kwargs)

    return moved


def _on_the_cpu(make: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function whose argument `name` is the CPU where it is "cuda", or not given."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = bound.arguments.get(name)
        found = CPU if asked is None else to_cpu(asked)
        bound.arguments[name] = str(found) if isinstance(asked, str) else found
        return make(*bound.args, **bound.kwargs)

    return made


def _of_the_cpu(fork_rng: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fork_rng`, which keeps the one generator; torch asks for those of GPUs otherwise."""

    @functools.wraps(fork_rng)
    def forked(devices: Any = None, *args: Any, **kwargs: Any) -> Any:
        return fork_rng([] if _asked_by_transformer_engine() else devices, *args, **kwargs)

    return forked


def to_cpu(device: Any) -> Any:
    """Return the CPU for any name of a CUDA device (an index is one); other devices as they are."""
    is_index = type(device) is int
    is_name = isinstance(device, str) and device.split(":")[0] == "cuda"
    is_device = isinstance(device, torch.device) and device.type == "cuda"
    return CPU if is_index or is_name or is_device else device


class IndexIsTheCpu(TorchFunctionMode):
    """Let `torch.device(0)` be the CPU: nothing else can take the place of that class."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.device and type(args[0]) is int:
            return CPU
        return func(*args, **(kwargs or {}))
