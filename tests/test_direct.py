"""pylinattn.torch without torch's dispatcher: taken where nobody watches the call, with the same bits as the torch op."""

from __future__ import annotations

import contextlib
import re

import pytest
from harness import check

torch = pytest.importorskip("torch")
from test_exchange import one_by_one  # noqa: E402
from test_torch import Problem, _Mode, both  # noqa: E402

import pylinattn  # noqa: E402
import pylinattn.torch as ours  # noqa: E402
from pylinattn import _exchange  # noqa: E402


@pytest.fixture
def launches(monkeypatch):
    """Ops that were run on tensors borrowed all at once, in turn."""
    Problem({}, False, torch.float32, grad=False).ours()
    exchange = _exchange.exchanges.get(torch.Tensor)
    if exchange is None:
        pytest.skip(f"torch {torch.__version__} has no C exchange API")
    taken, launch = [], exchange.launch
    monkeypatch.setattr(exchange, "launch", lambda op, *a: taken.append(op.name) or launch(op, *a))
    return taken


@contextlib.contextmanager
def no_dispatch(monkeypatch):
    """Fails where a torch op of ours is called."""
    from pylinattn import _torch_ops

    def refuse(*a):
        raise AssertionError("torch's dispatcher was called")

    with monkeypatch.context() as patch:
        for name in ("gdn_fwd", "gdn_decode", "kda_fwd", "kda_decode", "gdn_bwd", "kda_bwd"):
            patch.setattr(_torch_ops, f"_{name}", refuse)
        yield


def same(got, want):
    for mine, theirs in zip(got, want, strict=True):
        check((mine is None) == (theirs is None), "None on one side")
        if mine is not None:
            check(torch.equal(mine, theirs), "other values")
            check(mine.dtype == theirs.dtype and mine.is_contiguous(), f"{mine.dtype}")


@both
@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("final", [False, True], ids=["o", "o_state"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_same_bits(monkeypatch, launches, per_channel, case, recurrent, final, dtype):
    problem = Problem(case, per_channel, dtype, grad=False)
    if dtype == torch.bfloat16 and problem.state is not None:
        problem.state = problem.state.float()
    before = None if problem.state is None else problem.state.clone()
    with torch.no_grad():
        problem.ours(recurrent, output_final_state=final)  # what is checked once is checked here
        launches.clear()
        with no_dispatch(monkeypatch):
            got = problem.ours(recurrent, output_final_state=final)
        check(launches == [launches[0]] and "bwd" not in launches[0], f"launched were {launches}")
        with _Mode() as seen:
            want = problem.ours(recurrent, output_final_state=final)
        with one_by_one():
            plain = problem.ours(recurrent, output_final_state=final)
    check(any("pylinattn" in op for op in seen.ops), "a dispatch mode did not see the op")
    same(got, want)
    same(got, plain)
    check((got[1] is not None) == final, "the final state")
    if before is not None:
        check(torch.equal(problem.state, before), "initial_state was written")


@both
def test_same_gradients(monkeypatch, launches, per_channel, case):
    problem = Problem(case, per_channel)
    tensors = list(problem.tensors().values())

    def run():
        outputs = problem.ours()
        given = [torch.ones_like(x) for x in outputs]
        return *outputs, *torch.autograd.grad(outputs, tensors, given)

    run()
    launches.clear()
    with no_dispatch(monkeypatch):
        got = run()
    family = "kda" if per_channel else "gdn"
    check(launches[0] == f"{family}_fwd", f"launched were {launches}")
    with _Mode():
        want = run()
    for mine, theirs in zip(got, want):
        check(torch.equal(mine, theirs), "other values")
        check(mine.requires_grad == theirs.requires_grad, "requires_grad")


def test_second_derivatives_are_refused():
    problem = Problem(dict(l2norm=True), False)
    o, _ = problem.ours()
    with pytest.raises(TypeError, match="no gradient"):
        torch.autograd.grad(o.sum(), problem.k, create_graph=True)


@pytest.mark.parametrize("name", ["q", "v", "g", "beta", "state", "A_log", "dt_bias"])
def test_negated_views_count_with_their_sign(name):
    case = dict(gate="softplus", sigmoid=True, state=True)
    problem = Problem(case, True, grad=False)
    want = problem.ours()
    x = getattr(problem, name)
    lazy = torch.complex(x, -x).conj().imag
    check(lazy.is_neg(), "the view is not lazy")
    setattr(problem, name, lazy)
    same(problem.ours(), want)


def test_negated_gradient():
    problem = Problem(dict(l2norm=True), True)
    d_o = torch.randn(problem.v.shape, dtype=torch.float64)
    lazy = torch.complex(d_o, -d_o).conj().imag
    got, want = (torch.autograd.grad(problem.ours()[0], problem.k, d) for d in (lazy, d_o))
    check(torch.equal(got[0], want[0]), "the sign of a gradient is lost")


def test_what_is_copied_or_widened_goes_by_the_op(launches):
    problem = Problem(dict(l2norm=True, state=True), False, torch.float32, K=8, V=8, grad=False)
    want = problem.ours()
    half = problem.state.half()
    problem.state = half.float()
    rounded = problem.ours()
    launches.clear()
    problem.state = half
    same(problem.ours(), rounded)
    problem.state = Problem(
        dict(l2norm=True, state=True), False, torch.float32, K=8, V=8, grad=False
    ).state
    problem.v = problem.v.mT.contiguous().mT
    for _ in range(2):
        same(problem.ours(), want)
    check(len(launches) == 3, f"launched were {launches}")  # by the op, from copies


def test_wrong_calls_are_wrong_every_time():
    problem = Problem(dict(state=True), False, torch.float32, grad=False)
    for _ in range(3):
        for wrong in (
            dict(initial_state=problem.state.mT),
            dict(initial_state=problem.state[:1]),
            dict(use_gate_in_kernel=True, A_log=torch.zeros(3)),
            dict(use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=torch.zeros(5)),
            dict(cu_seqlens=torch.tensor([0, 10])),
            dict(scale=0.0),
        ):
            with pytest.raises(ValueError, match=r"chunk_gated_delta_rule|gdn_fwd"):
                problem.ours(**wrong)
        problem.ours()


@pytest.mark.parametrize(
    "name",
    [
        "chunk_gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "chunk_kda",
        "fused_recurrent_kda",
    ],
)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_arguments_that_cannot_be_are_named(name, grad):
    """No tensor, or one that a cast would make something else of: an error of ours that says which."""
    problem = Problem(dict(state=True, packed=True), "kda" in name, torch.float32, grad=grad)
    right = dict(q=problem.q, k=problem.k, v=problem.v, g=problem.g, beta=problem.beta)
    more = dict(initial_state=problem.state, cu_seqlens=problem.cu)
    more |= dict(use_gate_in_kernel=True, A_log=torch.zeros(4), dt_bias=problem.g[0, 0].detach())
    function = getattr(ours, name)
    function(**right, **more)
    names = [*right, "initial_state", "cu_seqlens", "A_log", "dt_bias"]
    if name == "fused_recurrent_gated_delta_rule":
        names.append("gk")
    for argument in names:
        like = (right | more).get(argument, problem.q).detach()
        wrong = [
            2.0,
            "x",
            [[1.0]],
            object(),
            like.numpy(),
            torch.zeros(()),
            like.to(torch.complex64),
        ]
        wrong += [None] if argument in ("q", "k", "v") else []
        wrong += [] if argument == "cu_seqlens" else [like.int(), like > 0]
        for x in wrong:
            with pytest.raises(pylinattn.LinattnError, match=rf"\b{argument}\b"):
                function(**(right | more | {argument: x}))


@pytest.mark.parametrize(
    "wrong", [[0, 10], torch.zeros(0), torch.tensor(4), torch.zeros(2, 2)], ids=str
)
def test_odd_lengths_have_the_same_outcome(wrong):
    problem = Problem(dict(packed=True), False, torch.float32, grad=False)
    with pytest.raises(Exception) as got:  # noqa: PT011  whatever it is
        problem.ours(cu_seqlens=wrong)
    with one_by_one(), pytest.raises(type(got.value), match=re.escape(str(got.value))):
        problem.ours(cu_seqlens=wrong)


def test_one_layout_by_two_names():
    """A transposed state and a V-first one lie alike, and are told apart where they differ."""
    random = torch.Generator().manual_seed(0)
    square = Problem(dict(state=True), False, torch.float32, K=6, V=6, grad=False)
    square.state = torch.randn(square.state.shape, generator=random)
    k_first = square.ours()
    v_first = square.ours(initial_state=square.state.mT.contiguous(), state_v_first=True)
    check(torch.equal(k_first[0], v_first[0]), "o")
    check(torch.equal(k_first[1], v_first[1].mT) and v_first[1].is_contiguous(), "final_state")
    other = square.ours(initial_state=square.state.mT, state_v_first=True)
    check(torch.equal(k_first[0], other[0]), "a V-first state that is a transposed view")


# ---- those who watch


def test_traces_hold_the_op():
    problem = Problem(dict(l2norm=True), False, torch.float32, grad=False)

    def layer(v):
        return ours.chunk_gated_delta_rule(
            problem.q, problem.k, v, problem.g, problem.beta, use_qk_l2norm_in_kernel=True
        )[0]

    from torch.fx.experimental.proxy_tensor import make_fx

    layer(problem.v)
    for kind in ("real", "fake", "symbolic"):
        graph = make_fx(layer, tracing_mode=kind, _allow_non_fake_inputs=True)(problem.v)
        check("pylinattn.gdn_fwd" in str(graph.graph), f"{kind}: {graph.graph}")
    traced = torch.jit.trace(layer, problem.v)
    check("pylinattn::gdn_fwd" in str(traced.graph), str(traced.graph))
    check(torch.equal(traced(2 * problem.v), layer(2 * problem.v)), "the trace holds a constant")


def test_fake_tensors_stay_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    problem = Problem(dict(l2norm=True), False, torch.float32, grad=False)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(getattr(problem, n)) for n in ("q", "k", "v", "g", "beta")]
        o, final = ours.chunk_gated_delta_rule(*fake, output_final_state=True)
    check(type(o).__name__ == type(final).__name__ == "FakeTensor", f"{type(o)}, {type(final)}")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transforms_see_the_op():
    problem = Problem(dict(l2norm=True), False, torch.float32, grad=False)
    run = lambda v: ours.chunk_gated_delta_rule(problem.q, problem.k, v, problem.g, problem.beta)[0]  # noqa: E731
    run(problem.v)
    pair = torch.stack([problem.v, 2 * problem.v])
    same([torch.vmap(run)(pair)], [torch.stack([run(v) for v in pair])])
    same([torch.func.functionalize(run)(problem.v)], [run(problem.v)])


def arguments_of(problem):
    return [x.detach() for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]


def losses(per_channel):
    function = ours.fused_recurrent_kda if per_channel else ours.chunk_gated_delta_rule

    def of_o(q, k, v, g, beta):
        return function(q, k, v, g=g, beta=beta)[0].square().sum()

    def of_both(q, k, v, g, beta):
        both = function(q, k, v, g=g, beta=beta, output_final_state=True)
        return sum(x.square().sum() for x in both)

    return of_o, of_both


def slopes(loss, given):
    given = [x.clone().requires_grad_() for x in given]
    return torch.autograd.grad(loss(*given), given)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_gradients_under_transforms(per_channel):
    """torch.func.grad, vjp and vmap, one in the other in both orders, and vmap of what autograd records."""
    given = arguments_of(Problem({}, per_channel))
    pairs = [torch.stack([x, x / 2]) for x in given]
    every = tuple(range(len(given)))
    for loss in losses(per_channel):
        want = slopes(loss, given)
        grad = torch.func.grad(loss, argnums=every)
        same(grad(*given), want)
        value, vjp = torch.func.vjp(loss, *given)
        same(vjp(torch.ones_like(value)), want)
        each = [slopes(loss, [x[i] for x in pairs]) for i in (0, 1)]
        want = [torch.stack(x) for x in zip(*each)]
        total = lambda *x: torch.vmap(loss)(*x).sum()  # noqa: B023, E731
        for got in (torch.vmap(grad), torch.func.grad(total, argnums=every)):
            same(got(*pairs), want)
        same(slopes(total, pairs), want)
        for transform, x in ((grad, given), (total, pairs)):
            compiled = torch.compile(transform, fullgraph=True, backend="eager")
            with pytest.raises(torch._dynamo.exc.Unsupported):  # never zeros
                compiled(*x)


def test_many_gradients_at_once():
    problem = Problem(dict(l2norm=True), False)
    o, _ = problem.ours(output_final_state=False)
    d_o = torch.randn(3, *o.shape, dtype=o.dtype)
    got = torch.autograd.grad(o, problem.k, d_o, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(o, problem.k, d, retain_graph=True)[0] for d in d_o]
    same(got, [torch.stack(want)])


def test_derivatives_that_are_not_there_are_refused():
    """Forward mode and second derivatives: an error, never zeros."""
    given = arguments_of(Problem({}, False))
    loss = losses(False)[0]
    grad = torch.func.grad(loss)
    tangents = tuple(torch.ones_like(x) for x in given)
    for wrong in (
        lambda: torch.func.jvp(loss, tuple(given), tangents),
        lambda: torch.func.jacfwd(loss)(*given),
        lambda: torch.func.grad(lambda *x: grad(*x).sum())(*given),
        lambda: torch.func.hessian(loss)(*given),
    ):
        with pytest.raises(NotImplementedError, match=r"gdn_(fwd|bwd): it has no"):
            wrong()
    from torch.autograd import forward_ad

    for needs_grad in (False, True):
        for recurrent in (False, True):
            problem = Problem({}, False, grad=needs_grad)
            want = problem.ours(recurrent)
            with forward_ad.dual_level():
                for mine, theirs in zip(problem.ours(recurrent), want):
                    torch.testing.assert_close(mine, theirs)  # nothing here has a tangent
                problem.v = forward_ad.make_dual(problem.v, torch.ones_like(problem.v))
                with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                    problem.ours(recurrent)


def test_function_modes_and_devices():
    problem = Problem(dict(l2norm=True), False, torch.float32, grad=False)
    want = problem.ours()
    with torch.device("cpu"):  # a mode of functions
        same(problem.ours(), want)
    with torch.inference_mode():
        same(problem.ours(), want)
        check(problem.ours()[0].is_inference(), "no inference tensor")
    with torch.autocast("cpu", torch.bfloat16):
        same(problem.ours(), want)


def test_hooks_and_double_use():
    """Saved tensors are checked for writes, and hooks see them."""
    problem = Problem(dict(l2norm=True), False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: packed.append(x.shape) or x, lambda x: x
    ):
        o, _ = problem.ours()
    check(len(packed) >= 5, f"saved were {packed}")
    problem = Problem(dict(l2norm=True), False)
    o, _ = problem.ours()
    with torch.no_grad():
        problem.k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        o.sum().backward()
