// Threads of a CTA and CTAs of a cluster: named barriers, election, register reallocation, cluster barrier, distributed shared
// memory, programmatic dependent launch.
#pragma once
#include <cstdint>

namespace linattn::ptx {

// 9.7.13.1 barrier.sync on named barrier id (0 is __syncthreads). threads: a multiple of 32, all that take part, arrivals
// included. Orders memory among the participants only, generic proxy only. All threads of each warp take part.
__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, for warps that wait at different places in the code: bar.sync promises that the threads of a barrier run the same
// instruction, as compute-sanitizer's synccheck expects.
__device__ __forceinline__ void barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.13.1 barrier.arrive: counts this warp in and goes on. The arriving thread sees nothing of the others' memory.
__device__ __forceinline__ void bar_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 9.7.13.14 elect.sync over a converged full warp: true in exactly one lane, the same each time. Which one is not promised.
__device__ __forceinline__ bool elect_sync() {
    uint32_t elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected)::"memory");
    return elected;
}

// 9.7.19.5 setmaxnreg.inc: waits until the CTA's pool can raise this warp to kRegisters (24..256, a multiple of 8). All warps
// of the warpgroup execute it. New registers hold garbage. Ignored by ptxas (warning C7508) without a register cap at kernel
// entry.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24..256 in steps of 8");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

// 9.7.19.5 setmaxnreg.dec: gives registers above kRegisters back to the pool. Undefined if the warp has fewer already.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "setmaxnreg takes 24..256 in steps of 8");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
}

// 10 %cluster_ctarank, %cluster_nctarank: 0 and 1 without a cluster.
__device__ __forceinline__ uint32_t cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ uint32_t cluster_nctarank() {
    uint32_t size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// 9.7.13.3 barrier.cluster.arrive, release at cluster scope. Every thread of the cluster arrives, then waits, once each in
// turn.
__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without release: orders no memory; for "I am still here" before exit, or after fence_mbarrier_init().
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// 9.7.13.3 barrier.cluster.wait, acquire at cluster scope.
__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 9.7.9 mapa: the address in CTA `rank` of the cluster of what is at `address` here. Says nothing of whether that CTA has
// started or has ended: a cluster barrier must lie between its start and the first access, and between the last access and its
// end.
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// 9.7.9 st.shared::cluster. Weak: seen over there after a release/acquire pair at cluster scope.
__device__ __forceinline__ void st_shared_cluster_u32(uint32_t remote_address, uint32_t value) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(remote_address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_cluster_v4_u32(uint32_t remote_address, uint4 v) {
    asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(remote_address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

// 9.7.9 ld.shared::cluster. A round trip to another SM.
__device__ __forceinline__ uint32_t ld_shared_cluster_u32(uint32_t remote_address) {
    uint32_t value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote_address) : "memory");
    return value;
}

// 9.7.9 st.async: 16 bytes to another CTA of the cluster, counted as 16 transaction bytes on an mbarrier of that same CTA,
// weak. The waiter uses mbarrier_wait_parity_cluster(). This thread learns nothing of its completion.
__device__ __forceinline__ void st_async_v4_u32(uint32_t remote_address, uint4 v, uint32_t remote_barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote_address),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
        : "memory");
}

// 9.7.13.13 griddepcontrol.wait: until the grids this launch depends on have completed and flushed. Returns at once without
// PDL.
__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 9.7.13.13 griddepcontrol.launch_dependents: lets the next grid start once all CTAs have said so or ended. Not a release: the
// dependent sees this grid's memory only after its own griddepcontrol_wait().
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace linattn::ptx
