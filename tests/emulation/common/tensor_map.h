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
}  // namespace linattn::cuda
