// cp.async: per-thread 16-byte copies global -> shared that bypass registers (SASS LDGSTS). PTX ISA 9.7.9.
#pragma once
#include <cstdint>

namespace linattn::ptx {

// 9.7.9 cp.async.cg. Both addresses multiples of 16; caches in L2 only. Completes at cp_async_wait_group() of the same
// thread; other threads need a barrier after that wait, and wgmma needs fence_proxy_async_shared_cta() too.
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void *g_source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(g_source) : "memory");
}

// Reads source_bytes (0..16) and fills the rest of the 16 bytes with zeros; with 0 the source is not touched.
__device__ __forceinline__ void cp_async_16_zfill(uint32_t destination, const void *g_source, uint32_t source_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(g_source), "r"(source_bytes)
                 : "memory");
}

// 9.7.9 cp.async.commit_group: closes this thread's group. Waits for nothing.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// 9.7.9 cp.async.wait_group: until at most kPending of this thread's newest groups are in flight. Says nothing of other
// threads.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 9.7.13.15 cp.async.mbarrier.arrive.noinc: one arrival when all earlier cp.async of this thread have landed. The arrival must
// be among those the barrier was initialised with.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace linattn::ptx
