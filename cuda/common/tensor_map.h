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

}  // namespace linattn::cuda
