"""Gradients of pylinattn.jax: the bits of the backward, those of plain jax.numpy, and a model that trains."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from cases import make
from harness import POSITIONAL, check

import pylinattn

jax = pytest.importorskip("jax")
pytest.importorskip("ml_dtypes")
jnp = jax.numpy

from test_jax import CASES, NUMPY, PLAIN, decode_inputs, inputs_of, message, same  # noqa: E402

import pylinattn.jax as pj  # noqa: E402

needs_backward = pytest.mark.skipif(
    not pylinattn.supports("gdn_bwd", device="cpu", dtype="f32", K=16, V=8),
    reason="the library has no backward",
)


@needs_backward
@pytest.mark.parametrize(
    "case", [c for c in CASES if "checkpoint_every" not in c.keywords], ids=lambda c: c.id
)
def test_gradients_are_those_of_the_backward(case):
    """Of every array that has one, the bits of gdn_bwd; zero for tokens past the last sequence."""
    inputs = make(case)
    arrays = {n: x.values.astype(NUMPY[x.dtype]) for n, x in inputs.items()}
    if case.packed:
        arrays["cu_seqlens"][-1] -= 3
    positional = [arrays.pop(n) for n in POSITIONAL[case.op]]
    cu = {"cu_seqlens": arrays.pop("cu_seqlens")} if case.packed else {}
    rng = np.random.default_rng(5)
    d_o = rng.normal(size=positional[2].shape).astype(positional[2].dtype)
    forward = functools.partial(
        getattr(pj, case.op), output_final_state=True, **case.keywords, **cu
    )
    names = list(arrays)

    def run(*a):
        return tuple(forward(*a[:5], **dict(zip(names, a[5:]))))

    (_, final), pull = jax.vjp(run, *positional, *arrays.values())
    d_final = rng.normal(size=final.shape).astype(final.dtype)
    want = getattr(pylinattn, case.op.replace("fwd", "bwd"))(
        *positional, d_o, d_final_state=d_final, **arrays, **case.keywords, **cu
    )._asdict()
    named = ["dq", "dk", "dv", "dg", "dbeta"]
    named += [{"initial_state": "d_initial_state"}.get(n, f"d{n}") for n in names]
    for got in (pull((d_o, d_final)), jax.jit(pull)((d_o, d_final))):
        same(got, [want[n] for n in named], "gradients")


def plain_gdn(q, k, v, g, beta):
    """The recurrence token by token in jax.numpy: S = exp(g) S; u = beta (v - S'k); S += k u'; o = scale S'q."""
    r = v.shape[2] // q.shape[2]
    q, k = jnp.repeat(q, r, 2) * q.shape[-1] ** -0.5, jnp.repeat(k, r, 2)

    def step(S, x):
        q, k, v, g, beta = x
        S = S * jnp.exp(g)[..., None, None]
        u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k))
        S = S + k[..., None] * u[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta))
    S = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]), v.dtype)
    return jnp.moveaxis(jax.lax.scan(step, S, tokens)[1], 0, 1)


def fused_gdn(q, k, v, g, beta):
    return pj.gdn_fwd(q, k, v, g, beta).o


def unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


@needs_backward
def test_gradients_under_vmap():
    """A gradient for each example, as per-example clipping takes them."""
    positional, _ = inputs_of(PLAIN)

    def per_example(op):
        def loss(*a):
            return (op(*(x[None] for x in a)) ** 2).sum()

        return jax.jit(jax.vmap(jax.grad(loss, range(5))))(*positional)

    for got, want in zip(per_example(fused_gdn), per_example(plain_gdn)):
        check(np.allclose(got, want, atol=2e-5, rtol=1e-4), f"{np.abs(got - want).max()}")


@needs_backward
def test_training_has_the_losses_of_plain_jax():
    """A small model learns which of two orders its tokens follow: the same losses with our op and with jax.numpy."""
    B, T, H, HV, D, words = 4, 24, 1, 2, 8, 12
    sizes = {"embed": (words, 32), "q": (32, H * D), "k": (32, H * D), "v": (32, HV * D)}
    sizes |= {"g": (32, HV), "beta": (32, HV), "out": (HV * D, words)}
    rng = np.random.default_rng(0)
    start = {n: (rng.normal(size=s) / np.sqrt(s[0])).astype(np.float32) for n, s in sizes.items()}

    def loss(op, w, tokens):
        x = w["embed"][tokens]
        q, k, v = (
            (x @ w[n]).reshape(B, T, heads, D) for n, heads in (("q", H), ("k", H), ("v", HV))
        )
        g, beta = jax.nn.log_sigmoid(x @ w["g"] + 3), jax.nn.sigmoid(x @ w["beta"])
        logits = op(unit(q), unit(k), v, g, beta).reshape(B, T, -1) @ w["out"]
        picked = jnp.take_along_axis(
            jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1
        )
        return -picked.mean()

    def train(op):
        @jax.jit
        def step(w, tokens):
            value, slope = jax.value_and_grad(lambda w: loss(op, w, tokens))(w)
            return jax.tree_util.tree_map(lambda a, b: a - 0.5 * b, w, slope), value

        w, values, draw = start, [], np.random.default_rng(1)
        orders = np.stack([draw.permutation(words) for _ in range(2)])
        for _ in range(100):
            order = orders[draw.integers(0, 2, size=B)]
            tokens = [draw.integers(0, words, size=B)]
            for _ in range(T - 1):
                tokens.append(order[np.arange(B), tokens[-1]])
            w, value = step(w, np.stack(tokens, 1).astype(np.int32))
            values.append(float(value))
        return np.array(values)

    ours, plain = train(fused_gdn), train(plain_gdn)
    check(
        np.isfinite(ours).all() and ours[-1] < 0.5 * ours[0], f"no learning: {ours[0]}, {ours[-1]}"
    )
    check(np.allclose(ours, plain, rtol=1e-4), f"losses differ by {np.abs(ours - plain).max()}")


def test_what_has_no_gradient():
    positional, pool = decode_inputs(rows=3)
    q, rest = positional[0], positional[1:]
    message(
        NotImplementedError,
        lambda: jax.grad(lambda q: pj.gdn_decode(q, *rest, pool)[0].sum())(q),
        "gdn_decode", "gradient",
    )  # fmt: skip
    positional, arrays = inputs_of(PLAIN)
    for options in (
        {"read_indices": np.array([1, 0], np.int32), **arrays},
        {"checkpoint_every": 64},
    ):
        message(
            NotImplementedError,
            lambda options=options: jax.grad(
                lambda q: pj.gdn_fwd(q, *positional[1:], **options).o.sum()
            )(positional[0]),
            "gdn_fwd: ", next(iter(options)),
        )  # fmt: skip
