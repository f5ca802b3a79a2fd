"""pylinattn.torch: FLA's functions against a token loop in plain torch, with its gradients, and as torch ops."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from harness import check

import pylinattn
from pylinattn import reference

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import pylinattn.torch as ours  # noqa: E402
from pylinattn.ops import OPS  # noqa: E402

DOUBLE = 1e-9  # relative RMS in float64
# gate, sigmoid, 2 sigmoid, l2norm, V-first, initial state, packed: a few of each with others
CASES = [
    dict(),
    dict(l2norm=True, state=True),
    dict(gate="softplus", sigmoid=True, l2norm=True, state=True, v_first=True),
    dict(gate="softplus", sigmoid=True, neg_eigval=True, l2norm=True, packed=True),
    dict(l2norm=True, state=True, v_first=True, packed=True, scale=0.3),
]
KDA_CASES = [
    *CASES,
    dict(gate="bounded", l2norm=True, state=True),
    dict(gate="bounded", without_A=True, l2norm=True, packed=True, sigmoid=True),
]


def ident(case):
    return "-".join(case) or "plain"


def token_loop(q, k, v, g, beta, scale, state, spans):
    """S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = scale S'q, sequence after sequence."""
    r = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(r, 2) for x in (q, k))
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    outputs, finals = [], []
    for n, (b, start, stop) in enumerate(spans):
        S = q.new_zeros(v.shape[2], k.shape[3], v.shape[3]) if state is None else state[n]
        for t in range(start, stop):
            S = S * decay[b, t, :, :, None]
            u = beta[b, t, :, None] * (v[b, t] - torch.einsum("hkv,hk->hv", S, k[b, t]))
            S = S + k[b, t, :, :, None] * u[:, None]
            outputs.append(scale * torch.einsum("hkv,hk->hv", S, q[b, t]))
        finals.append(S)
    return torch.stack(outputs).view(v.shape), torch.stack(finals)


class Problem:
    """Float64 inputs of a case, FLA's keywords for them, and what plain torch says."""

    def __init__(
        self, case, per_channel, dtype=torch.float64, K=8, V=6, grad=True, lengths=(7, 0, 12), T=20
    ):
        """Packed sequences of these lengths in T rows, or two of T / 2."""
        random = torch.Generator().manual_seed(1)
        self.case, self.per_channel = case, per_channel
        B, T, H, HV = (1, T, 2, 4) if case.get("packed") else (2, T // 2, 2, 4)
        normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)  # noqa: E731
        gates = (B, T, HV, K) if per_channel else (B, T, HV)
        self.g = normal(*gates) if case.get("gate") else -normal(*gates).abs() / 4
        self.beta = normal(B, T, HV) if case.get("sigmoid") else normal(B, T, HV).sigmoid()
        self.q, self.k, self.v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, HV, V)
        if not case.get("l2norm"):
            self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (self.q, self.k))
        lengths = list(lengths) if case.get("packed") else [T] * B
        self.cu = torch.tensor([0, *itertools.accumulate(lengths)]) if case.get("packed") else None
        N = len(lengths)
        sizes = (V, K) if case.get("v_first") else (K, V)
        self.state = normal(N, HV, *sizes) if case.get("state") else None
        self.A_log = self.dt_bias = None
        if case.get("gate"):
            self.A_log = None if case.get("without_A") else normal(1, 1, HV, 1) / 2
            self.dt_bias = normal(HV * K) if per_channel else normal(HV, 1)
        self.spans = (
            [(0, a, b) for a, b in itertools.pairwise(self.cu.tolist())]
            if self.cu is not None
            else [(b, 0, T) for b in range(B)]
        )
        if grad:
            for x in self.tensors().values():
                x.requires_grad_()

    def tensors(self):
        names = ("q", "k", "v", "g", "beta", "state", "A_log", "dt_bias")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def keywords(self):
        case = self.case
        keywords = dict(
            scale=case.get("scale"),
            initial_state=self.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=case.get("l2norm", False),
            use_beta_sigmoid_in_kernel=case.get("sigmoid", False),
            allow_neg_eigval=case.get("neg_eigval", False),
            state_v_first=case.get("v_first", False),
            cu_seqlens=self.cu,
        )
        if case.get("gate"):
            keywords |= dict(use_gate_in_kernel=True, A_log=self.A_log, dt_bias=self.dt_bias)
        if case.get("gate") == "bounded":
            keywords["lower_bound"] = -5.0
        return keywords

    def ours(self, recurrent=False, **more):
        function = (
            (ours.chunk_gated_delta_rule, ours.fused_recurrent_gated_delta_rule),
            (ours.chunk_kda, ours.fused_recurrent_kda),
        )[int(self.per_channel)][int(recurrent)]
        return function(
            self.q, self.k, self.v, g=self.g, beta=self.beta, **(self.keywords() | more)
        )

    def plain(self):
        case, q, k, g, beta = self.case, self.q, self.k, self.g, self.beta
        if case.get("l2norm"):
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        if case.get("sigmoid"):
            beta = beta.sigmoid() * (2 if case.get("neg_eigval") else 1)
        if case.get("gate"):
            heads = g.shape[2:]
            A = 1.0
            if self.A_log is not None:
                A = self.A_log.view(heads[0], *(1,) * (len(heads) - 1)).exp()
            g = g + self.dt_bias.view(heads)
            if case["gate"] == "bounded":
                g = -5.0 * torch.sigmoid(A * g)
            else:
                g = -A * torch.nn.functional.softplus(g)
        state = self.state
        if state is not None and case.get("v_first"):
            state = state.transpose(2, 3)
        scale = case.get("scale") or q.shape[-1] ** -0.5
        stop = self.spans[-1][2]
        if stop < self.v.shape[1]:  # rows past the last packed sequence are zero
            short = [x[:, :stop] for x in (q, k, self.v, g, beta)]
            o, final = token_loop(*short, scale, state, self.spans)
            o = torch.cat([o, torch.zeros_like(self.v[:, stop:])], 1)
        else:
            o, final = token_loop(q, k, self.v, g, beta, scale, state, self.spans)
        return o, final.transpose(2, 3) if case.get("v_first") else final


def relative_rms(got, want):
    got, want = got.double(), want.double()
    return ((got - want).square().mean() / want.square().mean().clamp_min(1e-30)).sqrt().item()


def check_close(got, want, what, limit=DOUBLE):
    check(got.shape == want.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(want.shape)}")
    error = relative_rms(got, want)
    check(error <= limit, f"{what}: relative RMS error {error:.2e}, allowed {limit:.0e}")


both = pytest.mark.parametrize(
    ("per_channel", "case"),
    [(False, c) for c in CASES] + [(True, c) for c in KDA_CASES],
    ids=[f"gdn-{ident(c)}" for c in CASES] + [f"kda-{ident(c)}" for c in KDA_CASES],
)


@both
@pytest.mark.parametrize("recurrent", [False, True], ids=["chunk", "recurrent"])
def test_outputs(per_channel, case, recurrent):
    problem = Problem(case, per_channel)
    with torch.no_grad():
        got, want = problem.ours(recurrent), problem.plain()
    for mine, theirs, what in zip(got, want, ("o", "final_state")):
        check_close(mine, theirs, what)


@both
def test_gradients(per_channel, case):
    problem = Problem(case, per_channel)
    d_o, d_final = (torch.randn_like(x) for x in problem.plain())
    names, tensors = zip(*problem.tensors().items())
    want = torch.autograd.grad(problem.plain(), tensors, (d_o, d_final))
    got = torch.autograd.grad(problem.ours(), tensors, (d_o, d_final))
    for name, mine, theirs in zip(names, got, want):
        check(mine.dtype == theirs.dtype, f"d{name} is {mine.dtype}")
        check_close(mine, theirs, f"d{name}")


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_gradcheck(per_channel):
    """Against finite differences, through every option at once."""
    case = dict(gate="softplus", sigmoid=True, l2norm=True, state=True, v_first=True)
    problem = Problem(case, per_channel, K=3, V=2)
    names, tensors = zip(*((n, x.detach()[:1, :4].clone().requires_grad_())
                           if n in ("q", "k", "v", "g", "beta") else (n, x)
                           for n, x in problem.tensors().items()))  # fmt: skip

    def run(*values):
        for name, value in zip(names, values):
            setattr(problem, name, value)
        problem.state = problem.state[:1]
        return problem.ours()

    check(torch.autograd.gradcheck(run, tensors, fast_mode=True), "gradcheck")


def test_gradient_of_one_output_alone():
    problem = Problem(dict(l2norm=True, state=True), False)
    for pick in (0, 1):
        got = torch.autograd.grad(problem.ours()[pick].sum(), problem.k)
        want = torch.autograd.grad(problem.plain()[pick].sum(), problem.k)
        check_close(got[0], want[0], f"dk of output {pick}")
    o, final = problem.ours(output_final_state=False)
    check(final is None and o.requires_grad, "without a final state")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_reference(dtype):
    """Outputs in the dtype of q, states in float32, against the package's float64 reference."""
    problem = Problem(dict(l2norm=True, state=True), False, dtype, K=16, V=16, grad=False)
    o, final = problem.ours()
    check(o.dtype == dtype and final.dtype == torch.float32, f"{o.dtype}, {final.dtype}")
    want = reference.gdn_fwd(
        problem.q, problem.k, problem.v, problem.g, problem.beta,
        initial_state=problem.state, qk_l2norm=True,
    )  # fmt: skip
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    check_close(o, torch.as_tensor(want.o), "o", limit)
    check_close(final, torch.as_tensor(want.final_state), "final_state", limit)


def test_strided_and_expanded_inputs():
    problem = Problem(dict(l2norm=True), False, grad=False)
    want = problem.ours()[0]
    fused = torch.cat([problem.q, problem.k], -1)
    problem.q, problem.k = fused.split(8, -1)
    problem.v = problem.v.transpose(2, 3).contiguous().transpose(2, 3)
    check(torch.equal(problem.ours()[0], want), "strided inputs give other values")
    problem.v = problem.v[:, :, :1].expand(-1, -1, 4, -1)
    expanded = problem.ours()[0]
    problem.v = problem.v.contiguous()
    check(torch.equal(problem.ours()[0], expanded), "an expanded input gives other values")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_both_dtypes(dtype):
    problem = Problem(dict(packed=True, l2norm=True), True, grad=False)
    want = problem.ours()[0]
    problem.cu = problem.cu.to(dtype)
    check(torch.equal(problem.ours()[0], want), f"{dtype} lengths give other values")


@pytest.mark.parametrize("watched", [False, True], ids=["direct", "op"])
def test_short_recurrent_calls_decode(monkeypatch, watched):
    """Which op runs: the decode op for few tokens without gradients, else the forward op."""
    called = []
    for name in ("gdn_fwd", "gdn_decode"):
        run = OPS[name].op
        monkeypatch.setattr(
            run, "run", lambda args, run=run.run, name=name: called.append(name) or run(args)
        )
    problem = Problem(dict(l2norm=True), False, grad=False)
    with _Mode() if watched else contextlib.nullcontext() as seen:
        problem.ours(recurrent=True)
        problem.ours()
        for name in ("q", "k", "v", "g", "beta"):
            x = getattr(problem, name)
            setattr(problem, name, x.repeat(1, 2, *(1,) * (x.ndim - 2)))
        problem.ours(recurrent=True)
    check(called == ["gdn_decode", "gdn_fwd", "gdn_fwd"], f"called were {called}")
    if watched:
        ops = [name for name in seen.ops if "pylinattn" in name]
        check(len(ops) == 3, f"a dispatch mode saw {ops}")


class _Mode(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_recurrent_with_decay_per_channel():
    problem = Problem(dict(l2norm=True), True, grad=False)
    want = problem.ours()[0]
    half = problem.g / 2
    got = ours.fused_recurrent_gated_delta_rule(
        problem.q, problem.k, problem.v, gk=half, beta=problem.beta, use_qk_l2norm_in_kernel=True
    )[0]
    check(not torch.allclose(got, want), "gk is ignored")
    got = ours.fused_recurrent_gated_delta_rule(
        problem.q, problem.k, problem.v, gk=problem.g, beta=problem.beta, use_qk_l2norm_in_kernel=True
    )[0]  # fmt: skip
    check_close(got, want, "o")


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_intermediate_states(packed):
    """The state before every 64 tokens is the final one of a call that ends there."""
    random = torch.Generator().manual_seed(2)
    lengths = [130, 0, 64, 40] if packed else [150, 150]
    B, T, H, K, V = (1, sum(lengths), 2, 8, 6) if packed else (2, 150, 2, 8, 6)
    q, k = torch.randn(2, B, T, H, K, generator=random)
    v = torch.randn(B, T, H, V, generator=random)
    g, beta = -torch.rand(B, T, H, K, generator=random), torch.rand(B, T, H, generator=random)
    state = torch.randn(len(lengths), H, V, K, generator=random)
    cu = torch.tensor([0, *itertools.accumulate(lengths)]) if packed else None
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True, state_v_first=True)
    _, _, states = ours.chunk_kda(
        q, k, v, g, beta, initial_state=state, cu_seqlens=cu, return_intermediate_states=True, **options
    )  # fmt: skip
    rows = states.flatten(0, 1)
    want = []
    for n, length in enumerate(lengths):
        b, start = (0, int(cu[n])) if packed else (n, 0)
        for chunk in range(-(-length // 64)):
            piece = (slice(b, b + 1), slice(start, start + 64 * chunk))
            done = ours.chunk_kda(q[piece], k[piece], v[piece], g[piece], beta[piece],
                                  initial_state=state[n : n + 1], **options)[1] if chunk else state[n : n + 1]  # fmt: skip
            want.append(done)
    check_close(rows, torch.cat(want), "intermediate states", 1e-5)


def test_gates():
    random = torch.Generator().manual_seed(3)
    g, A_log, dt_bias = (
        torch.randn(2, 5, 4, 8, generator=random),
        torch.randn(1, 4),
        torch.randn(32),
    )
    scaled = A_log.view(4, 1).exp()
    shifted = g + dt_bias.view(4, 8)
    plain = -scaled * torch.nn.functional.softplus(shifted)
    check_close(ours.fused_kda_gate(g, A_log, dt_bias), plain, "KDA gate", 1e-6)
    bounded = -5 * torch.sigmoid(scaled * shifted)
    check_close(ours.fused_kda_gate(g, A_log, dt_bias, -5.0), bounded, "bounded gate", 1e-6)
    check_close(ours.fused_kda_gate(g, lower_bound=-5.0), -5 * g.sigmoid(), "without A_log", 1e-6)
    got = ours.fused_gdn_gate(g[..., 0].bfloat16(), A_log, dt_bias[:4], torch.bfloat16)
    check(got.dtype == torch.bfloat16, f"the gate is {got.dtype}")
    want = -A_log.view(4).exp() * torch.nn.functional.softplus(
        g[..., 0].bfloat16().float() + dt_bias[:4]
    )
    check_close(got, want, "GDN gate", 1e-2)


# ---- as torch ops


def opcheck(p, per_channel, final):
    heads = p.g.shape[2:]
    arrays = tuple(
        x if x is None else x.detach()
        for x in (p.q, p.k, p.v, p.g, p.beta, p.state, None, p.A_log.view(heads[0]), p.dt_bias.view(heads))
    )  # fmt: skip
    options = (0.5, 0.0, True, "softplus", "logits", True)
    family = "kda" if per_channel else "gdn"
    for name in ("fwd", "decode"):
        op = getattr(torch.ops.pylinattn, f"{family}_{name}").default
        torch.library.opcheck(op, (*arrays, *options, final))
    op = getattr(torch.ops.pylinattn, f"{family}_bwd").default
    d_final = torch.randn_like(p.state) if final else None
    torch.library.opcheck(op, (*arrays, torch.randn_like(p.v), d_final, *options))


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("final", [False, True], ids=["o", "o_state"])
def test_opcheck(per_channel, final):
    case = dict(gate="softplus", sigmoid=True, l2norm=True, state=True, v_first=True)
    opcheck(Problem(case, per_channel, torch.float32, grad=False), per_channel, final)


@pytest.mark.slow
@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
def test_compile(per_channel):
    """One graph with and without gradients, and with another length."""
    case = dict(gate="softplus", sigmoid=True, l2norm=True, state=True)
    problem = Problem(case, per_channel, torch.float32)
    compiled = torch.compile(problem.ours, fullgraph=True, backend="aot_eager")
    names, tensors = zip(*problem.tensors().items())
    for mine, theirs in zip(compiled(), problem.ours()):
        check(torch.equal(mine, theirs), "compiled and eager outputs differ")
    got = torch.autograd.grad([x.sum() for x in compiled()], tensors)
    want = torch.autograd.grad([x.sum() for x in problem.ours()], tensors)
    for name, mine, theirs in zip(names, got, want):
        check(torch.equal(mine, theirs), f"d{name}: compiled and eager differ")
    with torch.no_grad():
        check(torch.equal(compiled()[0], problem.ours()[0]), "compiled without gradients")


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_final_state(per_channel, backend):
    """The usual call of a layer in training."""
    problem = Problem(dict(l2norm=True, state=True), per_channel, torch.float32)
    names, tensors = zip(*problem.tensors().items())
    layer = lambda: problem.ours(output_final_state=False)[0].square().sum()  # noqa: E731
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    got, want = (torch.autograd.grad(run(), tensors) for run in (compiled, layer))
    for name, mine, theirs in zip(names, got, want):
        check(torch.equal(mine, theirs), f"d{name}: compiled and eager differ")


@pytest.mark.slow
def test_compile_recurrent_and_inductor():
    problem = Problem(dict(l2norm=True, state=True), False, torch.float32, grad=False)
    compiled = torch.compile(lambda: problem.ours(recurrent=True)[0] * 2, fullgraph=True)
    check(torch.equal(compiled(), problem.ours(recurrent=True)[0] * 2), "compiled differs")


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, g, beta):
            return ours.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]

    problem = Problem(dict(l2norm=True), False, torch.float32, grad=False)
    inputs = (problem.q, problem.k, problem.v, problem.g, problem.beta)
    program = torch.export.export(Layer(), inputs)
    nodes = [n for n in program.graph.nodes if "pylinattn.gdn_fwd" in str(n.target)]
    check(len(nodes) == 1, f"the exported graph has {len(nodes)} nodes of gdn_fwd")
    check(torch.equal(program.module()(*inputs), Layer()(*inputs)), "exported and eager differ")


def test_autocast():
    problem = Problem(dict(l2norm=True, state=True), False, torch.float32)
    want = problem.ours()[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = problem.ours()[0]
    check(torch.equal(got, want), "autocast changes the result")
    got.sum().backward()
    check(problem.q.grad.dtype == torch.float32, "dq is not float32")


# ---- errors

WRONG = {
    "neg_eigval": (dict(allow_neg_eigval=True), ValueError, "use_beta_sigmoid_in_kernel"),
    "two_names": (dict(state_v_first=True, transpose_state_layout=True), ValueError, "old name"),
    "no_A_log": (dict(use_gate_in_kernel=True), ValueError, "A_log"),
    "short_A_log": (dict(use_gate_in_kernel=True, A_log=torch.zeros(3)), ValueError, "3 elements"),
    "chunk_size": (dict(chunk_size=48), ValueError, "chunk_size"),
    "unknown": (dict(use_gates=True), TypeError, "use_gates"),
    "cp": (dict(cp_context=object()), NotImplementedError, "cp_context"),
    "state_shape": (dict(initial_state=torch.zeros(3, 4, 8, 6)), ValueError, "initial_state"),
    "state_layout": (dict(initial_state=torch.zeros(2, 4, 6, 8)), ValueError, "state_v_first=False"),
    "packed_batch": (dict(cu_seqlens=torch.tensor([0, 10])), ValueError, "batch size is 2"),
    "scale": (dict(scale=0.0), ValueError, "scale"),
}  # fmt: skip


@pytest.mark.parametrize("per_channel", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls(per_channel, wrong):
    keywords, kind, text = WRONG[wrong]
    problem = Problem({}, per_channel, torch.float32, grad=False)
    with pytest.raises(kind, match=text) as caught:
        problem.ours(**keywords)
    check(isinstance(caught.value, pylinattn.LinattnError), f"{caught.value!r}")


def test_wrong_shapes():
    problem = Problem({}, False, torch.float32, grad=False)
    arrays = dict(q=problem.q, k=problem.k, v=problem.v, g=problem.g, beta=problem.beta)
    for name in arrays:
        wrong = arrays | {name: arrays[name][:, :-1]}
        with pytest.raises(ValueError, match=r"expected|equal"):
            ours.chunk_gated_delta_rule(**wrong)
    with pytest.raises(ValueError, match="multiple"):
        ours.chunk_gated_delta_rule(**(arrays | dict(v=problem.v[:, :, :3])))
    with pytest.raises(NotImplementedError, match="gv"):
        ours.fused_recurrent_gated_delta_rule(**arrays, gv=problem.v)


@pytest.mark.parametrize("bound", [None, -6.0, 0.0])
def test_safe_gate_needs_a_bound(bound):
    problem = Problem(dict(gate="bounded"), True, torch.float32, grad=False)
    with pytest.raises(ValueError, match="lower_bound"):
        problem.ours(safe_gate=True, lower_bound=bound)


def test_old_name_of_the_layout():
    problem = Problem(dict(state=True, v_first=True), False, grad=False)
    want = problem.ours()[1]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = problem.ours(state_v_first=False, transpose_state_layout=True)[1]
    check(torch.equal(got, want), "transpose_state_layout differs from state_v_first")
