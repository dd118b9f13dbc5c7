"""Record each product of a torch program while it runs, with the module that it belongs to.

A forward product belongs to the innermost module whose `forward` runs. Each operation that
autograd knows has a node with a number, in the order of the calls. So a backward product belongs to
what ran when the node that computes it was made.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from fp8_coverage import engines, torch_private
from fp8_coverage.flops import ADDED, ATTENTION, BATCHED, FLOPS, OPAQUE, SCALED
from fp8_coverage.table import Coverage, Kind, Product, State, is_named

HEADS = ("lm_head", "output_layer", "embed_out", "head", "score", "classifier", "output")
"""The last parts of the names of output layers, where a model does not name its own."""
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
MAX_NODES = 2**18
aten = torch.ops.aten
OUR_OWN = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "rngprims"})


class _Running(NamedTuple):
    """Hold what is known of a module whose forward pass runs."""

    module: nn.Module
    name: str
    is_named: bool  # the user named it, or a module around it, as one for FP8
    backward_pass: int
    num_products: int


class _Place(NamedTuple):
    """Say where a product belongs."""

    module: str
    was_asked: bool
    is_backward: bool = False
    kind: Kind | None = None


OUTSIDE = _Place("", was_asked=False)


class coverage:  # noqa: N801  # used like a function
    """Record the products that run in a `with` statement, which gives their `Coverage`.

    Args:
        model: The model whose names of modules are used; else those of each outermost module.
        asked: Names of modules, with * for any text, that were to run in FP8, besides those that a
            known engine has converted.
        head: Names of output layers, likewise. By default the model's `get_output_embeddings()`,
            or else the usual names.

    It sees what the thread of the `with` statement runs, and its backward passes. Modules of the
    model that run in another thread are reported as not known.

    Raises:
        TypeError: The model is no module.
        RuntimeError: A recording is entered again before it has ended.
    """

    def __init__(
        self, model: nn.Module | None = None, *, asked: Iterable[str] = (), head: Iterable[str] = ()
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model={model!r:.60}: give a torch.nn.Module, or leave it out")
        self.result = Coverage()
        self._mode = _Mode(self)
        self._model = model
        self._asked, self._heads = (
            (names,) if isinstance(names, str) else tuple(names) for names in (asked, head)
        )
        self._names: dict[nn.Module, str] = {}
        self._owners: dict[nn.Module, bool] = {}
        self._weights: dict[int, Any] = {}
        self._stack: list[_Running] = []
        self._of_node: dict[int, _Place] = {}
        self._numbers: list[int] = [-1]
        self._places: list[_Place] = [OUTSIDE]
        self._muted = self._num_products = 0
        self._announcers: dict[Any, Any] = {}
        self._hooks: list[Any] = []
        self._te: Any = None
        self._te_gemm: Any = None
        self._thread = 0
        self._is_asked = cache(partial(is_named, patterns=self._asked))

    def __enter__(self) -> Coverage:
        if self._hooks:
            raise RuntimeError("This recording runs already. Use another coverage() inside of it")
        self._thread = threading.get_ident()
        if self._model is not None:
            self._name(self._model, "")
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._listen_to_all()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.result

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for module, before in self._announcers.items():
            module.LISTENER = before
        if self._te is not None:
            self._te.generic_gemm, self._te = self._te_gemm, None
        for module, name in self._names.items():
            if engines.was_asked(module) or self._is_asked(name):
                self.result.asked.add(name)
        self._announcers.clear()
        self._names.clear()
        self._owners.clear()
        self._weights.clear()
        self._of_node.clear()
        self._stack.clear()

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that reached torch's dispatcher, and record it if it is a product."""
        if self._muted:
            return func(*args, **kwargs)
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # comes back with the tensors of this rank
        packet = getattr(func, "overloadpacket", func)
        count = FLOPS.get(packet)
        if count is None:
            return self._other(func, packet, args, kwargs)
        ran = None
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            with _Inside() as ran:  # type: ignore[no-untyped-call]
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        num = 3 if packet in ATTENTION or packet is aten.convolution_backward else 2
        operands = [x for x in args if isinstance(x, torch.Tensor)][packet in ADDED :][:num]
        dtypes = [engines.dtype_of(x) for x in operands]
        is_fp8 = sum(dtype in engines.FLOAT8 for dtype in dtypes) >= 2
        is_scaled = packet in SCALED or (ran is not None and ran.is_scaled)
        if ran is not None and any(getattr(x, "act_quant_kwargs", None) for x in operands):
            is_fp8 = True  # the operation quantizes the other operand itself
        self._record(
            str(packet),
            [str(dtype) for dtype in dtypes],
            [tuple(x.shape) for x in operands],
            count(*args, **kwargs, out_val=out),
            is_fp8=is_fp8 or is_scaled,
            is_emulated=is_fp8 and not is_scaled,
            kind=self._kind(packet, operands),
        )
        return out

    def _other(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what is no known product; note it if it may be one."""
        if _decomposes(func):
            with self._mode:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if packet is torch_private.COPY and self._is_weight(args[0]):
            self._note_weight(out)
        why = _suspicion(func)
        if why is None and _is_foreign(func):
            tensors = [x for x in args if isinstance(x, torch.Tensor) and x.dim() > 1]
            if sum(engines.dtype_of(x) in engines.FLOAT8 for x in tensors) >= 1 < len(tensors):
                why = "an operation of another library, with operands in FP8"
        if why is not None:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            self._note_unknown(self._place(), str(packet), why, tensors)
        return out

    def _kind(self, packet: Any, operands: list[torch.Tensor]) -> Kind:
        if packet in ATTENTION:
            return "attention"
        if packet in BATCHED and not any(map(self._is_weight, operands)):
            return "attention"
        return "linear"

    def _record(
        self,
        op: str,
        dtypes: list[str],
        shapes: list[tuple[int, ...]],
        flops: int,
        *,
        is_fp8: bool,
        is_emulated: bool,
        kind: Kind = "linear",
    ) -> None:
        """Add a product to the result, under the module in which it ran."""
        place = self._place()
        if place.kind is not None:
            kind = place.kind
        elif kind == "linear" and self._is_head(place.module):
            kind = "head"
        if not place.is_backward:
            self._of_node.setdefault(torch_private.newest_node(), place._replace(kind=kind))
        state: State = "asked for and not in FP8" if place.was_asked else "never asked for"
        names = tuple(name.removeprefix("torch.") for name in dtypes)
        product = Product(
            place.module, place.is_backward, op.removeprefix("aten."), names, tuple(shapes),
            "in FP8" if is_fp8 else state, kind, is_emulated,
        )  # fmt: skip
        self.result.add(product, flops)
        self._num_products += 1

    def _note_unknown(
        self, place: _Place, op: str, why: str, tensors: Iterable[torch.Tensor] = ()
    ) -> None:
        dtypes = tuple(str(engines.dtype_of(x)).removeprefix("torch.") for x in tensors)
        product = Product(place.module, place.is_backward, op, dtypes, (), "not known", why=why)
        self.result.add(product, 0)
        self._num_products += 1

    def _hear(
        self,
        outer: Callable[..., Any] | None,
        run: Callable[[], Any],
        dtypes: tuple[Any, ...],
        shape: tuple[int, int, int],
        is_emulated: bool,
    ) -> Any:
        """Record a product that an engine announces; `outer` is shown too, or else it runs."""
        announced = run if outer is None else partial(outer, run, dtypes, shape, is_emulated)
        if self._is_elsewhere():
            return announced()
        rows, columns, inner = shape
        self._record(
            "announced",
            [str(dtype) for dtype in dtypes],
            [(rows, inner), (inner, columns)],
            2 * rows * columns * inner,
            is_fp8=True,
            is_emulated=is_emulated,
        )
        self._muted += 1
        try:
            return announced()
        finally:
            self._muted -= 1

    def _listen_to_all(self) -> None:
        for module in engines.announcers():
            if module not in self._announcers:
                self._announcers[module] = module.LISTENER
                module.LISTENER = partial(self._hear, module.LISTENER)
        te = engines.transformer_engine() if self._te is None else None
        if te is not None:
            self._te, self._te_gemm = te, te.generic_gemm
            te.generic_gemm = partial(self._hear_te, te.generic_gemm)

    def _hear_te(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a product of Transformer Engine's compiled code."""
        a, trans_a, b, trans_b = args[:4]
        (*a_rows, a_columns), (*b_rows, b_columns) = a.size(), b.size()
        columns = prod(a_rows) if trans_a else a_columns
        rows, inner = (b_columns, prod(b_rows)) if trans_b else (prod(b_rows), b_columns)
        dtypes = [str(engines.dtype_in_te(x)) for x in (b, a)]
        self._record(
            "generic_gemm", dtypes, [(rows, inner), (inner, columns)], 2 * rows * columns * inner,
            is_fp8=all(map(engines.is_in_te, (a, b))), is_emulated=False,
        )  # fmt: skip
        return run(*args, **kwargs)

    def _place(self) -> _Place:
        """Return where the product belongs that runs now."""
        backward_pass = torch_private.backward_pass()
        if self._stack and self._stack[-1].backward_pass == backward_pass:
            return self._forward_place()
        node = torch_private.running_node()
        if node is None:
            return self._forward_place() if self._stack else OUTSIDE
        is_again = torch.is_grad_enabled()  # checkpointing computes a forward pass again
        found = None if is_again else self._of_node.get(node)
        if found is None and node < torch_private.CALLER:
            found = self._places[bisect_right(self._numbers, node) - 1]
        return (found or OUTSIDE)._replace(is_backward=not is_again)

    def _forward_place(self) -> _Place:
        if not self._stack:
            return OUTSIDE
        last = self._stack[-1]
        was_asked = last.is_named or any(engines.was_asked(x.module) for x in self._stack)
        return _Place(last.name, was_asked)

    def _is_elsewhere(self) -> bool:
        """Whether this thread is neither the recorded one nor computes gradients for it."""
        return threading.get_ident() != self._thread and torch_private.backward_pass() < 0

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if self._is_elsewhere():
            name = self._names.get(module, type(module).__name__)
            if self._owns_matrix(module) and (self._model is None or module in self._names):
                self.result.ran.add(name)
                why = "it ran in another thread, whose products are not seen"
                self._note_unknown(_Place(name, was_asked=False), "forward", why)
            return
        if not self._stack:
            self._listen_to_all()
            self._forget()
        if module not in self._names:
            around = self._stack[-1].name if self._stack else ""
            name = type(module).__name__
            self._name(module, f"{around}.{name}" if around else name)
        name = self._names[module]
        self.result.ran.add(name)
        for parameter in torch_private.parameters_of(module):
            self._note_weight(parameter)
        pass_ = torch_private.backward_pass()
        is_named = self._is_asked(name)
        self._stack.append(_Running(module, name, is_named, pass_, self._num_products))
        self._mark()

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._is_elsewhere():
            return
        while self._stack:
            left = self._stack.pop()
            if left.module is module:
                break
        else:
            return
        if self._num_products == left.num_products and self._owns_matrix(module):
            tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
            if any(x.is_floating_point() and x.numel() for x in tensors):
                self.result.unseen.add(left.name)
                if left.is_named or engines.was_asked(module):
                    why = "it ran, and no product of it was seen"
                    self._note_unknown(_Place(left.name, was_asked=True), "forward", why)
        self._mark()

    def _forget(self) -> None:
        """Forget the older half of the nodes where a long program has made very many."""
        if len(self._of_node) > MAX_NODES and torch_private.backward_pass() < 0:
            for number in list(self._of_node)[: MAX_NODES // 2]:
                del self._of_node[number]
        if len(self._numbers) > MAX_NODES:
            del self._numbers[1 : MAX_NODES // 2], self._places[1 : MAX_NODES // 2]

    def _mark(self) -> None:
        """Note which module's nodes follow."""
        number = torch_private.newest_node() + 1
        if self._numbers[-1] == number:
            self._numbers.pop()
            self._places.pop()
        self._numbers.append(number)
        self._places.append(self._forward_place())

    def _name(self, root: nn.Module, prefix: str) -> None:
        for name, module in root.named_modules(prefix=prefix):
            parts = [part for part in name.split(".") if part not in WRAPPERS]
            self._names.setdefault(module, ".".join(parts))
        find = getattr(root, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if head in self._names and not self._heads:
            self._heads = (self._names[head],)

    def _is_head(self, name: str) -> bool:
        if self._heads:
            return is_named(name, self._heads)
        return name.rpartition(".")[2] in HEADS

    def _owns_matrix(self, module: nn.Module) -> bool:
        if module not in self._owners:
            is_table = "Embedding" in type(module).__name__
            has_matrix = any(p.dim() > 1 for p in torch_private.parameters_of(module))
            self._owners[module] = has_matrix and not is_table
        return self._owners[module]

    def _note_weight(self, tensor: torch.Tensor) -> None:
        for part in torch_private.parts_of(tensor):
            storage = part.untyped_storage()
            self._weights.setdefault(torch_private.storage_of(part), storage)

    def _is_weight(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and any(
            torch_private.storage_of(part) in self._weights for part in torch_private.parts_of(x)
        )


class _Mode(torch_private.TorchDispatchMode):
    """Hand each operation to a recording."""

    def __init__(self, recording: coverage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not types and _is_plain(func):
            return func(*args, **(kwargs or {}))
        return self._recording.run(func, types, args, kwargs or {})


class _Inside(torch_private.TorchDispatchMode):
    """See whether the operation of a tensor subclass multiplies in FP8."""

    is_scaled = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind not in (torch.Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        self.is_scaled |= func.overloadpacket in SCALED
        return func(*args, **(kwargs or {}))


@cache
def _is_plain(func: Any) -> bool:
    """Whether nothing of an operation is to be recorded: most are so, and cost little then."""
    packet = getattr(func, "overloadpacket", func)
    is_noted = packet in FLOPS or packet is torch_private.COPY or _suspicion(func) is not None
    return not (is_noted or _decomposes(func) or _is_foreign(func))


@cache
def _decomposes(func: Any) -> bool:
    return torch_private.is_composite(func)


@cache
def _is_foreign(func: Any) -> bool:
    return getattr(func, "namespace", "") not in OUR_OWN


@cache
def _suspicion(func: Any) -> str | None:
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if OPAQUE.search(name) and not name.endswith(("_backward_data", "_overrideable")):
        return "an operation whose products are not counted"
    return None
