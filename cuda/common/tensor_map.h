// Tensor maps for TMA: what cp.async.bulk.tensor needs to know of an array in global memory. Encoded on the host and passed to
// the kernel by value (const __grid_constant__ CUtensorMap).
#pragma once
#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "ops.h"

namespace linattn::cuda {

// One axis, innermost first.
struct TensorMapAxis {
    int64_t size;          // elements; loads beyond it give zeros, stores beyond it are dropped
    int64_t stride_elems;  // 1 on the innermost axis; any value where size is 1
    int64_t box;           // elements copied at a time, 1 to 256
};

// The map of `data`, whose name in messages is `name`. 1 to 5 axes. swizzle_bytes: 0, 32, 64 or 128, the innermost box being at
// most that many bytes (SmemTile::kSwizzleBytes). Throws Unsupported for an array that TMA cannot address (unaligned start or
// strides) and Runtime when the driver refuses or is missing. The driver is looked up at the first call, so the library loads
// without one.
CUtensorMap make_tensor_map(const char *name, const void *data, DType dtype, std::initializer_list<TensorMapAxis> axes,
                            int swizzle_bytes);

// TMA addresses a [B,T,heads,D] array if rows are contiguous and all else is a multiple of 16 bytes.
bool tma_fits(const Tensor &t, int64_t B, int64_t T, int64_t heads);

// Boxes of `tokens` tokens of one head, `columns` elements side by side, of such an array.
inline CUtensorMap make_tile_map(const char *name, const Tensor &t, int64_t B, int64_t T, int64_t heads, int64_t D, int tokens,
                                 int64_t columns = 64) {
    return make_tensor_map(name, t.data, t.dtype,
                           {{D, 1, columns}, {heads, t.stride[2], 1}, {T, t.stride[1], tokens}, {B, t.stride[0], 1}}, 128);
}

}  // namespace linattn::cuda
