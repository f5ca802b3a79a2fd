"""Pipelines, named barriers, clusters, dependent launches, and the walk over packed sequences."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 4, 100])
def test_pipeline(card, rng, tiles):
    """A producer and two consumers with reallocated registers over a ring of 3 stages."""
    x = rng.standard_normal((max(tiles, 1), 4, 128)).astype(np.float32)
    out = card.empty((2, 192, 128), np.float32)
    card.call("pipeline", card.put(x), out, tiles)
    i = np.arange(192)
    expected = np.zeros((2, 192, 128))
    for c in range(tiles):
        for w in range(2):
            expected[w] = expected[w] / 2 + x[c][i % 4] * (i[:, None] + 1.0) + w
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ring_over_a_cluster(card, rng, size):
    """Each CTA multicasts its share; stages come back by arrivals from every CTA."""
    x = rng.standard_normal((50, 512)).astype(np.float32)
    out = card.empty((4 * size, 50, 512), np.float32)
    card.call("multicast_ring", card.put(x), out, 4, size, 50)
    np.testing.assert_array_equal(out.numpy(), np.broadcast_to(x, (4 * size, 50, 512)))


def test_named_barriers(card, rng):
    data = rng.integers(0, 2**32, (500, 64)).astype(np.uint32)
    out = card.empty((500, 64), np.uint32)
    card.call("named_barrier", card.put(data), out, 500)
    np.testing.assert_array_equal(out.numpy(), data[:, ::-1])


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_election_ranks_and_parity(card, cluster):
    blocks, warps = 4 * cluster, 4
    out = card.empty((blocks, warps, 4), np.uint32)
    card.call("identity", out, blocks, cluster, 32 * warps)
    elected, rank, size, passed = np.moveaxis(out.numpy(), -1, 0)
    assert (elected != 0).all()
    assert (elected & (elected - 1) == 0).all(), "more than one lane elected"
    assert (rank == (np.arange(blocks) % cluster)[:, None]).all()
    assert (size == cluster).all()
    assert (passed == 3).all()


def test_dependent_launch(card, rng):
    """The second grid starts early and still sees all that the first wrote."""
    data = rng.integers(0, 2**31, 100_000).astype(np.uint32)
    middle, out = card.empty(data.shape, np.uint32), card.empty(data.shape, np.uint32)
    cycles = ctypes.c_int64(2_000_000)
    card.call("dependent_launch", card.put(data), middle, out, data.size, cycles)
    np.testing.assert_array_equal(out.numpy(), data + 1)


PACKED = {
    "one": [0, 200],
    "empty among others": [0, 0, 64, 64, 64, 130],
    "none": [0],
    "all empty": [0] * 5,
    "short ones": [0, 1, 3, 66, 67, 200],
    "beyond both ends": [-5, 70, 1000],
    "not increasing": [0, 100, 50, 90],
    "more than one warp's worth": [0, *np.cumsum(np.arange(100) % 7 * 11).tolist()],
}


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("name", PACKED)
def test_packed_chunks(card, name, dtype, chunk):
    cu = np.array(PACKED[name], dtype)
    sequences, tokens = len(cu) - 1, max(200, int(cu[-1])) if "beyond" not in name else 200
    count = card.c.parts_max_chunks(1, ctypes.c_int64(sequences), ctypes.c_int64(tokens), chunk)
    expected = []
    for n in range(sequences):
        bos, eos = (int(np.clip(c, 0, tokens)) for c in cu[n : n + 2])
        expected += [(n, c, s, min(chunk, eos - s)) for c, s in enumerate(range(bos, eos, chunk))]
    if name != "not increasing":  # overlapping sequences may have more
        assert len(expected) <= count
    count = max(count, len(expected)) + 2
    expected += [(sequences, 0, 0, 0)] * (count - len(expected))
    out = card.empty((count, 4), np.int64)
    card.call(
        "chunks",
        card.put(cu),
        int(dtype == np.int64),
        *(ctypes.c_int64(x) for x in (sequences, tokens)),
        chunk,
        ctypes.c_int64(count),
        out,
    )
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize(("sequences", "tokens"), [(3, 130), (1, 64), (2, 1), (2, 0), (0, 7)])
def test_dense_chunks(card, sequences, tokens):
    count = card.c.parts_max_chunks(0, ctypes.c_int64(sequences), ctypes.c_int64(tokens), 64)
    expected = [
        (n, c, n * tokens + s, min(64, tokens - s))
        for n in range(sequences)
        for c, s in enumerate(range(0, tokens, 64))
    ]
    assert count == len(expected)
    expected.append((sequences, 0, 0, 0))
    out = card.empty((count + 1, 4), np.int64)
    sizes = (ctypes.c_int64(sequences), ctypes.c_int64(tokens))
    card.call("chunks", None, 0, *sizes, 64, ctypes.c_int64(count + 1), out)
    np.testing.assert_array_equal(out.numpy(), expected)
