// Bulk asynchronous copies: cp.async.bulk (1-D) and cp.async.bulk.tensor (boxes described by a tensor map), run by the async
// proxy. One thread issues each copy. PTX ISA 9.7.9 (copies) and 9.7.13.4 (fences).
//
// Loads complete on an mbarrier (bytes counted there, zero-filled ones included); data is visible to whoever waits on it.
// Stores complete in bulk groups of the issuing thread. Shared addresses are multiples of 16 for 1-D copies, of 128 for tensor
// copies (of the swizzle's repeat, 256 / 512 / 1024 bytes for 32B / 64B / 128B, if software or wgmma is to compute the swizzle
// from address bits).
#pragma once
#include <cuda.h>

#include <cstdint>

namespace linattn::ptx {

// 9.7.13.4 fence.proxy.async: orders this thread's earlier generic-proxy accesses to shared memory before later async-proxy
// ones (TMA, wgmma). Each writing thread issues it, then a barrier, then one thread starts the copy. Says nothing about other
// threads' stores; compiles to a fence of all the thread's shared traffic, so once per tile and not per store.
__device__ __forceinline__ void fence_proxy_async_shared_cta() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for global memory: ordinary stores to global that a later TMA load of this thread reads.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Both, and remote shared memory.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// 9.7.13.4 fence.proxy.tensormap, after writing a tensor map to global memory by ordinary stores: release by the writer...
__device__ __forceinline__ void fence_proxy_tensormap_release_gpu() {
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

// ...and acquire, by each thread that uses the map, of its 128 bytes. Needs a synchronisation between the two of its own.
__device__ __forceinline__ void fence_proxy_tensormap_acquire_gpu(const CUtensorMap *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// 9.7.9.15 prefetch.tensormap: a hint, for maps in kernel parameters (__grid_constant__), constant or global memory.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 9.7.9.18 createpolicy.fractional: L2 eviction priority for the _hint forms below. A hint only.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ uint64_t createpolicy_evict_last() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 9.7.9 cp.async.bulk global -> shared. Addresses and bytes multiples of 16. No bounds, no zero fill: reading past an
// allocation faults.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t destination, const void *g_source, uint32_t bytes,
                                                   uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
                 "l"(g_source), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void cp_async_bulk_load_hint(uint32_t destination, const void *g_source, uint32_t bytes,
                                                        uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(g_source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// To the same shared offset of every CTA in cta_mask (bit = rank), each CTA's barrier at the same offset counting all the
// bytes.
__device__ __forceinline__ void cp_async_bulk_load_multicast(uint32_t destination, const void *g_source, uint32_t bytes,
                                                             uint32_t barrier, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            destination),
        "l"(g_source), "r"(bytes), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// 9.7.9 cp.async.bulk shared -> shared of a CTA of the cluster; both remote addresses from mapa() with the same rank. The
// source may be reused only once the receiver says it has arrived.
__device__ __forceinline__ void cp_async_bulk_push(uint32_t remote_destination, uint32_t source, uint32_t bytes,
                                                   uint32_t remote_barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     remote_destination),
                 "r"(source), "r"(bytes), "r"(remote_barrier)
                 : "memory");
}

// 9.7.9 cp.async.bulk shared -> global, into the current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void *g_destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(g_destination), "r"(source), "r"(bytes)
                 : "memory");
}

// 9.7.9 cp.async.bulk.prefetch: global -> L2, a hint. Address and bytes multiples of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch(const void *g_source, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(g_source), "r"(bytes) : "memory");
}

// 9.7.9 cp.async.bulk.tensor, tile mode, 2-D to 4-D. c0 is the coordinate of the contiguous dimension. Loads fill what lies
// outside the tensor (negative coordinates too) with zeros and count a whole box of bytes; stores skip what lies outside. The
// tensor bound is the only guard: rows of another sequence inside it are read and overwritten like any.
#define LINATTN_TENSOR_COPY(DIM, PARAMS, LOAD_AT, P1, P2, STORE_AT, ...)                                                       \
    __device__ __forceinline__ void cp_async_bulk_tensor_##DIM##_load(uint32_t destination, const CUtensorMap *map,            \
                                                                      uint32_t barrier, PARAMS) {                              \
        asm volatile("cp.async.bulk.tensor." #DIM                                                                              \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes "                                              \
                     "[%0], [%1, {" LOAD_AT "}], [%2];" ::"r"(destination),                                                    \
                     "l"(map), "r"(barrier), __VA_ARGS__                                                                       \
                     : "memory");                                                                                              \
    }                                                                                                                          \
    __device__ __forceinline__ void cp_async_bulk_tensor_##DIM##_load_hint(uint32_t destination, const CUtensorMap *map,       \
                                                                           uint32_t barrier, PARAMS, uint64_t policy) {        \
        asm volatile("cp.async.bulk.tensor." #DIM                                                                              \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"                                               \
                     ".L2::cache_hint [%0], [%1, {" LOAD_AT "}], [%2], " P1 ";" ::"r"(destination),                            \
                     "l"(map), "r"(barrier), __VA_ARGS__, "l"(policy)                                                          \
                     : "memory");                                                                                              \
    }                                                                                                                          \
    __device__ __forceinline__ void cp_async_bulk_tensor_##DIM##_load_multicast(uint32_t destination, const CUtensorMap *map,  \
                                                                                uint32_t barrier, PARAMS, uint16_t cta_mask) { \
        asm volatile("cp.async.bulk.tensor." #DIM                                                                              \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"                                               \
                     ".multicast::cluster [%0], [%1, {" LOAD_AT "}], [%2], " P1 ";" ::"r"(destination),                        \
                     "l"(map), "r"(barrier), __VA_ARGS__, "h"(cta_mask)                                                        \
                     : "memory");                                                                                              \
    }                                                                                                                          \
    __device__ __forceinline__ void cp_async_bulk_tensor_##DIM##_load_multicast_hint(                                          \
        uint32_t destination, const CUtensorMap *map, uint32_t barrier, PARAMS, uint16_t cta_mask, uint64_t policy) {          \
        asm volatile("cp.async.bulk.tensor." #DIM                                                                              \
                     ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"                                               \
                     ".multicast::cluster.L2::cache_hint [%0], [%1, {" LOAD_AT "}], [%2], " P1 ", " P2 ";" ::"r"(destination), \
                     "l"(map), "r"(barrier), __VA_ARGS__, "h"(cta_mask), "l"(policy)                                           \
                     : "memory");                                                                                              \
    }                                                                                                                          \
    __device__ __forceinline__ void cp_async_bulk_tensor_##DIM##_store(const CUtensorMap *map, uint32_t source, PARAMS) {      \
        asm volatile("cp.async.bulk.tensor." #DIM ".global.shared::cta.tile.bulk_group [%0, {" STORE_AT                        \
                     "}], [%1];" ::"l"(map),                                                                                   \
                     "r"(source), __VA_ARGS__                                                                                  \
                     : "memory");                                                                                              \
    }
#define LINATTN_C2 int32_t c0, int32_t c1
#define LINATTN_C3 LINATTN_C2, int32_t c2
#define LINATTN_C4 LINATTN_C3, int32_t c3
#define LINATTN_C5 LINATTN_C4, int32_t c4
LINATTN_TENSOR_COPY(2d, LINATTN_C2, "%3, %4", "%5", "%6", "%2, %3", "r"(c0), "r"(c1))
LINATTN_TENSOR_COPY(3d, LINATTN_C3, "%3, %4, %5", "%6", "%7", "%2, %3, %4", "r"(c0), "r"(c1), "r"(c2))
LINATTN_TENSOR_COPY(4d, LINATTN_C4, "%3, %4, %5, %6", "%7", "%8", "%2, %3, %4, %5", "r"(c0), "r"(c1), "r"(c2), "r"(c3))
LINATTN_TENSOR_COPY(5d, LINATTN_C5, "%3, %4, %5, %6, %7", "%8", "%9", "%2, %3, %4, %5, %6", "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                    "r"(c4))
#undef LINATTN_C5
#undef LINATTN_C4
#undef LINATTN_C3
#undef LINATTN_C2
#undef LINATTN_TENSOR_COPY

// 9.7.9 cp.async.bulk.commit_group: closes this thread's group of stores.
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// 9.7.9 cp.async.bulk.wait_group: until at most kPending groups of this thread are unfinished: their writes are then visible
// to this thread, and to others through it.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ... or until they have read their shared-memory source, which may then be overwritten. Does not say that anything was
// written.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace linattn::ptx
