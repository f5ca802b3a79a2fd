// Prefetches to L2: hints. Boxes of a tensor map: PTX ISA 9.7.9.27.9 cp.async.bulk.prefetch.tensor.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace linattn::ptx {

// 9.7.9.15 prefetch: the line of a global address, and with it the translation of its page. Of an address that is not mapped it may fault.
__device__ __forceinline__ void prefetch_global_l2(const void *g_address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(g_address) : "memory");
}

// The box that cp_async_bulk_tensor_4d_load would copy.
__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_4d(const CUtensorMap *map, int32_t c0, int32_t c1, int32_t c2,
                                                                 int32_t c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1),
                 "r"(c2), "r"(c3)
                 : "memory");
}

}  // namespace linattn::ptx
