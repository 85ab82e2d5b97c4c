"""The wrapper that Inductor wrote, line by line: what each line reads, writes, starts, waits for and gives up.

A wrapper is a Python module: kernels as text, and a function ``call``. It is parsed, never run::

    def call(self, args):
        primals_1, shard_a = args                                   two memories, "input 0" and "input 1"
        buf0 = torch.ops.zerofx.all_gather_pairwise.default(…)      start   reads input 1; a new memory
        buf1 = buf0                                                 another name for it
        del buf0                                                    and one less
        torch.ops._c10d_functional.wait_tensor.default(buf1)        wait
        buf2 = empty_strided_cpu((96, 64), (64, 1), …)              a new memory, and its size
        extern_kernels.mm(primals_1, reinterpret_tensor(buf1, …), out=buf2)     call    reads two, writes one
        cpp_fused_gelu_0(buf2)                                      call    as the kernel's arguments say
        triton_poi_fused_1.run(buf2, 6144, stream=stream0)          call    the same, on the stream that is current
        return (buf2, )                                             return

What a name stands for is a set of memories (`Value`): one; those of a list; or, where nobody can say, all that came
into a line. Operators say by their schemas what they write and what their results are views of; kernels by their
arguments (kernel.py). A line of any other form is taken to read and write all that it names.

Functions of the module, graph partitions and the bodies of ``torch.cond``, are read where they are called. Of branches
and loops each body is read once, one after the other, and no ``del`` in them counts.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zerofx._torch import OpOverload
from zerofx.passes import edit
from zerofx.passes.own import COLLECTIVES
from zerofx.passes.proof.code.kernel import Argument, Kernel, read_kernel
from zerofx.passes.proof.code.line import NOTHING, Kind, Line, Memory, Passed, Value, flat
from zerofx.passes.proof.code.promise import CARRIES
from zerofx.passes.proof.code.text import asserted, constants_in, dotted, is_own, names_in, product_of
from zerofx.passes.travel import GATHERS, SCATTERS


class Wrapper:
    """The module, parsed; None for what is not there.

    Attributes:
        call: the function that runs.
        functions: by name, those of the module.
        kernels: by name.
        n_inputs: of ``call``.
    """

    def __init__(self, code: str) -> None:
        self.text: list[str] = code.splitlines()
        self.kernels: dict[str, Kernel] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.modules: dict[str, str] = {}
        for statement in ast.parse(code).body:
            if (kernel := read_kernel(statement)) is not None:
                self.kernels[kernel.name] = kernel
            elif isinstance(statement, ast.ClassDef):
                self._keep(statement.body)
            else:
                self._keep([statement])
        self.call: ast.FunctionDef | None = self.functions.get("call")

    def _keep(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.FunctionDef(name=name):
                    self.functions[name] = statement
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value):
                    self.modules[name] = dotted(value)


class Walk:
    """One walk through ``call``: `lines` yields what each does, while names stand as they do there.

    Attributes:
        names: what stands for what.
        holders: of each memory, by how many names it is held.
        results: the memories that calls made.
        released: of each memory that has no name left, when it lost the last one (`Line.when`).
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self.wrapper = wrapper
        self.names: dict[str, Value] = {}
        self.holders: Counter[Memory] = Counter()
        self.results: set[Memory] = set()
        self.released: dict[Memory, int] = {}
        self.numel: dict[str, int] = {}
        self.inputs: list[Memory] = []
        self._gone: dict[str, Value] = {}
        self._own: set[str] = set()
        self._memories = 0
        self._depth = self._loose = 0
        self._returned: Value = ()
        self._streams: set[str] = set()
        self._stream = ""
        self._number = self._when = 0

    def lines(self) -> Iterator[Line]:
        """Each line that touches memory, in the order in which they run."""
        call = self.wrapper.call
        assert call is not None
        yield from self._function(call, None)

    def names_of(self, memory: Memory) -> list[str]:
        """The names by which a memory is held."""
        return [name for name, value in self.names.items() if memory in flat(value)]

    # ---- statements -------------------------------------------------------------------------------------------------

    def _function(self, function: ast.FunctionDef, given: Value | None) -> Iterator[Line]:
        outer, gone, later = self.names, self._gone, self._own
        self._depth += 1
        self.names, self._gone = {}, {}
        self._own = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and is_own(n)}
        parameter = function.args.args[-1].arg if function.args.args else "args"
        if given is not None:
            self._bind(parameter, given)
        self._returned = ()
        for statement in function.body:
            yield from self._statement(statement)
            if isinstance(statement, ast.Return):
                break
        for name in list(self.names):
            self._unbind(name)
        self.names, self._gone, self._own = outer, gone, later
        self._depth -= 1

    def _statement(self, statement: ast.stmt) -> Iterator[Line]:
        self._number = statement.lineno
        self._when += 1
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=targets) | ast.List(elts=targets)], value=ast.Name(id=name)) if (
                self._depth == 1 and name not in self.names
            ):
                self.inputs = [self._new() for _ in targets]
                self._unpack(targets, tuple(frozenset([memory]) for memory in self.inputs))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="clear"))):
                if name in self.names:
                    self._bind(name, ())
            case ast.Assign(targets=[target], value=value):
                yield from self._assign(target, value)
            case ast.Expr(value=value):
                yield from self._evaluate(value)
            case ast.Delete(targets=targets):
                yield from self._delete(targets)
            case ast.Return(value=value):
                yield from self._return(value)
            case ast.With(items=items, body=body):
                outer, entered = self._stream, [ast.unparse(item.context_expr) for item in items]
                self._stream = next((text for text in entered if "stream" in text.lower()), outer)
                for inner in body:
                    yield from self._statement(inner)
                self._stream = outer
            case ast.Pass() | ast.Global() | ast.Import() | ast.ImportFrom() | ast.Raise() | ast.Assert():
                pass
            case ast.If(test=test, body=body, orelse=other) | ast.While(test=test, body=body, orelse=other):
                yield from self._evaluate(test)
                self._loose += 1
                for inner in [*body, *other]:
                    yield from self._statement(inner)
                self._loose -= 1
            case ast.For(target=target, iter=over, body=body, orelse=other):
                yield from self._evaluate(over)
                everything = flat(self._value)
                self._unpack([target], (everything,))
                self._loose += 1
                for inner in [*body, *other]:
                    yield from self._statement(inner)
                self._loose -= 1
            case _:
                named = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id in self.names]
                everything = NOTHING.union(*(flat(self.names[name]) for name in named))
                yield self._line("call", "", [Passed(everything, writes=True)], sure=False, strange=True)

    def _assign(self, target: ast.expr, value: ast.expr) -> Iterator[Line]:
        yield from self._evaluate(value)
        result = self._value
        match target:
            case ast.Name(id=name):
                self._bind(name, result)
                if isinstance(value, ast.Call) and dotted(value.func) == "get_raw_stream":
                    self._streams.add(name)
                if (numel := self._numel(value)) is not None:
                    self.numel[name] = numel
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                self._unpack(targets, result)
            case ast.Subscript(value=ast.Name(id=name)) if name in self.names:
                self._bind(name, flat(self.names[name]) | flat(result))

    def _unpack(self, targets: list[ast.expr], value: Value) -> None:
        for i, target in enumerate(targets):
            if isinstance(target, ast.Name):
                self._bind(target.id, self._item(value, i))

    def _delete(self, targets: list[ast.expr]) -> Iterator[Line]:
        for target in targets:
            if not isinstance(target, ast.Name) or self._loose:
                continue
            if target.id in self.names:
                self._gone[target.id] = self.names[target.id]
                self._unbind(target.id)
            elif target.id in self._gone or target.id in self._own:
                yield self._lost(target.id)

    def _return(self, value: ast.expr | None) -> Iterator[Line]:
        elements = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value] if value is not None else []
        values: list[Value] = []
        for element in elements:
            yield from self._evaluate(element)
            values.append(self._value)
        self._returned = tuple(values)
        if self._depth == 1:
            line = self._line("return", "return", [])
            line.values = [flat(v) for v in values]
            yield line

    # ---- expressions ------------------------------------------------------------------------------------------------

    def _evaluate(self, expression: ast.expr) -> Iterator[Line]:
        """Yields the lines of the calls in an expression; what it stands for is ``_value`` then."""
        self._value: Value = NOTHING
        match expression:
            case ast.Constant():
                pass
            case ast.Name(id=name):
                if name in self.names:
                    self._value = self.names[name]
                elif name in self._gone or (name in self._own and self._depth == 1):
                    yield self._lost(name)
                    self._value = flat(self._gone.get(name, NOTHING))
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                values: list[Value] = []
                for element in elements:
                    yield from self._evaluate(element)
                    values.append(self._value)
                self._value = tuple(values)
            case ast.Subscript(value=inner, slice=place):
                yield from self._evaluate(inner)
                known = isinstance(place, ast.Constant) and isinstance(place.value, int)
                self._value = self._item(self._value, place.value) if known else flat(self._value)  # type: ignore[attr-defined]
            case ast.Call():
                yield from self._call(expression)
            case _:
                found: frozenset[Memory] = NOTHING
                for child in ast.iter_child_nodes(expression):
                    if isinstance(child, ast.expr):
                        yield from self._evaluate(child)
                        found |= flat(self._value)
                self._value = found

    def _call(self, call: ast.Call) -> Iterator[Line]:
        name = dotted(call.func)
        first, _, rest = name.partition(".")
        name = f"{self.wrapper.modules[first]}.{rest}" if rest and first in self.wrapper.modules else name
        of: Value = NOTHING
        if isinstance(call.func, ast.Attribute) and (first in self.names or first in self._gone or not first):
            yield from self._evaluate(call.func.value)
            of, name = self._value, f".{call.func.attr}"
        given: list[Value] = []
        for argument in call.args:
            yield from self._evaluate(argument)
            given.append(self._value)
        named: dict[str, Value] = {}
        for keyword in call.keywords:
            yield from self._evaluate(keyword.value)
            named[keyword.arg or "**"] = self._value
        self._value = NOTHING
        function = self.wrapper.functions.get(name) or self._partition(call.func)
        if function is not None and self._depth < 8:
            yield from self._function(function, given[-1] if given else ())
            self._value = self._returned
            if call.args and isinstance(call.args[-1], ast.Name) and _empties(function):
                self._bind(call.args[-1].id, ())
        else:
            yield from self._touch(call, name, of, given, named)

    def _touch(
        self, call: ast.Call, name: str, of: Value, given: list[Value], named: dict[str, Value]
    ) -> Iterator[Line]:
        """A call that is no function of the module: a kernel, an operator, a method, or something unknown."""
        everything = NOTHING.union(flat(of), *map(flat, given), *map(flat, named.values()))
        last = name.rpartition(".")[2]
        for of_name, numel in asserted(last, call.args):
            if of_name in self.names:
                self.numel[of_name] = numel
        if name in _VIEWS or (name.startswith(".") and last in _VIEW_METHODS):
            self._value = everything if name.startswith(".") or not given else flat(given[0])
        elif last.startswith(("assert_", "empty_strided")) or (name.startswith(".") and last in _OF_SHAPES):
            self._value = NOTHING if last.startswith("assert_") or name.startswith(".") else self._made()
        elif not everything and not name.startswith("torch.ops."):
            self._value = self._made()
        elif (kernel := self.wrapper.kernels.get(name.removesuffix(".run"))) is not None:
            line = self._line("call", kernel.name, self._by(kernel.arguments, call, given), kernel=kernel)
            line.stream = self._stream or self._launched_on(call)
            yield line
        elif name.startswith("torch.ops."):
            yield self._operator(name.removeprefix("torch.ops."), call, given, named)
        elif name.startswith("extern_kernels.") or name == ".copy_" or name in (".clone", ".item"):
            yield self._extern(name, call, of, given, named)
        elif last == "copy_if_misaligned":  # itself; a copy, which reads it, only where its address is odd
            yield self._line("call", name, [Passed(everything)])
            self._value = everything
        else:
            line = self._line("call", name, [Passed(everything, writes=True)], sure=False)
            line.result = self._new()
            self._value = everything | {line.result}
            yield line

    def _by(self, arguments: Iterable[Argument], call: ast.Call, given: list[Value]) -> list[Passed]:
        """What a kernel does with each of its arguments; with those that it does not tell of, anything."""
        known = list(arguments)
        known += [Argument("?", True, True, sure=False)] * (len(given) - len(known))
        return [
            Passed(flat(value), argument.reads, argument.writes, self._numel(node), names_in(node))
            for argument, value, node in zip(known, given, call.args)
        ]

    def _launched_on(self, call: ast.Call) -> str:
        """The stream that a kernel is given, if it is not the current one."""
        streams = [k.value for k in call.keywords if k.arg == "stream"]
        known = not streams or (isinstance(streams[0], ast.Name) and streams[0].id in self._streams)
        return "" if known else ast.unparse(streams[0])

    def _extern(self, name: str, call: ast.Call, of: Value, given: list[Value], named: dict[str, Value]) -> Line:
        passed = [Passed(flat(v), numel=self._numel(n), names=names_in(n)) for v, n in zip(given, call.args)]
        nodes = {k.arg: k.value for k in call.keywords}
        for key, value in named.items():
            node = nodes.get(key)
            out = key == "out"
            passed.append(Passed(flat(value), not out, out, self._numel(node), names_in(node)))
        if name.startswith("."):
            assert isinstance(call.func, ast.Attribute)
            target = call.func.value
            writes = name == ".copy_"
            passed.insert(0, Passed(flat(of), not writes, writes, self._numel(target), names_in(target)))
        line = self._line("call", name, passed)
        if "out" in named:
            self._value = flat(named["out"])
        elif name == ".copy_":
            self._value = flat(of)
        elif name != ".item":
            self._value = self._made()
            (line.result,) = self._value
        return line

    def _operator(self, name: str, call: ast.Call, given: list[Value], named: dict[str, Value]) -> Line:
        schemas = _schemas(name)
        nodes: dict[int | str, ast.expr] = {
            **dict(enumerate(call.args)),
            **{k.arg or "**": k.value for k in call.keywords},
        }
        values: dict[int | str, Value] = {**dict(enumerate(given)), **{key: v for key, v in named.items()}}
        passed, views = [], NOTHING
        for key, value in values.items():
            found = [a for s in schemas for i, a in enumerate(s.arguments) if key in (i, a.name)]
            writes = not schemas or any(a.alias_info is not None and a.alias_info.is_write for a in found)
            memories = flat(value)
            passed.append(Passed(memories, True, writes, self._numel(nodes[key]), names_in(nodes[key])))
            if not schemas or any(a.alias_info is not None for a in found):
                views |= memories
        texts = [n.value for n in nodes.values() if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        line = self._line(_kind(name), name, passed, group=texts[-1] if texts else "", sure=bool(schemas))
        of_views = any(r.alias_info is not None for s in schemas for r in s.returns)
        line.constants = tuple(constants_in(call.args))
        if name.rpartition(".")[0] in _TICKETS and given:  # what is brought comes to the memory of its ticket
            self._value = flat(given[0])
        elif line.kind == "wait" or name.rpartition(".")[0] in _UNDECLARED_VIEWS:
            self._value = NOTHING.union(*(p.memories for p in passed))
        elif of_views and views:
            self._value = views
        else:
            self._value = self._made() | (NOTHING if schemas else views)
            line.result = max(self._value - views, key=str)
        return line

    # ---- values -----------------------------------------------------------------------------------------------------

    def _new(self) -> Memory:
        self._memories += 1
        return self._memories

    def _made(self) -> frozenset[Memory]:
        memory = self._new()
        self.results.add(memory)
        return frozenset([memory])

    def _item(self, value: Value, i: int) -> Value:
        if isinstance(value, tuple):
            return value[i] if -len(value) <= i < len(value) else NOTHING
        found = frozenset((memory, i) if memory in self.results else memory for memory in value)
        self.results |= found - value
        return found

    def _bind(self, name: str, value: Value) -> None:
        for memory in flat(value):
            self.holders[memory] += 1
            self.released.pop(memory, None)
        self._unbind(name)
        self.names[name] = value
        self._gone.pop(name, None)

    def _unbind(self, name: str) -> None:
        self.numel.pop(name, None)
        for memory in flat(self.names.pop(name, NOTHING)):
            self.holders[memory] -= 1
            if not self.holders[memory]:
                self.released[memory] = self._when

    def _numel(self, node: ast.expr | None) -> int | None:
        match node:
            case ast.Name(id=name):
                return self.numel.get(name)
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[_, sizes, *_]):
                return product_of(sizes)
            case ast.Call(func=ast.Name(id=name), args=[sizes, *_]) if name.startswith("empty_strided"):
                return product_of(sizes)
        return None

    def _partition(self, function: ast.expr) -> ast.FunctionDef | None:
        match function:
            case ast.Subscript(value=ast.Attribute(attr="partitions"), slice=ast.Constant(value=int(i))):
                return self.wrapper.functions.get(f"partition_{i}")
        return None

    def _line(self, kind: Kind, name: str, passed: list[Passed], **more: Any) -> Line:
        text = self.wrapper.text[self._number - 1].strip() if self._number else ""
        return Line(kind, self._number, text, name, passed, stream=self._stream, when=self._when, **more)

    def _lost(self, name: str) -> Line:
        return self._line("lost", name, [Passed(flat(self._gone.get(name, NOTHING)))])


def _empties(function: ast.FunctionDef) -> bool:
    """Whether a function of the module empties the list that it is given."""
    given = function.args.args[-1].arg if function.args.args else ""
    return any(ast.unparse(statement) == f"{given}.clear()" for statement in function.body)


def _schemas(name: str) -> list[Any]:
    """Of an operator, or of all its overloads; none where it is not known."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, OpOverload):
        return [found._schema]
    overloads = getattr(found, "overloads", None)
    return [getattr(found, overload)._schema for overload in overloads()] if overloads is not None else []


def _kind(name: str) -> Kind:
    namespace, operator = name.split(".")[:2]
    if operator.startswith("wait_tensor"):
        return "wait"
    if name.startswith("zerofx.step."):
        return "step"
    if namespace == "zerofx" and operator in CARRIES:
        return "carry"
    starts = {str(target).rpartition(".")[0] for target in (*GATHERS, *SCATTERS, *COLLECTIVES)} | {"zerofx.refresh"}
    return "start" if namespace == "_c10d_functional" or f"{namespace}.{operator}" in starts else "call"


_TICKETS = ("zerofx.wait_reload", "zerofx.wait_reload_activation")
_VIEWS = ("reinterpret_tensor", "alloc_from_pool")
_VIEW_METHODS = ("as_strided", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view")
_OF_SHAPES = ("size", "stride", "storage_offset", "numel", "dim", "append", "data_ptr")
_UNDECLARED_VIEWS = frozenset(str(op).rpartition(".")[0] for op in edit._UNDECLARED_VIEWS)
