// Shared-memory addresses and plain accesses by address. Every wrapper of this folder takes shared memory as a 32-bit address
// in the .shared::cta window, converted once by shared_address(); explicit ld.shared keeps the compiler from falling back to
// generic LD. Section numbers in this folder are those of the PTX ISA 9.0 manual (CUDA 13.0).
#pragma once
#include <cstdint>

namespace linattn::ptx {

// Address of a __shared__ object in the .shared::cta window. Does not check that the pointer is shared.
__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 9.7.9 ld. Weak load: not ordered against other threads without a barrier between.
__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// Address a multiple of 8.
__device__ __forceinline__ uint2 ld_shared_v2_u32(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint4 ld_shared_v4_u32(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Address a multiple of 8.
__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}

// Address a multiple of 16.
__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// 9.7.9 st. Weak store through the generic proxy: TMA and wgmma see it only after fence_proxy_async_shared_cta() and a barrier.
__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Address a multiple of 8.
__device__ __forceinline__ void st_shared_v2_u32(uint32_t address, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}

__device__ __forceinline__ void st_shared_v4_u32(uint32_t address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

}  // namespace linattn::ptx
