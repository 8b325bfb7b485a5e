"""Every node case that the ONNX project publishes for its operators ``Attention`` and ``RotaryEmbedding``.

The expected numbers are ONNX's own, and so is the tolerance: that of the case, and for bfloat16 the wider one that
ONNX's test runner applies.
"""

import inspect

import pytest
import torch
from cases import BACKEND_NAMES
from helpers import assert_published

from headwise import UnsupportedError

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'headwise[onnx]'")

from onnx.backend.test.case import node as onnx_cases  # noqa: E402
from onnx.backend.test.case.node import attention, rotaryembedding  # noqa: E402, F401 (importing them makes the cases)
from onnx_operators import attention_operator, rotary_operator  # noqa: E402

OPERATORS = {"Attention": attention_operator, "RotaryEmbedding": rotary_operator}
# A case exists twice: as one node, and "expanded" into the nodes that define it. The first form is the operator.
CASES = {
    case.name: case
    for case in onnx_cases._NodeTestCases
    if len(case.model.graph.node) == 1 and case.model.graph.node[0].op_type in OPERATORS
}


def names_of(operator):
    return [name for name, case in CASES.items() if case.model.graph.node[0].op_type == operator]


def tensor(array):
    if array.dtype.name == "bfloat16":  # which torch does not take from numpy
        return torch.from_numpy(array.view("uint16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def attributes(node):
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def attention_inputs(name):
    return [tensor(array) for array in CASES[name].data_sets[0][0]]


def check(name, **how):
    """Run a case and compare all outputs that it names; the attributes it gives go on as they are."""
    case = CASES[name]
    node = case.model.graph.node[0]
    for arrays, published in case.data_sets:
        given = iter(arrays)
        inputs = [tensor(next(given)) if called else None for called in node.input]
        outputs = OPERATORS[node.op_type](*inputs, **attributes(node), **how)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [out for out, called in zip(outputs, node.output, strict=False) if called]
        assert len(wanted) == len(published)
        for i, (got, array) in enumerate(zip(wanted, published, strict=True)):
            want = tensor(array)
            assert got.dtype == want.dtype
            rtol = max(case.rtol, 2**-6) if got.dtype == torch.bfloat16 else case.rtol
            what = f"onnx {onnx.__version__}, {name}, output {i}, with the tolerance stated there"
            hidden = want == -torch.inf  # scores of hidden keys, which have no distance
            assert torch.equal(got == -torch.inf, hidden), what
            got, want = got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)
            assert_published(got, want, rtol=rtol, atol=case.atol, source=what)


@pytest.mark.parametrize("name", names_of("Attention"))
def test_attention_case(name):
    # In float16 ONNX's numbers are themselves a unit in the last place off, and its tolerance is one unit: what a fused
    # kernel rounds on the other side of the exact value is then over. The reference rounds the exact value once.
    half = attention_inputs(name)[0].dtype == torch.float16
    check(name, backend="reference" if half else "auto")


@pytest.mark.parametrize("name", names_of("RotaryEmbedding"))
def test_rotary_case(name):
    check(name)


def test_no_case_is_left_out():
    """The numbers of cases in onnx 1.23.2; another version may have more, and then this line is to be raised."""
    made = [case.name for case in onnx_cases._NodeTestCases if not case.name.endswith("_expanded")]
    assert len(names_of("Attention")) == 93
    assert len(names_of("RotaryEmbedding")) == 8
    assert sorted(made) == sorted(CASES)


def test_every_attribute_and_input_has_its_meaning_here():
    """The adapter takes what the newest version of each operator takes, under the operator's names."""
    for operator, function in OPERATORS.items():
        schema = onnx.defs.get_schema(operator)
        takes = inspect.signature(function).parameters.values()
        keywords = {p.name for p in takes if p.kind == p.KEYWORD_ONLY} - {"backend"}
        assert keywords == set(schema.attributes)
        assert len([p for p in takes if p.kind == p.POSITIONAL_OR_KEYWORD]) == len(schema.inputs)


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_each_backend_agrees_where_it_runs(backend):
    """A backend may say why not; what it runs has to agree."""
    names = [name for name in names_of("Attention") if attention_inputs(name)[0].dtype == torch.float32]
    ran = []
    for name in names:
        try:
            check(name, backend=backend)
        except UnsupportedError:
            continue
        ran.append(name)
    assert len(names) == 82 and (ran == names if backend == "reference" else len(ran) > 50)
