"""pylinattn.jax on a GPU: eager, jitted, donated, under vmap and grad, against the eager ops on torch tensors and the CPU."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cases import Case, make
from harness import POSITIONAL, check, check_outputs, check_states, expect

import pylinattn

jax = pytest.importorskip("jax")
ml_dtypes = pytest.importorskip("ml_dtypes")
jnp = jax.numpy

from test_jax import NUMPY, same  # noqa: E402

import pylinattn.jax as pj  # noqa: E402

pytestmark = pytest.mark.gpu
GATED = (("gate", "softplus"), ("beta_form", "logits"), ("qk_l2norm", True))
CASES = [
    Case(family, lengths, 2, 4, D, D, dtype, options=options, packed=packed)
    for family in ("gdn", "kda")
    for lengths, D, dtype, options, packed in (
        ((70, 1, 0, 130), 64, "bf16", GATED, True),
        ((67, 67), 128, "f16", (), False),
        ((40, 40), 128, "bf16", (("qk_l2norm", True),), False),
    )
]


@pytest.fixture(autouse=True)
def on_gpu(gpu):
    if jax.default_backend() != "gpu":
        pytest.skip("this jax sees no GPU")


def inputs_of(case):
    arrays = {n: jnp.asarray(x.values.astype(NUMPY[x.dtype])) for n, x in make(case).items()}
    return [arrays.pop(n) for n in POSITIONAL[case.op]], arrays


def host(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_forward(case):
    positional, arrays = inputs_of(case)
    op = functools.partial(getattr(pj, case.op), output_final_state=True, **case.keywords)
    eager = op(*positional, **arrays)
    check("cuda" in str(eager.o.devices()).lower(), f"o is on {eager.o.devices()}")
    want = expect(case.op, make(case), case.keywords)
    check_outputs(host(eager.o), want.o, case.dtype, case.spans)
    check_states(host(eager.final_state), want.final_state, case.state, "cuda/chunked")
    same(jax.jit(op)(*positional, **arrays), eager)
    compiled = jax.jit(lambda *a: op(*(x * 1 for x in a), **arrays)).lower(*positional).compile()
    for _ in range(5):  # XLA puts what it runs again into a command buffer
        same(compiled(*positional), eager)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gradients(case):
    """The bits of the eager backward, and the float64 loop within the targets."""
    positional, arrays = inputs_of(case)
    cu = {"cu_seqlens": arrays.pop("cu_seqlens")} if case.packed else {}
    rng = np.random.default_rng(5)
    d_o = jnp.asarray(rng.normal(size=positional[2].shape)).astype(positional[2].dtype)
    forward = functools.partial(
        getattr(pj, case.op), output_final_state=True, **case.keywords, **cu
    )
    names = list(arrays)

    def run(*a):
        return tuple(forward(*a[:5], **dict(zip(names, a[5:]))))

    (_, final), pull = jax.vjp(run, *positional, *arrays.values())
    d_final = jnp.asarray(rng.normal(size=final.shape)).astype(final.dtype)
    eager = pull((d_o, d_final))
    same(jax.jit(pull)((d_o, d_final)), eager)
    wide = [host(x) for x in positional]
    rest = {n: host(x) for n, x in arrays.items()}
    lengths = {n: np.asarray(x) for n, x in cu.items()}
    want = getattr(pylinattn, case.op.replace("fwd", "bwd"))(
        *wide, host(d_o), d_final_state=host(d_final), **rest, **case.keywords, **lengths
    )._asdict()
    named = ["dq", "dk", "dv", "dg", "dbeta"]
    named += [{"initial_state": "d_initial_state"}.get(n, f"d{n}") for n in names]
    for name, got in zip(named, eager):
        error = np.linalg.norm(host(got) - want[name]) / np.linalg.norm(want[name])
        check(error <= 1e-2, f"{name}: relative RMS error {error:.1e}")


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_decode_in_place(family):
    """The donated pool is updated where it lies; one that is not donated stays as it is; in a scan, as the forward."""
    N, T, D = 3, 6, 64
    case = Case(family, (T,) * N, 2, 4, D, D, "bf16", packed=False)
    positional, arrays = inputs_of(case)
    want = getattr(pj, case.op)(*positional, **arrays, output_final_state=True)
    decode = getattr(pj, f"{family}_decode")
    first = [x[:, :1] for x in positional]
    o, after = decode(*first, arrays["initial_state"])
    state = jnp.array(arrays["initial_state"])
    address = state.unsafe_buffer_pointer()
    got = jax.jit(decode, donate_argnums=5)(*first, state)
    same(got, (o, after))
    check(state.is_deleted() and got[1].unsafe_buffer_pointer() == address, "the pool moved")

    def step(state, token):
        o, state = decode(*(x[:, None] for x in token), state)
        return state, o[:, 0]

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in positional)
    state, o = jax.jit(lambda s: jax.lax.scan(step, s, tokens))(arrays["initial_state"])
    error = np.linalg.norm(host(jnp.moveaxis(o, 0, 1)) - host(want.o)) / np.linalg.norm(
        host(want.o)
    )
    check(error < 5e-3, f"o: {error:.1e} from the forward")
    error = np.linalg.norm(host(state) - host(want.final_state)) / np.linalg.norm(host(state))
    check(error < 3e-3, f"state: {error:.1e} from the forward")


def test_vmap():
    case = Case("gdn", (40, 40, 40), 2, 4, 64, 64, "bf16", packed=False, initial=False)
    positional, _ = inputs_of(case)
    whole = pj.gdn_fwd(*positional).o
    mapped = jax.jit(jax.vmap(lambda *a: pj.gdn_fwd(*(x[None] for x in a)).o[0]))(*positional)
    same(mapped, whole)


def test_two_streams_of_work_and_other_ops_around():
    """Our call reads what XLA computed just before and is read just after, again and again."""
    case = Case("kda", (128, 128), 2, 4, 128, 128, "bf16", packed=False, initial=False)
    positional, _ = inputs_of(case)

    @jax.jit
    def chain(q, k, v, g, beta):
        for _ in range(4):
            v = pj.kda_fwd(q, k, v / jnp.abs(v).max(), g, beta, qk_l2norm=True).o
        return v.astype(jnp.float32).sum(), v

    first = chain(*positional)
    for _ in range(20):
        same(chain(*positional), first)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_verify_and_commit(family):
    """Four drafted tokens of which 4, 2 and 0 are accepted: the states of as many decode steps."""
    T, D = 4, 64
    case = Case(family, (T,) * 3, 2, 4, D, D, "bf16", packed=False)
    positional, arrays = inputs_of(case)
    pool = arrays["initial_state"]
    done = jax.jit(getattr(pj, f"{family}_verify"))(*positional, pool)
    same([done.state], [pool], "pool of a verify")
    accepted = jnp.array([4, 2, 0], jnp.int32)
    commit = jax.jit(functools.partial(pj.delta_commit), donate_argnums=0)
    after = commit(jnp.array(pool), done.kept_k, done.kept_u, done.kept_g, accepted)
    for n, count in enumerate((4, 2, 0)):
        state = pool[n : n + 1]
        if count:
            few = [x[n : n + 1, :count] for x in positional]
            o, state = getattr(pj, f"{family}_decode")(*few, state)
            same([o], [done.o[n : n + 1, :count]], "outputs")
        same([after[n : n + 1]], [state], "states")


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_segments(family):
    case = Case(family, (70, 70), 2, 4, 64, 64, "bf16", packed=False, initial=False)
    positional, _ = inputs_of(case)
    M, h = jax.jit(getattr(pj, f"{family}_segment"))(*positional)
    states, final = jax.jit(pj.segment_merge)(M[None], h[None])
    check(not np.asarray(states).any() and np.array_equal(final, h), "one segment from zeros")
    want = getattr(pj, f"{family}_fwd")(*positional, output_final_state=True).final_state
    error = np.linalg.norm(host(h) - host(want)) / np.linalg.norm(host(want))
    check(error < 3e-3, f"h: {error:.1e} from the forward's state")
