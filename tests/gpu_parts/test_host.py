"""The host-side pieces: what launch() and make_tensor_map() refuse and say, the device guard."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from gpu_parts.library import DTYPES, STATUS_RUNTIME, STATUS_UNSUPPORTED, PartsError

ONE = [1, 1, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("smem", [0, 49152, 49168, 200 * 1024])
@pytest.mark.parametrize("cluster", [1, 2])
def test_launch(card, cluster, smem):
    out = card.empty(6, np.int32)
    card.call("launch", out, 17, [6, 1, 1], [32, 1, 1], [cluster, 1, 1], ctypes.c_int64(smem))
    assert (out.numpy() == 17).all()


@pytest.mark.gpu
def test_launch_of_an_empty_grid(card):
    out = card.empty(1, np.int32)
    card.call("launch", out, 17, [0, 1, 1], [32, 1, 1], ONE, ctypes.c_int64(0))
    assert out.numpy()[0] == -1


@pytest.mark.parametrize(
    ("grid", "block", "cluster", "words"),
    [
        ([1 << 31, 1, 1], ONE, ONE, "grid of (2147483648, 1, 1)"),
        ([1, 65536, 1], ONE, ONE, "grid of (1, 65536, 1)"),
        ([-1, 1, 1], ONE, ONE, "grid of (-1, 1, 1)"),
        (ONE, [1025, 1, 1], ONE, "block of (1025, 1, 1)"),
        (ONE, [0, 1, 1], ONE, "block of (0, 1, 1)"),
        ([3, 1, 1], ONE, [2, 1, 1], "does not divide the grid (3, 1, 1)"),
        ([16, 1, 1], ONE, [16, 1, 1], "cluster of (16, 1, 1)"),
    ],
)
def test_launch_refuses(parts, grid, block, cluster, words):
    with pytest.raises(PartsError, match="fill_kernel") as caught:
        parts.call("launch", None, 0, grid, block, cluster, ctypes.c_int64(0))
    assert caught.value.status == STATUS_RUNTIME
    assert words in str(caught.value)


@pytest.mark.gpu
def test_launch_refuses_too_much_shared_memory(card):
    with pytest.raises(PartsError, match="needs 1000000 bytes of shared memory"):
        card.call("launch", None, 0, ONE, ONE, ONE, ctypes.c_int64(1_000_000))
    out = card.empty(1, np.int32)
    card.call("launch", out, 3, ONE, ONE, ONE, ctypes.c_int64(0))  # nothing is left behind
    assert out.numpy()[0] == 3


@pytest.mark.gpu
def test_cost_of_launch(card, record_property):
    """No bound: reports what a launch costs the host, without and with the smem attribute."""
    plain, raised = ctypes.c_double(), ctypes.c_double()
    out = card.empty(1, np.int32)
    card.call("launch_cost", out, 500, ctypes.byref(plain), ctypes.byref(raised))
    record_property("launch_us", plain.value)
    record_property("launch_with_attribute_us", raised.value)
    print(f"launch {plain.value:.2f} us, with the attribute {raised.value:.2f} us")


def tensor_map(
    parts, *, data=256, dtype="bf16", sizes=(64, 8), strides=(1, 64), boxes=(64, 8), width=128
):
    """make_tensor_map on an address; only the arguments are looked at before the driver."""
    parts.call(
        "tensor_map",
        ctypes.c_void_p(data),
        DTYPES.get(dtype, 2),
        list(sizes),
        list(strides),
        list(boxes),
        width,
    )


@pytest.mark.parametrize(
    ("wrong", "status", "words"),
    [
        ({"data": 264}, STATUS_UNSUPPORTED, "not a multiple of 16 bytes"),
        ({"dtype": "f64"}, STATUS_UNSUPPORTED, "bfloat16, float16 or float32"),
        ({"sizes": (64, 0)}, STATUS_UNSUPPORTED, "axis 1 (innermost = 0) has 0 elements"),
        ({"sizes": (64, (1 << 32) + 1)}, STATUS_UNSUPPORTED, "has 4294967297 elements"),
        ({"strides": (2, 128)}, STATUS_UNSUPPORTED, "innermost axis has stride 2"),
        ({"strides": (1, 65)}, STATUS_UNSUPPORTED, "stride of axis 1 (innermost = 0) is 65"),
        ({"strides": (1, -64)}, STATUS_UNSUPPORTED, "is -64 elements"),
        ({"strides": (1, 1 << 39)}, STATUS_UNSUPPORTED, "below 2^40 bytes"),
        ({"boxes": (64, 257)}, STATUS_RUNTIME, "box of 257 elements on axis 1"),
        ({"boxes": (72, 8)}, STATUS_RUNTIME, "innermost box of 144 bytes"),
        ({"boxes": (4, 8)}, STATUS_RUNTIME, "innermost box of 8 bytes"),
        ({"width": 96}, STATUS_RUNTIME, "swizzle of 96 bytes"),
    ],
)
def test_tensor_map_refuses(parts, wrong, status, words):
    with pytest.raises(PartsError) as caught:
        tensor_map(parts, **wrong)
    assert caught.value.status == status
    assert str(caught.value).startswith("x: ")
    assert words in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("strides", [(1, 64), (1, 1 << 35)])
def test_tensor_map_accepts(card, strides):
    memory = card.empty(4096, np.uint8)
    tensor_map(card, data=memory.address, strides=strides)
    tensor_map(card, data=memory.address, sizes=(64, 1), strides=(1, 7))
    tensor_map(card, data=memory.address, sizes=(1, 8), strides=(5, 8), boxes=(8, 8), width=0)


def test_tensor_map_without_a_driver(parts):
    if parts.device_count() > 0:
        pytest.skip("there is a driver")
    with pytest.raises(PartsError) as caught:
        tensor_map(parts)
    assert caught.value.status == STATUS_RUNTIME
    assert "driver" in str(caught.value)


@pytest.mark.gpu
def test_device_guard(card):
    seen = [ctypes.c_int(-1) for _ in range(3)]
    last = card.device_count() - 1
    card.call("device_guard", last, *(ctypes.byref(x) for x in seen))
    assert [x.value for x in seen] == [0, last, 0]
    with pytest.raises(PartsError, match="cudaSetDevice"):
        card.call("device_guard", 99, *(ctypes.byref(x) for x in seen))
    assert seen[2].value == 0
