"""FLA's own functions on a GPU against ours: op, dtype, layout, packed, options and gradients, and who ran each call.

Each case is called three times: by FLA alone, by FLA's function with us in its dispatch, and in a float64 token loop. FLA's kernels
are compiled at their first call; here they take the first of their configurations, so that nothing is tuned.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys

import pytest
from harness import check

torch = pytest.importorskip("torch")
from test_torch import Problem, check_close, ident  # noqa: E402

import pylinattn  # noqa: E402
import pylinattn.torch as ours  # noqa: E402
from pylinattn.ops import OPS  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
D = 64
# relative RMS: ours against the loop, as the targets have it; FLA's against the loop; a gate in float32
OUTPUTS, STATES, GRADIENTS = 5e-3, 3e-3, 1e-2
THEIRS, GATES = 2e-2, 1e-5
FUNCTIONS = {
    "chunk_gated_delta_rule": ("gated_delta_rule", "gdn"),
    "fused_recurrent_gated_delta_rule": ("gated_delta_rule", "gdn"),
    "chunk_kda": ("kda", "kda"),
    "fused_recurrent_kda": ("kda", "kda"),
}
CASES = [
    dict(l2norm=True),
    dict(l2norm=True, state=True, v_first=True),
    dict(gate="softplus", sigmoid=True, l2norm=True, state=True),
    dict(l2norm=True, state=True, packed=True, scale=0.3),
    dict(gate="softplus", sigmoid=True, neg_eigval=True, l2norm=True, state=True, v_first=True, packed=True),
]  # fmt: skip
KDA_CASES = [
    *CASES,
    dict(gate="bounded", l2norm=True, state=True),
    dict(gate="bounded", without_A=True, l2norm=True, packed=True, sigmoid=True),
]
HALF = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.fixture(scope="module")
def fla():
    """FLA's functions by name."""
    try:
        modules = {
            name: importlib.import_module(f"fla.ops.{name}") for name in ("gated_delta_rule", "kda")
        }
        from triton.runtime.autotuner import Autotuner
    except Exception as error:  # FLA or Triton is not there, or finds no driver
        pytest.skip(f"no FLA that can be imported: {type(error).__name__}: {error}")
    for name, module in list(sys.modules.items()):
        for kernel in vars(module).values() if name.startswith("fla.") else ():
            while hasattr(kernel, "fn"):
                if isinstance(kernel, Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = kernel.fn
    found = {name: getattr(modules[place], name) for name, (place, _) in FUNCTIONS.items()}
    gates = {
        "fused_kda_gate": importlib.import_module("fla.ops.kda.gate"),
        "fused_gdn_gate": importlib.import_module("fla.ops.gated_delta_rule.gate"),
    }
    return found | {name: getattr(module, name, None) for name, module in gates.items()}


@contextlib.contextmanager
def ops_that_run():
    """Names of our ops, one for each call, whichever way it comes."""
    names, runs = [], {name: entry.op.run for name, entry in OPS.items()}
    for name, entry in OPS.items():
        entry.op.run = lambda args, name=name: names.append(name) or runs[name](args)
    try:
        yield names
    finally:
        for name, entry in OPS.items():
            entry.op.run = runs[name]


@contextlib.contextmanager
def registered():
    ours.register_fla()
    try:
        yield
    finally:
        ours.unregister_fla()


def problems(name, case, dtype, tokens):
    """The same values in float64, and as a model has them on the device: what is not q, k and v in float32."""
    per_channel = FUNCTIONS[name][1] == "kda"
    options = dict(K=D, V=D, grad=False, T=tokens, lengths=(tokens // 3, tokens - tokens // 3))
    exact, fast = (Problem(case, per_channel, dtype, **options) for _ in range(2))
    for key, x in exact.tensors().items():
        value = x.float() if key in ("g", "beta", "state", "A_log", "dt_bias") else x
        if key in ("A_log", "dt_bias"):
            value = value.flatten()
        setattr(exact, key, value.double())
        setattr(fast, key, value.to(DEVICE))
    if fast.cu is not None:
        fast.cu = fast.cu.to(DEVICE)
    return exact, fast


def call(function, problem, **more):
    keywords = problem.keywords() | more
    return function(problem.q, problem.k, problem.v, g=problem.g, beta=problem.beta, **keywords)


def cases_of(name):
    return KDA_CASES if FUNCTIONS[name][1] == "kda" else CASES


matrix = pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in FUNCTIONS for case in cases_of(name)],
    ids=[f"{name}-{ident(case)}" for name in FUNCTIONS for case in cases_of(name)],
)


# Gradients come first, because their kernels take longest to compile.
GRADIENT_CASES = {
    "chunk_gated_delta_rule": [CASES[2], CASES[4]],
    "chunk_kda": [CASES[2], CASES[4], KDA_CASES[5]],
}


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in GRADIENT_CASES.items() for case in cases],
    ids=[f"{name}-{ident(case)}" for name, cases in GRADIENT_CASES.items() for case in cases],
)
@pytest.mark.parametrize("dtype", HALF)
def test_gradients(gpu, fla, name, case, dtype):
    family = FUNCTIONS[name][1]
    exact, fast = problems(name, case, HALF[dtype], 200)
    for problem in (exact, fast):
        for x in problem.tensors().values():
            x.requires_grad_()
    names, tensors = zip(*fast.tensors().items())
    with registered(), ops_that_run() as ran:
        outputs = call(fla[name], fast)
        given = [torch.randn_like(x) for x in outputs]
        got = torch.autograd.grad(outputs, tensors, given)
    check(ran == [f"{family}_fwd", f"{family}_bwd"], f"our ops that ran are {ran}")
    wide = [x.cpu().double() for x in given]
    want = torch.autograd.grad(exact.plain(), list(exact.tensors().values()), wide)
    for key, mine, loop in zip(names, got, want):
        check_close(mine.cpu(), loop, f"d{key} against the loop", GRADIENTS)
    try:
        with ops_that_run() as ran:
            theirs = torch.autograd.grad(call(fla[name], fast), tensors, given)
    except Exception as error:  # FLA refuses GDN's backward on Hopper with Triton 3.4 to 3.7.0
        check(family == "gdn", f"FLA's backward: {type(error).__name__}: {error}")
        return
    check(not ran, f"FLA's own gradients ran {ran}")
    for key, mine, other in zip(names, got, theirs):
        check(mine.dtype == other.dtype and mine.shape == other.shape, f"d{key} is {mine.dtype}")
        check_close(mine.cpu(), other.cpu(), f"d{key} against FLA's", GRADIENTS + THEIRS)


@matrix
@pytest.mark.parametrize("dtype", HALF)
def test_outputs(gpu, fla, name, case, dtype):
    family = FUNCTIONS[name][1]
    recurrent = name.startswith("fused")
    exact, fast = problems(name, case, HALF[dtype], 20 if recurrent else 200)
    with torch.no_grad():
        with ops_that_run() as ran:
            theirs = call(fla[name], fast)
        check(not ran, f"FLA's own call ran {ran}")
        dispatched = name != "fused_recurrent_gated_delta_rule"
        with registered(), ops_that_run() as ran:
            got = call(fla[name] if dispatched else getattr(ours, name), fast)
        op = f"{family}_decode" if recurrent else f"{family}_fwd"
        check(ran == [op], f"with us in FLA's dispatch, our ops that ran are {ran}")
        check(pylinattn.last_path().startswith(f"{DEVICE}/"), pylinattn.last_path())
        if not dispatched:
            with registered(), ops_that_run() as ran:
                again = call(fla[name], fast)
            check(not ran and torch.equal(again[0], theirs[0]), f"FLA dispatches {name} after all")
        want = exact.plain()
    for mine, other, loop, what, limit in zip(got, theirs, want, ("o", "state"), (OUTPUTS, STATES)):
        check(mine.dtype == other.dtype, f"{what} is {mine.dtype}, FLA's {other.dtype}")
        check(mine.device.type == DEVICE, f"{what} is on {mine.device}")
        mine, other = mine.cpu(), other.cpu()
        check_close(mine, loop, f"{what} against the loop", limit)
        check_close(other, loop, f"FLA's {what} against the loop", THEIRS)
        check_close(mine, other, f"{what} against FLA's", limit + THEIRS)


@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "fused_recurrent_kda"])
def test_long_recurrent_calls_take_the_forward(gpu, fla, name):
    exact, fast = problems(name, CASES[2], torch.bfloat16, 200)
    with torch.no_grad():
        theirs = call(fla[name], fast)
        with ops_that_run() as ran:
            got = call(getattr(ours, name), fast)
        check(ran == [f"{FUNCTIONS[name][1]}_fwd"], f"our ops that ran are {ran}")
        want = exact.plain()
    for mine, other, loop, what, limit in zip(got, theirs, want, ("o", "state"), (OUTPUTS, STATES)):
        check_close(mine.cpu(), loop, f"{what} against the loop", limit)
        check_close(mine.cpu(), other.cpu(), f"{what} against FLA's", limit + THEIRS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float32_goes_on_to_fla(gpu, fla, name):
    """FLA takes it and no kernel of ours does: the call passes us by, and by our own names it is refused."""
    _, fast = problems(name, dict(l2norm=True, state=True), torch.float32, 20)
    with torch.no_grad():
        with registered(), ops_that_run() as ran:
            try:
                got = call(fla[name], fast)
            except Exception as error:
                pytest.skip(f"FLA takes no float32 here: {type(error).__name__}: {error}")
        check(not ran, f"our ops that ran are {ran}")
        theirs = call(fla[name], fast)
        for mine, other in zip(got, theirs):
            check(torch.equal(mine, other), "another result with us in the dispatch")
        with pytest.raises(NotImplementedError, match="f32"):
            call(getattr(ours, name), fast)


@pytest.mark.parametrize("gate", ["fused_kda_gate", "fused_kda_gate-bounded", "fused_gdn_gate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_gates(gpu, fla, gate, dtype):
    """Values and gradients; both are computed in float32."""
    name, _, bounded = gate.partition("-")
    if fla[name] is None:
        pytest.skip(f"this FLA has no {name}")
    random = torch.Generator().manual_seed(3)
    HV = 4
    shape = (2, 50, HV) if name == "fused_gdn_gate" else (2, 50, HV, D)
    make = lambda *s: torch.randn(*s, generator=random).to(DEVICE)  # noqa: E731
    g, A_log, dt_bias = make(*shape).to(dtype), make(HV), make(math.prod(shape[2:]))
    tensors = [x.requires_grad_() for x in (g, A_log, dt_bias)]
    keywords = dict(lower_bound=-5.0) if bounded else {}
    with ops_that_run() as ran:
        theirs, got = (f(*tensors, **keywords) for f in (fla[name], getattr(ours, name)))
    check(not ran, f"a gate ran {ran}")
    check(got.dtype == theirs.dtype == torch.float32, f"{got.dtype}, FLA's {theirs.dtype}")
    check_close(got.detach().cpu(), theirs.detach().cpu(), "gate", GATES)
    given = torch.randn(got.shape, generator=random).to(DEVICE)
    both = [torch.autograd.grad(y, tensors, given) for y in (got, theirs)]
    for key, mine, other in zip(("g", "A_log", "dt_bias"), *both):
        limit = GATES if mine.dtype == torch.float32 else GRADIENTS
        check_close(mine.cpu(), other.cpu(), f"d{key}", limit)
