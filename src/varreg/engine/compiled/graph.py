"""Run a compiled graph that contains an observed forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from varreg import _torch
from varreg.engine import processes
from varreg.engine.compiled.certificate import Examiner, Witness
from varreg.engine.compiled.passes import Pass
from varreg.engine.compiled.rewrite import rewrite
from varreg.engine.compiled.sites import ForwardInGraph, find
from varreg.engine.compiled.uses import Certificate
from varreg.engine.escapes import try_escapes
from varreg.engine.forward import is_transformed
from varreg.engine.refusals import refuse_transform
from varreg.thresholds import MOST_CERTIFICATES

if TYPE_CHECKING:
    from varreg.engine.observer import Observer

Compiler = Callable[[GraphModule, list[Any]], Callable[..., Any]]


def compile_observed(observer: Observer) -> Callable[[Compiler, GraphModule, list[Any]], Any]:
    """Return the function that compiles a captured graph with an observed forward in it, by torch's
    compiler, to an `ObservedGraph`.
    """

    def compile_graph(compiler: Compiler, module: GraphModule, inputs: list[Any]) -> Any:
        is_parameter = [
            isinstance(t, Tensor) and observer.parameters.ledger(t) is not None for t in inputs
        ]
        found = find(module.graph, is_parameter)
        if found is None:
            observer.graphs.give_up()
            _torch.restart_capture("varreg: the observed forward runs eagerly")
        assert found is not None
        original = Graph()
        original.output(original.graph_copy(module.graph, {}))
        rewrite(module, found)
        same = find(original, is_parameter)
        assert same is not None
        return ObservedGraph(observer, module, original, same, compiler(module, inputs))

    return compile_graph


class ObservedGraph:
    """A graph with an observed forward in it, as torch.compile calls it.

    For inputs of new shapes it runs the captured graph eagerly under the tracer. If that gives a
    certificate, it runs the compiled graph for inputs of these shapes from then on.
    """

    def __init__(
        self,
        observer: Observer,
        module: GraphModule,
        graph: Graph,
        found: ForwardInGraph,
        compiled: Callable[..., Any],
    ):
        self._observer = weakref.ref(observer)  # the graph may outlive the model
        self._module, self._graph, self._found, self._compiled = module, graph, found, compiled
        self._inside = {*found.inside}
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        self._parameters = [placeholders.index(n) for n in found.parameters]
        self._token = placeholders.index(found.token)
        fixed = {*self._parameters, self._token}
        self._others = [i for i in range(len(placeholders)) if i not in fixed]
        self._certificates: dict[Any, Certificate | None] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the graph: the observed forward, and the calls before and after it."""
        observer = self._observer()
        if observer is None or not observer.is_on:
            return self._run(args, None)
        if not _is_ordinary() or any(p._post_accumulate_grad_hooks for p in self._values(args)):
            return self._run(args, observer)
        key = (observer.grouping.key, *(_shape_of(args[i]) for i in self._others))
        if key not in self._certificates:
            return self._examine(key, args, observer)
        certificate = self._certificates[key]
        if certificate is None:
            return self._run(args, observer)
        if is_transformed():
            refuse_transform(observer.model)
        observer.forward.start(certificate.partition)
        inputs = [*args]
        inputs[self._token] = Pass(observer, certificate, self._values(args)).token()
        return self._compiled(*inputs)

    def _values(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[i] for i in self._parameters]

    # ---- as it was captured ----------------------------------------------------------------------

    def _examine(self, key: Any, args: Sequence[Any], observer: Observer) -> Any:
        """Run the graph eagerly, and store the certificate for inputs of these shapes."""
        tracer = observer.tracer
        witness = observer.tracer = Witness(observer)
        examiner = Examiner(observer, witness, self._found)
        try:
            out = self._run(args, observer, examiner)
        finally:
            observer.tracer = tracer
        if len(self._certificates) >= MOST_CERTIFICATES:
            self._certificates.clear()
        self._certificates[key] = examiner.result
        if examiner.result is None and witness.trace.batch > 1:
            observer.graphs.give_up()
        return out

    def _run(
        self, args: Sequence[Any], observer: Observer | None, examiner: Examiner | None = None
    ) -> Any:
        """Run the graph eagerly, its observed forward under the tracer."""
        values: dict[Node, Any] = {}
        rest = iter(args)
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "output":
                return map_arg(node.args[0], values.__getitem__)
            elif node is self._found.enter:
                if observer is None:
                    continue
                self._run_observed(values, args, observer, examiner)
            elif node is not self._found.leave and node not in values:
                values[node] = self._call(node, values)
        return None

    def _run_observed(
        self,
        values: dict[Node, Any],
        args: Sequence[Any],
        observer: Observer,
        examiner: Examiner | None,
    ) -> None:
        """Run the observed forward under the tracer."""
        forward, model = observer.forward, observer.model
        inputs = [values[n] for n in self._found.inputs]
        before, parameters, outputs = dict(values), self._values(args), None
        forward.enter(model, inputs, {})
        try:
            for node in self._found.inside:
                values[node] = out = self._call(node, values)
                if examiner is not None:
                    with _torch.DisableTorchFunction():
                        examiner.look(node, out, parameters)
            outputs = [values[n] for n in self._found.outputs]
            with _torch.DisableTorchFunction():
                if examiner is not None:
                    examiner.finish(outputs)
                if observer.tracer.trace.escapes:
                    again = _SecondRun(self, before)
                    try_escapes(observer, again, tuple(inputs), {}, inputs, outputs)
                    observer.tracer.trace.escapes.clear()
        finally:
            forward.leave(model, inputs, {}, outputs)

    def _call(self, node: Node, values: dict[Node, Any]) -> Any:
        """Run a node of the graph, and return its result."""
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op == "get_attr":
            return _attribute(self._module, str(node.target))
        assert callable(node.target)
        return node.target(*args, **kwargs)


class _SecondRun(nn.Module):
    """The observed forward of a graph, to be run again with other inputs."""

    def __init__(self, graph: ObservedGraph, values: dict[Node, Any]):
        super().__init__()
        self._graph, self._values = graph, values

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs for other inputs."""
        found, values = self._graph._found, dict(self._values)
        values |= dict(zip(found.inputs, inputs, strict=True))
        for node in found.inside:
            values[node] = self._graph._call(node, values)
        return [values[n] for n in found.outputs]


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _shape_of(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def _is_ordinary() -> bool:
    """Return whether a forward runs without a checkpoint, without hooks on saved tensors, and
    without other processes that share the batch.
    """
    if processes.are_several() or _torch.current_graph_task() != -1:
        return False
    return _torch.saved_tensors_hooks is not None and _torch.saved_tensors_hooks(True) is None
