"""The float64 token loop against the chunked forms of the two papers, a second derivation of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.linalg import inv

from pylinattn import reference


def chunked_gdn(q, k, v, g, beta, S, scale, C):
    """Yang et al. 2024, section 3.3: one decay per token, the inverse free of gates. One head, [T,..]."""
    o = np.zeros_like(v)
    for a in range(0, len(q), C):
        s = slice(a, min(a + C, len(q)))
        K, Q, G = k[s], q[s], np.cumsum(g[s])
        ratio = np.tril(np.exp(np.minimum(G[:, None] - G[None, :], 0.0)))
        A = inv(np.eye(len(K)) + np.tril(beta[s, None] * (K @ K.T), -1)) * ratio * beta[None, s]
        U = A @ (v[s] - np.exp(G)[:, None] * (K @ S))
        o[s] = scale * (np.exp(G)[:, None] * (Q @ S) + ratio * (Q @ K.T) @ U)
        S = np.exp(G[-1]) * S + K.T @ (np.exp(G[-1] - G)[:, None] * U)
    return o, S


def chunked_kda(q, k, v, g, beta, S, scale, C):
    """Kimi Linear 2025, section 3: one decay per key channel. One head, [T,..]."""
    o = np.zeros_like(v)
    for a in range(0, len(q), C):
        s = slice(a, min(a + C, len(q)))
        K, Q, G = k[s], q[s], np.cumsum(g[s], 0)
        ratio = np.exp(np.minimum(G[:, None] - G[None, :], 0.0))
        kk, qk = (np.einsum("tc,sc,tsc->ts", x, K, ratio) for x in (K, Q))
        U = inv(np.eye(len(K)) + np.tril(beta[s, None] * kk, -1)) @ (
            beta[s, None] * (v[s] - (K * np.exp(G)) @ S)
        )
        o[s] = scale * ((Q * np.exp(G)) @ S + np.tril(qk) @ U)
        S = np.exp(G[-1])[:, None] * S + (K * np.exp(G[-1] - G)).T @ U
    return o, S


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_token_loop_equals_chunked_form(family):
    rng = np.random.default_rng(1)
    T, H, HV, K, V, lengths = 75, 2, 6, 12, 10, [1, 30, 0, 44]
    q, k = (reference.l2norm(rng.normal(size=(1, T, H, K))) for _ in range(2))
    v, beta = rng.normal(size=(1, T, HV, V)), rng.uniform(0, 1, size=(1, T, HV))
    g = -rng.exponential(0.3, size=(1, T, HV, K) if family == "kda" else (1, T, HV))
    h0, cu = rng.normal(size=(4, HV, K, V)), np.cumsum([0, *lengths])
    forward = reference.gdn_fwd if family == "gdn" else reference.kda_fwd
    chunked = chunked_gdn if family == "gdn" else chunked_kda
    got = forward(q, k, v, g, beta, initial_state=h0, cu_seqlens=cu)
    sampled = forward(
        q, k, v, g, beta, initial_state=h0, cu_seqlens=cu, heads=[4, 1], sequences=[3]
    )
    for n, (a, b) in enumerate(zip(cu[:-1], cu[1:])):
        for j in range(HV):
            x = (q[0, a:b, j // 3], k[0, a:b, j // 3], v[0, a:b, j], g[0, a:b, j], beta[0, a:b, j])
            o, S = chunked(*x, h0[n, j], K**-0.5, 16)
            np.testing.assert_allclose(got.o[0, a:b, j], o, atol=1e-12)
            np.testing.assert_allclose(got.final_state[n, j], S, atol=1e-12)
    np.testing.assert_array_equal(sampled.o[0, cu[3] :], got.o[0, cu[3] :, [4, 1]].swapaxes(0, 1))
    np.testing.assert_array_equal(sampled.final_state[3], got.final_state[3, [4, 1]])


def test_dense_batch_equals_packed():
    rng = np.random.default_rng(2)
    shape = (3, 9, 2, 5)
    q, k, v = (rng.normal(size=shape) * 0.3 for _ in range(3))
    g, beta = -rng.exponential(size=shape[:3]), rng.uniform(size=shape[:3])
    dense = reference.gdn_fwd(q, k, v, g, beta)
    flat = [x.reshape(1, 27, *x.shape[2:]) for x in (q, k, v, g, beta)]
    packed = reference.gdn_fwd(*flat, cu_seqlens=[0, 9, 18, 27])
    np.testing.assert_array_equal(dense.o, packed.o.reshape(shape))
    np.testing.assert_array_equal(dense.final_state, packed.final_state)


def test_gates_by_hand():
    x = np.array([-800.0, -3.0, 0.0, 2.0, 800.0]).reshape(1, 5, 1)
    soft = reference.activate_gate(x, "softplus", A_log=[0.5], dt_bias=[1.0])
    np.testing.assert_allclose(soft[0, 1:4, 0], -np.exp(0.5) * np.log1p(np.exp([-2.0, 1.0, 3.0])))
    np.testing.assert_allclose(soft[0, [0, 4], 0], [0.0, -np.exp(0.5) * 801.0])
    bounded = reference.activate_gate(x, "bounded", A_log=[np.log(2.0)], lower_bound=-5.0)
    np.testing.assert_allclose(
        bounded[0, :, 0], -5.0 / (1.0 + np.exp([np.inf, 6.0, 0.0, -4.0, -np.inf]))
    )
    np.testing.assert_allclose(reference.activate_beta([0.0], "logits_x2"), [1.0])


def test_verify_then_commit_is_decode():
    rng = np.random.default_rng(3)
    B, T, H, HV, K, V = 2, 5, 1, 2, 6, 4
    q, k = (rng.normal(size=(B, T, H, K)) for _ in range(2))
    v, beta = rng.normal(size=(B, T, HV, V)), rng.uniform(size=(B, T, HV))
    g, pool = -rng.exponential(size=(B, T, HV, K)), rng.normal(size=(7, HV, K, V))
    rows = [5, 2]
    seen = reference.kda_verify(q, k, v, g, beta, pool, read_indices=rows, qk_l2norm=True)
    np.testing.assert_array_equal(seen.state, pool)
    done = reference.delta_commit(pool, *seen[2:], [3, 3], read_indices=rows)
    cut = [x[:, :3] for x in (q, k, v, g, beta)]
    decoded = reference.kda_decode(*cut, pool, read_indices=rows, qk_l2norm=True)
    np.testing.assert_array_equal(done, decoded.state)
    np.testing.assert_array_equal(seen.o[:, :3], decoded.o)


def test_no_heads():
    """As the ops: calls of no heads give arrays of none."""
    key, gates = np.zeros((2, 3, 0, 4)), np.zeros((2, 3, 0))
    pool = np.zeros((2, 0, 4, 4))
    inputs = (key, key, key, gates, gates)
    np.testing.assert_equal(reference.gdn_fwd(*inputs).final_state.shape, pool.shape)
    np.testing.assert_equal(reference.gdn_decode(*inputs, pool).o.shape, key.shape)
    np.testing.assert_equal(reference.gdn_verify(*inputs, pool).kept_u.shape, key.shape)
    np.testing.assert_equal(reference.gdn_bwd(*inputs, key).dq.shape, key.shape)
    np.testing.assert_equal(reference.gdn_segment(*inputs).h.shape, pool.shape)
    np.testing.assert_equal(reference.delta_commit(pool, key, key, gates, [1, 2]).shape, pool.shape)
