#pragma once
#include <initializer_list>
#include "emu.h"
#include "ops.h"
namespace linattn::cuda {
struct TensorMapAxis {
    int64_t size, stride_elems, box;
};
inline CUtensorMap make_tensor_map(const char *, const void *data, DType dtype, std::initializer_list<TensorMapAxis> axes,
                                   int swizzle) {
    CUtensorMap m;
    emu::Fiber *f = nullptr;
    (void)f;
    linattn::ptx::Map t;
    t.data = (char *)data;
    t.bytes = (int)dtype_bytes(dtype);
    t.swizzle = swizzle;
    for (int i = 0; i < 5; i++) t.size[i] = t.box[i] = 1, t.stride[i] = 0;
    int i = 0;
    for (auto &a : axes) {
        t.size[i] = a.size;
        t.stride[i] = a.stride_elems;
        t.box[i] = (int)a.box;
        i++;
    }
    memcpy(&m, &t, sizeof t);
    static_assert(sizeof t <= sizeof m);
    return m;
}
inline bool tma_fits(const Tensor &t, int64_t, int64_t, int64_t) {
    for (int axis = 0; axis < 3; axis++)
        if (t.stride[axis] * dtype_bytes(t.dtype) % 16 != 0) return false;
    return t.stride[3] == 1 && (uintptr_t)t.data % 16 == 0;
}
inline CUtensorMap make_tile_map(const char *name, const Tensor &t, int64_t B, int64_t T, int64_t heads, int64_t D, int tokens,
                                 int64_t columns = 64) {
    return make_tensor_map(name, t.data, t.dtype,
                           {{D, 1, columns}, {heads, t.stride[2], 1}, {T, t.stride[1], tokens}, {B, t.stride[0], 1}}, 128);
}
}  // namespace linattn::cuda
